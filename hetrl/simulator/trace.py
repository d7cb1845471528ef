"""What a simulation leaves: who did what from when to when, and its Chrome trace (opens in Perfetto).

Format: "Trace Event Format" (Google, document of the Chrome tracing project): complete events, phase `X`, with `ts` and
`dur` in microseconds; metadata events, phase `M`, name processes and threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetrl.hardware import Device


@dataclass(frozen=True)
class Span:
    """Something that took from `start` to `start + seconds` on a thread (a device or a link) of a site."""

    site: str
    thread: str
    name: str
    category: str  # the task, or `link`
    start: float
    seconds: float


@dataclass
class Recorder:
    """Keeps spans while a simulation runs; one span of a stage counts for all its devices."""

    _devices: list[tuple[tuple[Device, ...], str, str, float, float]] = field(default_factory=list)
    _links: list[tuple[tuple[str, str], str, float, float]] = field(default_factory=list)

    def on_devices(self, devices: tuple[Device, ...], name: str, task: str, start: float, seconds: float) -> None:
        """Note what these devices did together."""
        if seconds > 0:
            self._devices.append((devices, name, task, start, seconds))

    def on_link(self, link: tuple[str, str], name: str, start: float, seconds: float) -> None:
        """Note what crossed from one site to another."""
        self._links.append((link, name, start, seconds))

    def spans(self) -> tuple[Span, ...]:
        """Return everything in the order of time, concurrent flows of one link on threads of their own."""
        found = [
            Span(device.site, device.id, name, task, start, seconds)
            for devices, name, task, start, seconds in self._devices
            for device in devices
        ]
        found += self._link_spans()
        return tuple(sorted(found, key=lambda span: (span.start, span.site, span.thread)))

    def _link_spans(self) -> Iterable[Span]:
        free: dict[tuple[str, str], list[float]] = {}  # when each thread of a link is free again
        for link, name, start, seconds in sorted(self._links, key=lambda entry: entry[2]):
            lanes = free.setdefault(link, [])
            lane = next((index for index, until in enumerate(lanes) if until <= start), len(lanes))
            lanes[lane:] = [start + seconds, *lanes[lane + 1 :]]
            thread = f"to {link[1]}" + (f" #{lane + 1}" if lane else "")
            yield Span(link[0], thread, name, "link", start, seconds)


def chrome_trace(spans: Sequence[Span], sites: Sequence[str]) -> dict[str, Any]:
    """Return the JSON object of a Chrome trace: a process per site, a thread per device and link direction."""
    events: list[dict[str, Any]] = []
    processes = {site: index + 1 for index, site in enumerate(sites)}
    for site, process in processes.items():
        events.append({"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": site}})
    threads: dict[tuple[str, str], int] = {}
    for site, _, thread in sorted({(span.site, span.category == "link", span.thread) for span in spans}):
        threads[site, thread] = number = len(threads) + 1
        place = {"ph": "M", "pid": processes[site], "tid": number}
        events.append({**place, "name": "thread_name", "args": {"name": thread.removeprefix(f"{site}/")}})
        events.append({**place, "name": "thread_sort_index", "args": {"sort_index": number}})
    for span in spans:
        place = {"ph": "X", "pid": processes[span.site], "tid": threads[span.site, span.thread]}
        times = {"ts": span.start * 1e6, "dur": span.seconds * 1e6}
        events.append({**place, "name": span.name, "cat": span.category, **times})
    return {"displayTimeUnit": "ms", "traceEvents": events}
