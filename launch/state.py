"""The state of a run: a fold over its events, `state.json`.

    planned -> starting -> running -> finished | failed | cancelled

The first event that ends a run decides how it ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

ENDED = ("finished", "failed", "cancelled")


@dataclass(frozen=True)
class State:
    """What is known of a run after some of its events."""

    run: str = ""
    phase: str = "planned"
    step: int = 0
    steps: int = 0
    reward: float | None = None
    members: Mapping[str, str] = field(default_factory=dict)
    processes: tuple[Mapping[str, Any], ...] = ()  # site, name, pid, created, code (None while it runs)
    launcher: Mapping[str, Any] | None = None  # pid, created
    cause: str | None = None
    exit_code: int | None = None
    updated: float | None = None

    @property
    def ended(self) -> bool:
        """Return whether the run is over."""
        return self.phase in ENDED

    def to_json(self) -> dict[str, Any]:
        """Return the document of `state.json`."""
        return asdict(self)


def fold(events: Iterable[Mapping[str, Any]], state: State | None = None) -> State:
    """Return the state after these events, from `state` on; an event of an unknown kind only moves `updated`."""
    state = state or State()
    for event in events:
        updated = max(state.updated or 0.0, float(event["time"]))
        state = replace(_apply(state, event), updated=updated)
    return state


def _apply(state: State, event: Mapping[str, Any]) -> State:
    match event["kind"]:
        case "planned":
            return replace(state, run=event["run"], steps=event["steps"], launcher=event["launcher"])
        case "submitted":
            started = [{**process, "site": event["site"], "code": None} for process in event["processes"]]
            state = replace(state, processes=(*state.processes, *started))
            return replace(state, phase="starting") if state.phase == "planned" else state
        case "restarted":
            return replace(state, processes=tuple(_restarted(process, event) for process in state.processes))
        case "member_ready":
            return replace(state, members={**state.members, event["member"]: "ready"})
        case "go":
            members = {**state.members, **dict.fromkeys(event["members"], "running")}
            return state if state.ended else replace(state, phase="running", members=members)
        case "step":
            return replace(state, step=event["step"], steps=event["of"], reward=event["reward"])
        case "process_exited":
            return replace(state, processes=tuple(_exited(process, event) for process in state.processes))
        case "finished" | "failed" | "cancelled" as phase if not state.ended:
            return replace(state, phase=phase, cause=event.get("cause"), exit_code=event.get("exit_code"))
    return state


def _exited(process: Mapping[str, Any], event: Mapping[str, Any]) -> Mapping[str, Any]:
    same = (process["site"], process["name"]) == (event["site"], event["process"])
    return {**process, "code": event["code"]} if same else process


def _restarted(process: Mapping[str, Any], event: Mapping[str, Any]) -> Mapping[str, Any]:
    same = (process["site"], process["name"]) == (event["site"], event["process"]["name"])
    return {**process, **event["process"], "code": None} if same else process
