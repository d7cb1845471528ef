"""How long responses are: a distribution of tokens, the moments that the cost model needs, and draws from it."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

GRID_CELLS = 256  # of the numeric integrals over lengths; means come out within 0.1 %
KEPT_VALUES = 1000  # of an empirical distribution: more are thinned to so many quantiles
LOGNORMAL_SIGMA = 1.0  # where only a mean is known: half of a batch's tokens in its longest sixth
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Lengths:
    """The distribution of response lengths in tokens, `mean` on average and never above `maximum`.

    fixed:     every sample has `maximum`
    uniform:   between mean - spread and mean + spread (without `spread`: up to `maximum`)
    lognormal: X cut off at `maximum`, log X of standard deviation `spread` (without it 1), E[min(X, maximum)] = mean
    empirical: `values`, in ascending order, each as likely as the others
    """

    mean: float
    maximum: int
    kind: str = "fixed"
    spread: float | None = None
    values: tuple[int, ...] = ()

    def __hash__(self) -> int:
        """Return a hash that reads `values` once only: lengths are in the key of every remembered cost."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.mean, self.maximum, self.kind, self.spread, self.values))

    @cached_property
    def second_moment(self) -> float:
        """Return E[L^2] in tokens squared."""
        if self.kind == "fixed":
            return float(self.maximum) ** 2
        if self.kind == "uniform":
            return self.mean**2 + self._half_width**2 / 3
        if self.kind == "empirical":
            return sum(value * value for value in self.values) / len(self.values)
        mu, sigma, cut = self._log_median, self._sigma, math.log(self.maximum)
        below = math.exp(2 * (mu + sigma * sigma)) * _NORMAL.cdf((cut - mu) / sigma - 2 * sigma)
        return below + self.maximum**2 * (1 - _NORMAL.cdf((cut - mu) / sigma))

    @property
    def deviation(self) -> float:
        """Return the standard deviation in tokens."""
        return math.sqrt(max(self.second_moment - self.mean**2, 0.0))

    def longest_of(self, count: int) -> float:
        """Return the expected length of the longest of `count` samples: the integral of 1 - F(x)^count."""
        return _longest(self, count)

    @property
    def cell_tokens(self) -> float:
        """Return the width of a cell of `survival` in tokens."""
        return self.maximum / GRID_CELLS

    @cached_property
    def survival(self) -> NDArray[np.float64]:
        """Return P(L > x) at the middle of each of `GRID_CELLS` cells of 0..maximum, scaled to the exact mean."""
        middles = (np.arange(GRID_CELLS) + 0.5) * self.cell_tokens
        found = np.array([1 - self._exact_share_up_to(float(x)) for x in middles])
        return _with_sum(found, self.mean / self.cell_tokens)

    def _exact_share_up_to(self, tokens: float) -> float:
        """Return P(L <= tokens) below the maximum."""
        if self.kind == "fixed":
            return 0.0
        if self.kind == "uniform":
            return min(max((tokens - self.mean + self._half_width) / max(2 * self._half_width, 1e-9), 0.0), 1.0)
        if self.kind == "empirical":
            return bisect_right(self.values, tokens) / len(self.values)
        return _NORMAL.cdf((math.log(tokens) - self._log_median) / self._sigma)

    def draw(self, count: int, rng: random.Random) -> tuple[int, ...]:
        """Return drawn lengths: whole tokens, at least 1, at most `maximum`."""
        if self.kind == "fixed":
            return (self.maximum,) * count
        if self.kind == "empirical":
            return tuple(rng.choices(self.values, k=count))
        if self.kind == "uniform":
            half = self._half_width
            drawn = [rng.uniform(self.mean - half, self.mean + half) for _ in range(count)]
        else:
            drawn = [rng.lognormvariate(self._log_median, self._sigma) for _ in range(count)]
        return tuple(min(max(round(length), 1), self.maximum) for length in drawn)

    def typical(self, count: int) -> tuple[int, ...]:
        """Return lengths in ascending order, each in the middle of one of `count` equally likely parts."""
        return tuple(min(max(round(self._quantile((i + 0.5) / count)), 1), self.maximum) for i in range(count))

    def _quantile(self, share: float) -> float:
        """Return the tokens that this share of the samples is below, before those above the maximum are cut off."""
        if self.kind == "fixed":
            return self.maximum
        if self.kind == "empirical":
            return self.values[int(share * len(self.values))]
        if self.kind == "uniform":
            return self.mean + (2 * share - 1) * self._half_width
        return math.exp(self._log_median + self._sigma * _NORMAL.inv_cdf(share))

    @property
    def _half_width(self) -> float:
        return self.maximum - self.mean if self.spread is None else self.spread

    @property
    def _sigma(self) -> float:
        return LOGNORMAL_SIGMA if self.spread is None else self.spread

    @cached_property
    def _log_median(self) -> float:
        return log_median(self.mean, self.maximum, self._sigma)


@lru_cache(maxsize=1024)
def _longest(response: Lengths, count: int) -> float:
    if response.kind == "fixed":
        return float(response.maximum)
    return float(np.sum(1 - (1 - response.survival) ** count)) * response.cell_tokens


def _with_sum(survival: NDArray[np.float64], wanted: float) -> NDArray[np.float64]:
    """Return the survival function scaled where it is between 0 and 1, so that it sums to what is wanted."""
    inner = (survival > 0) & (survival < 1)
    between = float(survival[inner].sum())
    if between <= 0:
        return survival
    scale = (wanted - float((survival >= 1).sum())) / between
    return np.where(inner, np.clip(survival * scale, 0.0, 1.0), survival)


def log_median(mean: float, maximum: int, sigma: float) -> float:
    """Return mu with E[min(X, maximum)] = mean for log X ~ Normal(mu, sigma), by bisection on its closed form.

    E[min(X, c)] = e^(mu + s^2/2) Phi((ln c - mu)/s - s) + c (1 - Phi((ln c - mu)/s)): the limited expected value of a
    lognormal (Klugman, Panjer, Willmot, Loss Models, appendix A).
    """
    cut = math.log(maximum)
    low, high = math.log(mean) - sigma * sigma, cut + 10 * sigma
    for _ in range(60):  # halvings: more than a double has bits
        mu = (low + high) / 2
        kept = math.exp(mu + sigma * sigma / 2) * _NORMAL.cdf((cut - mu) / sigma - sigma)
        short = kept + maximum * (1 - _NORMAL.cdf((cut - mu) / sigma)) < mean
        low, high = (mu, high) if short else (low, mu)
    return (low + high) / 2


def lognormal_sigma(mean: float, maximum: int, p95: float) -> float:
    """Return sigma with the 95th percentile `p95` and E[min(X, maximum)] = mean; ValueError where none has both.

    At a given percentile the mean falls while sigma rises, up to 1.645, where the mean of the uncut X is least.
    """
    quantile = _NORMAL.inv_cdf(0.95)
    if not mean < p95 < maximum:
        raise ValueError(f"p95 ({p95:g}) must lie between the mean ({mean:g}) and the longest response ({maximum})")
    low, high = 0.01, quantile
    if log_median(mean, maximum, high) + quantile * high < math.log(p95):
        raise ValueError(f"no lognormal has the mean {mean:g} and p95 {p95:g}: give sigma, or kind empirical")
    for _ in range(60):
        sigma = (low + high) / 2
        short = log_median(mean, maximum, sigma) + quantile * sigma < math.log(p95)
        low, high = (sigma, high) if short else (low, sigma)
    return (low + high) / 2


def empirical(values: Sequence[int], maximum: int) -> Lengths:
    """Return the distribution of measured lengths, those above `maximum` cut off there; ValueError without any."""
    if not values:
        raise ValueError("no lengths")
    if min(values) < 1:
        raise ValueError(f"a length of {min(values)} tokens; lengths are 1 and more")
    ordered = sorted(min(value, maximum) for value in values)
    if len(ordered) > KEPT_VALUES:
        ordered = [ordered[(2 * i + 1) * len(ordered) // (2 * KEPT_VALUES)] for i in range(KEPT_VALUES)]
    return Lengths(sum(ordered) / len(ordered), maximum, "empirical", values=tuple(ordered))
