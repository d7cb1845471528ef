"""What `hetrl submit` shows while a run goes on: a line per event, and on a terminal a bar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from launch.show import Lines
from launch.state import State


class Screen:
    """Shows events on a console between `with` and its end."""

    def __init__(self, console: Console, steps: int) -> None:
        """Show a bar of so many steps where the console is a terminal."""
        self._console = console
        self._lines = Lines()
        self._holding = False
        self._held: list[str] = []
        bar = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:g}/{task.total:g}"))
        self._bar = Progress(*bar, TimeElapsedColumn(), console=console, transient=True)
        self._task = self._bar.add_task("starting", total=steps)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._release()
        if self._console.is_terminal:
            self._bar.stop()

    def _release(self) -> None:
        for line in self._held:
            say(self._console, line)
        self._held = []

    def show(self, event: Mapping[str, Any], state: State) -> None:
        """Print the line of an event and move the bar."""
        self._bar.update(self._task, description=state.phase, completed=state.step)
        if (line := self._lines.line(event)) is None:
            return
        if self._holding:
            self._held.append(line)
        else:
            say(self._console, line)

    def hold(self, on: bool) -> None:
        """Show nothing while a question waits for its answer; then what came meanwhile."""
        self._holding = on
        if not on:
            self._release()
        if self._console.is_terminal:
            (self._bar.stop if on else self._bar.start)()


def say(console: Console, text: str) -> None:
    """Print plain text as it is: no markup, no colours, no line breaks of our own."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
