r"""Where a text states its final answer: `\boxed{..}` in the style of MATH, `#### ..` in that of GSM8K."""

from __future__ import annotations

import re

ANSWER_MARK = "####"
# An escape is one token, so that `\{` and `\}` do not count as braces and `\\{` does.
_TOKEN = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
_BARE = re.compile(r"\\(?:boxed|fbox)\s+([^\s{}$][^{}$\n]*)")
_EMPHASIS, _CURRENCIES = "*_` ", "€£"
_BOLD = re.compile(r"\*\*([^*]+)\*\*")
# Of two letters and more, as `eggs`, `km/h` or `cm^2`; not what is a number, a relation or a power itself.
_UNIT = re.compile(
    r"(?<=\d)\s+\(?(?!(?:pi|sqrt|sin|cos|tan|log|ln|exp|and|or|to)\b)"
    r"([A-Za-z]{2}[A-Za-z .]*(?:/[A-Za-z .]+)?)(?:(?<=[ckm]m|ft|in|yd)\^[23])?\)?$"
)
_ANY_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")


def last_boxed(text: str) -> str | None:
    r"""Return what stands in the last balanced `\boxed{..}` or `\fbox{..}`, else after the last `\boxed 7`, else None.

    One pass, linear in the length of the text. The form without braces occurs in MATH; it ends at `$`, a brace or the
    end of its line (Lewkowycz et al. 2022, arXiv 2206.14858, appendix D).
    """
    opened: list[int | None] = []  # per open brace: where its box begins, None for a plain brace
    found = None
    for token in _TOKEN.finditer(text):
        if token["box"]:
            opened.append(token.end())
        elif token["open"]:
            opened.append(None)
        elif token["close"] and opened and (start := opened.pop()) is not None:
            found = text[start : token.start()]
    if found is None:
        bare = _BARE.findall(text)
        found = bare[-1] if bare else None
    return found.strip() if found is not None else None


def marked(text: str) -> str | None:
    """Return the rest of the line after the last `####`, None where there is no such mark or nothing after it.

    What is bold in it no longer is; a `####` that closes a heading, as the last thing that is said, is no mark.
    """
    _, mark, rest = text.rstrip().rstrip("#").rpartition(ANSWER_MARK)
    lines = rest.strip().splitlines()
    return _BOLD.sub(r"\1", lines[0]).strip() if mark and lines else None


def tidied(said: str) -> str:
    """Return an answer without what belongs to the sentence around it: emphasis, a currency's sign, a full stop."""
    said = said.strip(_EMPHASIS).lstrip(_CURRENCIES)
    return said if said.endswith(r"\right.") else said.rstrip(".").strip(_EMPHASIS)


def with_unit(said: str) -> str:
    r"""Return an answer whose last words, behind a number, are a unit to math-verify: `18 dollars` is no product."""
    return _UNIT.sub(r"\\text{ \1}", said)


def has_box(text: str) -> bool:
    r"""Return whether a text begins a `\boxed` or `\fbox`, balanced or not."""
    return _ANY_BOX.search(text) is not None
