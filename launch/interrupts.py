"""Ctrl-C and signals: while a run is followed they are noted, and answered when the follower looks.

A signal that was ignored when the command started stays so: `nohup` is how users say that a run outlives its terminal.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

_ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end what runs inside as Ctrl-C does, by an exception: SystemExit, 128 + the signal.

    Only the first one counts, so that another does not end the cleaning up. Once a terminal is gone (SIGHUP), nothing
    more is written to it: that would fail.
    """
    terminals = [stream for stream in (sys.stdout, sys.stderr) if stream.isatty()]
    previous: dict[int, Any] = {}

    def end(number: int, frame: FrameType | None) -> None:
        for other in previous:
            signal.signal(other, signal.SIG_IGN)
        for terminal in terminals if number == signal.SIGHUP else ():
            os.dup2(os.open(os.devnull, os.O_WRONLY), terminal.fileno())
        raise SystemExit(128 + number)

    previous.update(_replace(end, *_ENDING))
    try:
        yield
    finally:
        _restore(previous)


def _replace(handler: Callable[[int, FrameType | None], None], *numbers: int) -> dict[int, Any]:
    """Put a handler in the place of those of the signals that are heeded; return the former ones."""
    heeded = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heeded}


def _restore(previous: Mapping[int, Any]) -> None:
    for number, handler in previous.items():
        signal.signal(number, handler)


class Interrupts:
    """Replaces the handlers of SIGINT, SIGTERM and SIGHUP between `with` and its end.

    `stop()` returns the number of the signal that ends the run, once there is one. Ctrl-C on a terminal asks first,
    while the run goes on; a second Ctrl-C is a yes. `hold` is called with True before the question and with False
    after the answer: nothing else should be shown meanwhile.
    """

    def __init__(self, always_yes: bool = False, hold: Callable[[bool], None] = lambda _: None) -> None:
        """Ask nothing where `always_yes`, or without a terminal."""
        self._hold = hold
        self._asks = not always_yes and sys.stdin.isatty() and sys.stderr.isatty()
        self._interrupts = 0
        self._ended_by: int | None = None
        self._asking = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._previous = _replace(self._note, signal.SIGINT, *_ENDING)
        return self

    def __exit__(self, *raised: object) -> None:
        _restore(self._previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
        else:
            self._ended_by = number

    def stop(self) -> int | None:
        """Return the signal that ends the run, None while it goes on; asks and reads answers without waiting."""
        if self._ended_by is None and self._interrupts:
            self._answer_interrupt()
        if self._ended_by is None and self._asking:
            self._read_answer()
        return self._ended_by

    def _answer_interrupt(self) -> None:
        self._interrupts = 0
        if not self._asks or self._asking:
            self._ended_by = signal.SIGINT
            return
        self._asking = True
        self._hold(True)
        print("\nStop the run? [Y/n] ", end="", file=sys.stderr, flush=True)

    def _read_answer(self) -> None:
        if not select.select([sys.stdin], [], [], 0)[0]:
            return
        self._asking = False
        answer = os.read(sys.stdin.fileno(), 1024).decode(errors="replace").strip().lower()
        if answer.startswith("n"):
            print("The run goes on.", file=sys.stderr, flush=True)
        else:
            self._ended_by = signal.SIGINT
        self._hold(False)


def signal_name(number: int) -> str:
    """Return `SIGTERM` for 15."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
