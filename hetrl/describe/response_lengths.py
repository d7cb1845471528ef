"""The key `batch.response_lengths` of an experiment: how long responses are expected to be, for the plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from hetrl.describe.yaml_file import AtLeastOne, Strict
from hetrl.errors import UsageError
from hetrl.lengths import Lengths, empirical, lognormal_sigma

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_KEYS = {
    "fixed": (set(), set()),
    "uniform": ({"low", "high"}, set()),
    "lognormal": ({"mean"}, {"sigma", "p95"}),
    "empirical": ({"path"}, set()),
}  # of each kind: the keys that it needs, and those of which it needs one
_LINE = '{"tokens": 812}'


class ResponseLengths(Strict):
    """A distribution of response lengths in tokens, cut off at `batch.response_tokens`.

    fixed (no other key): every response has `response_tokens`; uniform: `low` to `high`; lognormal: `mean` with `sigma`
    of the logarithm or the 95th percentile `p95`; empirical: `path` of a file with a length per line.
    """

    kind: Literal["fixed", "uniform", "lognormal", "empirical"]
    mean: Positive | None = None
    sigma: Positive | None = None
    p95: Positive | None = None
    low: AtLeastOne | None = None
    high: AtLeastOne | None = None
    path: str | None = None

    @model_validator(mode="after")
    def _has_the_keys_of_its_kind(self) -> ResponseLengths:
        needed, one_of = _KEYS[self.kind]
        given = {name for name in type(self).model_fields if name != "kind" and getattr(self, name) is not None}
        wanted = [*sorted(needed), *([" or ".join(sorted(one_of))] if one_of else [])]
        if given - needed - one_of or needed - given or (one_of and len(given & one_of) != 1):
            keys = " and ".join(wanted) or "no other key"
            raise ValueError(f"kind {self.kind} takes {keys}, got {', '.join(sorted(given)) or 'none'}")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low ({self.low}) must not be above high ({self.high})")
        return self

    def to_lengths(self, response_tokens: int, values: Sequence[int] = ()) -> Lengths:
        """Return the distribution; `values` are the lengths in the file of kind empirical (`read_lengths`).

        Raises UsageError for lengths that `response_tokens` does not allow.
        """
        key = "batch.response_lengths"
        if self.kind == "fixed":
            return Lengths(response_tokens, response_tokens)
        if self.kind == "empirical":
            return empirical(values, response_tokens)
        if self.low is not None and self.high is not None:
            if self.high > response_tokens:
                raise UsageError(
                    f"{key}: high ({self.high}) is above batch.response_tokens ({response_tokens}); lower it or raise "
                    "response_tokens"
                )
            return Lengths((self.low + self.high) / 2, response_tokens, "uniform", (self.high - self.low) / 2)
        assert self.mean is not None
        if self.mean >= response_tokens:
            raise UsageError(
                f"{key}: mean ({self.mean:g}) must be below batch.response_tokens ({response_tokens}), where responses "
                "are cut off; lower it or raise response_tokens"
            )
        try:
            sigma = self.sigma or lognormal_sigma(self.mean, response_tokens, self.p95 or 0.0)
        except ValueError as error:
            raise UsageError(f"{key}: {error}") from None
        return Lengths(self.mean, response_tokens, "lognormal", sigma)


def read_lengths(path: Path) -> list[int]:
    """Return the lengths of a file: a whole number per line, or JSON objects with the key `tokens`; else UsageError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from None
    found = [_length(line, f"{path}: line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise UsageError(f"{path}: holds no lengths; write one per line, as 812 or {_LINE}")
    return found


def _length(line: str, where: str) -> int:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    value = value.get("tokens") if isinstance(value, dict) else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{where}: {line.strip()[:40]!r} is no number of tokens; write 812 or {_LINE}")
    return value
