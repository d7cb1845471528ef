"""The bash that runs at a site, one script per round trip, and the answers of all of them.

A script is a file of this folder. It says in its head which parts its answer has, and declares what it is given;
prelude.sh, which stands in front of each, says what an answer looks like.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent
_DECLARED = re.compile(r"^declare(?: -[aA])? ([\w ]+)", re.MULTILINE)
_END = re.compile(r"end (\d{1,3})")
_QUOTED = re.compile(r" +@ ")


@dataclass(frozen=True)
class Part:
    """A part of an answer: what a command printed, and its exit code; None where the answer was cut off before."""

    text: str = ""
    code: int | None = None


def script(*names: str, **given: str | int | Sequence[str] | Mapping[str, int]) -> str:
    """Return bash that runs these files one after the other with what they declare: strings, arrays, counts by name.

    The first line says which script it is.
    """
    body = "\n".join((SCRIPTS / f"{name}.sh").read_text() for name in ("prelude", *names))
    declared = {name for line in _DECLARED.findall(body) for name in line.split()}
    if declared != given.keys():
        raise TypeError(f"{names[-1]}.sh: declares {sorted(declared)}, is given {sorted(given)}")
    assigned = (_assignment(name, value) for name, value in given.items())
    return "\n".join((f"# {names[-1]}.sh", *assigned, body))


def _assignment(name: str, value: str | int | Sequence[str] | Mapping[str, int]) -> str:
    if isinstance(value, str | int):
        return f"{name}={shlex.quote(str(value))}"
    if isinstance(value, Mapping):
        return f"declare -A {name}=({' '.join(f'[{shlex.quote(key)}]={count}' for key, count in value.items())})"
    return f"{name}=({shlex.join(value)})"


def parse(text: str) -> dict[str, Part]:
    """Return the parts of an answer by their names; lines outside of them are left out."""
    parts: dict[str, Part] = {}
    name: str | None = None
    lines: list[str] = []
    for line in text.split("\n")[:-1]:  # what has no end was cut off
        if not line.startswith("@ "):
            lines.append(line[1:] if _QUOTED.match(line) else line)
        elif end := _END.fullmatch(line, 2):
            if name is not None:
                parts[name] = Part("".join(f"{line}\n" for line in lines), int(end[1]))
            name = None
        else:
            name, lines = line[2:], []
            parts[name] = Part()
    return parts
