"""Losses over the target tokens of a micro-batch.

Each loss returns the sum over the masked tokens and a dict of sums of what is worth watching; the engine divides both
by the number of masked tokens of the whole batch, so that the result does not depend on how the batch was cut. Other
means than that over tokens come as weights of the tokens; see `hetrl.runtime.rl.experience.token_weights`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hetrl.errors import HetrlError
from hetrl.runtime.rl.divergence import BOUNDS, ESTIMATORS, LARGEST_EXPONENT, bounded_weights, kl_estimate
from hetrl.runtime.wire import LossSettings

Sums = dict[str, torch.Tensor]

POLICY, SUPERVISED, VALUE = "policy", "supervised", "value"
LOSSES = (POLICY, SUPERVISED, VALUE)
RATIOS = ("token", "sequence")
COEFFICIENTS = (
    "ratio",
    *("clip_low", "clip_high", "dual_clip", "kl_coefficient", "kl_estimator", "entropy_coefficient"),
    *("first_step", "correction", "correction_cap", "correction_bounds"),
)
METRICS = (
    *("loss", "ratio", "clip_fraction", "dual_clip_fraction", "logprob_difference", "kl", "entropy"),
    *("importance_weight", "importance_cut", "mismatch", "fresh"),
    "value_clip_fraction",
)
_DEFAULTS = LossSettings()


def policy_loss(
    logprobs: torch.Tensor,
    mask: torch.Tensor,
    extras: Mapping[str, torch.Tensor],
    settings: LossSettings,
    entropy: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Sums]:
    """Return the clipped surrogate of PPO and GRPO with its optional terms, summed over the masked tokens.

    All tensors are [b, s]; `mask` is bool. `extras` are advantages, old_logprobs and, where they are given,
    reference_logprobs, importance_weights, token_weights, sampler_logprobs and fresh. With S of `clipped_surrogate` at
    r of `probability_ratio`, a token is
        token_weight (-importance_weight S + kl_coefficient KL - entropy_coefficient entropy)
    KL is `kl_estimate` of d = reference_logprob - logprob: the term of GRPO (arXiv 2402.03300, equation 3). The entropy
    bonus is PPO's (arXiv 1707.06347, equation 9). The weights are constants, 1 where they are not given: see
    `importance_weights` and `token_weights` of hetrl.runtime.rl.divergence and experience. Exponents are held within
    +-LARGEST_EXPONENT. A coefficient above 0 needs its tensor; a reference without coefficient is a metric only.

    In the `first_step` after the weights that old_logprobs are of, nothing has changed: they are the step's own,
    detached, so that r of either kind is 1 and its gradient that of the log-prob, and no pass has to compute them
    beforehand. With `correction` the importance weights are exp(old_logprob - sampler_logprob), bounded as
    `bounded_weights` says: those of tokens, whatever the ratio is of.

    Metrics (sums, not weighted): those of `clipped_surrogate`, `_importance` and `_penalties`, ratio and
    logprob_difference (|logprob - old_logprob|).
    """
    old = logprobs.detach() if settings.first_step else extras["old_logprobs"]
    difference = _masked(logprobs - old, mask)
    ratio = probability_ratio(difference, mask, settings.ratio)
    surrogate, sums = clipped_surrogate(ratio, _masked(extras["advantages"], mask), settings)
    sums["ratio"] = _masked(ratio, mask).sum()
    sums["logprob_difference"] = difference.abs().sum()
    weights, of_weights = _importance(logprobs, old, mask, extras, settings)
    penalties, of_penalties = _penalties(logprobs, mask, extras, settings, entropy)
    loss = -surrogate
    for weight in weights:
        loss = loss * weight
    for penalty in penalties:
        loss = loss + penalty
    if "token_weights" in extras:
        loss = loss * _masked(extras["token_weights"], mask)
    return loss.sum(), {name: value.detach() for name, value in (sums | of_weights | of_penalties).items()}


def _importance(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    mask: torch.Tensor,
    extras: Mapping[str, torch.Tensor],
    settings: LossSettings,
) -> tuple[list[torch.Tensor], Sums]:
    """Return the factors [b, s] of the surrogate, and sums: what they are, and how far the sampler was.

    importance_weight and importance_cut are of `correction`; mismatch is |logprob - sampler_logprob| of the tokens that
    `fresh` (0 or 1) marks, with their number.
    """
    weights, sums = [], Sums()
    if "importance_weights" in extras:
        weights.append(_masked(extras["importance_weights"], mask))
    if settings.correction is not None:
        weight, cut = _sampler_weights(_masked(old - extras["sampler_logprobs"], mask), settings)
        weights.append(weight)
        sums |= {"importance_weight": _masked(weight, mask).sum(), "importance_cut": _masked(cut, mask).sum()}
    if "fresh" in extras:
        fresh, apart = _masked(extras["fresh"], mask), _masked(logprobs - extras["sampler_logprobs"], mask).abs()
        sums |= {"mismatch": (apart * fresh).sum(), "fresh": fresh.sum()}
    return weights, sums


def _penalties(
    logprobs: torch.Tensor,
    mask: torch.Tensor,
    extras: Mapping[str, torch.Tensor],
    settings: LossSettings,
    entropy: torch.Tensor | None,
) -> tuple[list[torch.Tensor], Sums]:
    """Return what is added to a token's loss [b, s], and the sums kl and entropy where their inputs are given.

    Raises HetrlError for a coefficient above 0 without its tensor.
    """
    penalties, sums = [], Sums()
    if "reference_logprobs" in extras:
        distance = _masked(extras["reference_logprobs"] - logprobs, mask)
        kl = kl_estimate(settings.kl_estimator, distance, _bounded_exp)
        sums["kl"] = kl.sum()
        penalties += [settings.kl_coefficient * kl] if settings.kl_coefficient else []
    elif settings.kl_coefficient:
        raise HetrlError("policy loss: kl_coefficient needs reference_logprobs in the batch; give them or set it to 0")
    if entropy is not None:
        sums["entropy"] = _masked(entropy, mask).sum()
    if settings.entropy_coefficient:
        if entropy is None or not entropy.requires_grad:  # the bonus would silently do nothing
            raise HetrlError("policy loss: entropy_coefficient needs an entropy with a gradient; set it to 0")
        penalties.append(-settings.entropy_coefficient * _masked(entropy, mask))
    return penalties, sums


def _sampler_weights(difference: torch.Tensor, settings: LossSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of `settings.correction` from old_logprob - sampler_logprob, and what it cut."""
    correction, cap, bounds = settings.correction or "none", settings.correction_cap, settings.correction_bounds
    return bounded_weights(_bounded_exp(difference), correction, cap, bounds)


def probability_ratio(difference: torch.Tensor, mask: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the ratio r [b, s] from d = logprob - old_logprob, which is 0 outside the mask; each row is a sample.

    token     exp(d): PPO (arXiv 1707.06347, section 3)
    sequence  s = exp(mean of d over the response's masked tokens), of which each token has sg[s] exp(d - sg[d]), where
              sg stops the gradient: GSPO in its token variant (arXiv 2507.18071, equation 7 and section 4.3). A
              sequence is clipped as a whole, and sum_t r A / |o| has the gradient s A (sum_t grad d) / |o| of GSPO;
              where tokens differ in their weight, each keeps its own.
    """
    if kind == "token":
        return _bounded_exp(difference)
    of_sequence = _bounded_exp(difference.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1))
    return of_sequence.detach() * (difference - difference.detach()).exp()


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, settings: LossSettings
) -> tuple[torch.Tensor, Sums]:
    """Return the surrogate of each token, to be maximised, and the sums of the tokens that each bound holds.

    With ratio r and advantage A
        S = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A);  with dual_clip c > 1 and A < 0: max(S, c A)
    Sources: PPO (arXiv 1707.06347, equation 7); separate bounds: DAPO (arXiv 2503.14476, "clip-higher"); dual clip: Ye
    et al. (arXiv 1912.09729, equation 5), which keeps a token that became far more likely from ruling the step.
    """
    plain = ratio * advantages
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high) * advantages
    surrogate = torch.minimum(plain, clipped)
    sums = {"clip_fraction": (clipped < plain).sum().to(ratio.dtype)}
    if (dual_clip := settings.dual_clip) is not None:
        held = (advantages < 0) & (surrogate < dual_clip * advantages)
        surrogate = torch.where(held, dual_clip * advantages, surrogate)
        sums["dual_clip_fraction"] = held.sum().to(ratio.dtype)
    return surrogate, sums


def value_loss(
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    clip: float | None = None,
    token_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Sums]:
    """Return the squared error of a value model against `returns`, summed over the masked tokens; tensors are [b, s].

    A token's loss is max((V - R)^2, (V_clip - R)^2) / 2 with V_clip = clip(V, V_old - clip, V_old + clip); without
    `clip`, (V - R)^2 / 2. Source: PPO (arXiv 1707.06347, equation 9) with the value clip of its reference
    implementation (Engstrom et al., arXiv 2005.12729, section 3). Metric (sum): value_clip_fraction, the tokens whose
    clipped branch is the larger one.
    """
    values, old_values, returns = (_masked(tensor, mask) for tensor in (values, old_values, returns))
    loss, sums = (values - returns) ** 2, Sums()
    if clip is not None:
        clipped = (old_values + (values - old_values).clamp(-clip, clip) - returns) ** 2
        sums["value_clip_fraction"] = (clipped > loss).sum().to(values.dtype)
        loss = torch.maximum(loss, clipped)
    if token_weights is not None:
        loss = loss * _masked(token_weights, mask)
    return loss.sum() / 2, sums


def supervised_loss(
    logprobs: torch.Tensor, mask: torch.Tensor, *, entropy: torch.Tensor | None = None
) -> tuple[torch.Tensor, Sums]:
    """Return the negative log-likelihood of the masked tokens, summed; all tensors are [b, s]. Metric: entropy."""
    sums = {} if entropy is None else {"entropy": _masked(entropy, mask).sum().detach()}
    return -_masked(logprobs, mask).sum(), sums


def evaluate(
    outputs: torch.Tensor,
    mask: torch.Tensor,
    extras: Mapping[str, torch.Tensor],
    settings: LossSettings,
    entropy: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Sums]:
    """Compute the loss that `settings` name of log-probs, or of values; settings and `extras` as `check` takes them."""
    if settings.loss == SUPERVISED:
        return supervised_loss(outputs, mask, entropy=entropy)
    if settings.loss == VALUE:
        old, returns = extras["old_values"], extras["returns"]
        return value_loss(outputs, mask, old_values=old, returns=returns, clip=settings.value_clip)
    return policy_loss(outputs, mask, extras, settings, entropy)


def check(settings: LossSettings, extras: Mapping[str, object]) -> None:
    """Raise HetrlError for an unknown loss or a wrong coefficient, or for a batch without an array that the loss needs.

    A coefficient of another loss, set to anything but its default, is wrong as well.
    """
    loss = settings.loss
    if loss not in LOSSES:
        raise HetrlError(f'unknown loss "{loss}"; known: {", ".join(LOSSES)}')
    own = {POLICY: COEFFICIENTS, VALUE: ("value_clip",), SUPERVISED: ()}[loss]
    for name in ("value_clip", *COEFFICIENTS):
        if name not in own and getattr(settings, name) != getattr(_DEFAULTS, name):
            known = ", ".join(("learning_rate", "temperature", *own))
            raise HetrlError(f'{loss} loss: unknown hyper-parameter "{name}"; known: {known}')
    if loss == POLICY:
        _check_policy(settings, extras)
    for name in _needed(settings, extras):
        if name not in extras:
            raise HetrlError(f'{loss} loss: the batch has no "{name}"; it has {sorted(extras) or "no extras"}')


def _check_policy(settings: LossSettings, extras: Mapping[str, object]) -> None:
    loss = settings.loss
    if settings.ratio not in RATIOS:
        raise HetrlError(f'{loss} loss: ratio "{settings.ratio}" is not one of {", ".join(RATIOS)}')
    if settings.kl_estimator not in ESTIMATORS:
        raise HetrlError(f'{loss} loss: KL estimator "{settings.kl_estimator}" is not one of {", ".join(ESTIMATORS)}')
    if settings.dual_clip is not None and settings.dual_clip <= 1.0:
        raise HetrlError(f"{loss} loss: dual_clip is {settings.dual_clip}; it must be above 1")
    if settings.correction is not None and settings.correction not in BOUNDS:
        raise HetrlError(f'{loss} loss: correction "{settings.correction}" is not one of {", ".join(BOUNDS)}')
    if settings.first_step and "old_logprobs" in extras:
        raise HetrlError(f"{loss} loss: in a first_step old_logprobs are its own; leave them out of the batch")


def _needed(settings: LossSettings, extras: Mapping[str, object]) -> list[str]:
    """Return the arrays that a loss reads."""
    if settings.loss == VALUE:
        return ["old_values", "returns"]
    if settings.loss == SUPERVISED:
        return []
    needed = ["advantages"] if settings.first_step else ["old_logprobs", "advantages"]
    needed += ["reference_logprobs"] if settings.kl_coefficient else []
    return needed + (["sampler_logprobs"] if settings.correction is not None or "fresh" in extras else [])


def _masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return `values` with exact zeros outside the mask, whatever stands there, and no gradient from there."""
    return torch.where(mask, values, torch.zeros_like(values))


def _bounded_exp(exponent: torch.Tensor) -> torch.Tensor:
    return exponent.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT).exp()
