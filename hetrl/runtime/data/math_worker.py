"""Compare answers with math-verify, one at a time: `python -m hetrl.runtime.data.math_worker PARENT_PID CPU_SECONDS`.

A process of its own, because an answer may be `9^{9^{9^{9}}}`: nothing inside Python stops such a power, the kernel
does. It reads lines of JSON {"said": .., "answer": ..} and writes {"verdict": .., "cause": ..} for each. It ends when
its parent or its input does, and when one comparison takes more than CPU_SECONDS: then by SIGPROF.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from typing import Any, TextIO

from hetrl.runtime.parent_death import end_with_parent

MEMORY_BYTES = 1 << 30


def check(said: str, answer: str) -> tuple[str, str]:
    """Return verdict and cause of one answer; both texts as they would stand in mathematics (LaTeX or plain).

    Wrong needs both to be read as expressions and every comparison to end without an error; what math-verify
    compares, and how closely (units, thousands separators, percent, 6 decimals), is its own definition:
    https://github.com/huggingface/Math-Verify
    """
    from sympy import Basic, MatrixBase

    accepted = [item for item in _read(answer) if isinstance(item, (Basic, MatrixBase))]
    given = [item for item in _read(said) if isinstance(item, (Basic, MatrixBase))]
    if not accepted:
        return "unscorable", "reference answer not readable"
    if not given:
        return "unscorable", "answer not readable"
    failed = False
    for one in accepted:
        for other in given:
            equal = _equal(one, other)
            if equal:
                return "right", ""
            failed |= equal is None
    return ("unscorable", "comparison failed") if failed else ("wrong", "")


def _read(text: str) -> list[Any]:
    """Return the expressions that a text may mean, best first."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    # A box makes math-verify take the whole text, not a number somewhere in it.
    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    found: list[Any] = parse(f"\\boxed{{{text}}}", targets, parsing_timeout=None, raise_on_error=True)
    return found


def _equal(accepted: Any, given: Any) -> bool | None:
    """Return whether math-verify takes two expressions for equal, None where it failed."""
    from math_verify import verify

    try:
        return bool(verify(accepted, given, timeout_seconds=None, raise_on_error=True))
    except MemoryError:
        raise
    except Exception:  # whatever sympy raises on an expression that a model made up
        return None


def answer_line(line: bytes, cpu_seconds: float) -> dict[str, str]:
    """Return the answer to one line of input; the process is killed when it takes longer."""
    request = json.loads(line)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        verdict, cause = check(request["said"], request["answer"])
    except MemoryError:
        verdict, cause = "unscorable", "memory"
    except Exception as error:  # parsers raise anything on text that a model made up
        verdict, cause = "unscorable", f"parser failed: {type(error).__name__}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {"verdict": verdict, "cause": cause}


def _bind_to(parent: int) -> None:
    """Die with the parent, also when it is killed, and keep to the memory limit."""
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        sys.exit(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent says when to end


def _take_output() -> TextIO:
    """Keep stdout for answers alone: what the parsers print goes nowhere."""
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.dup2(nowhere, sys.stderr.fileno())
    return output


def main() -> int:
    """Answer line by line."""
    _bind_to(int(sys.argv[1]))
    cpu_seconds = float(sys.argv[2])
    logging.disable()  # math-verify logs what it is given
    check("1", "1")  # imports everything, so that the first answer's time is its own
    output = _take_output()
    print("ready", file=output, flush=True)
    for line in sys.stdin.buffer:
        print(json.dumps(answer_line(line, cpu_seconds)), file=output, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
