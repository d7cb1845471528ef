"""The state of a run: a fold over its events, `state.json`.

    planned -> starting -> running -> finished | failed | cancelled

The first event that ends a run decides how it ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

FINISHED, CANCELLED = "finished", "cancelled"
ENDED = (FINISHED, "failed", CANCELLED)


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
    jobs: tuple[Mapping[str, Any], ...] = ()  # of Slurm: site, name, key, id, submit_time and what it says of each
    silent: Mapping[str, str] = field(default_factory=dict)  # site that does not answer -> what was said instead
    refused: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # site -> who sent what, how often
    links_out: tuple[str, ...] = ()  # from the site that leads, as alpha-beta
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
        case "submitting":
            known = {"id": None, "submit_time": "", "state": "SUBMITTING", "reason": "", "start": None, "nodes": ""}
            job = {"site": event["site"], "name": event["job"], "key": event["key"], **known, "elements": {}}
            return replace(state, jobs=(*(other for other in state.jobs if not _is(other, event)), job))
        case "job_state":
            changed = ("state", "reason", "start", "nodes", "elements")
            return _with_job(state, event, **{key: event[key] for key in changed})
        case "withdrawn" if not event["remains"]:
            return replace(state, jobs=tuple({**job, "state": "CANCELLED", "elements": {}} for job in state.jobs))
        case "site_silent":
            return replace(state, silent={**state.silent, event["site"]: event["cause"]})
        case "site_answers":
            return replace(state, silent={site: why for site, why in state.silent.items() if site != event["site"]})
        case "submitted":
            if "job_id" in event:
                state = _with_job(state, event, state="PENDING")
            started = [{**process, "site": event["site"], "code": None} for process in event.get("processes", ())]
            state = replace(state, processes=(*state.processes, *started))
            return replace(state, phase="starting") if state.phase == "planned" else state
        case "restarted":
            process = event["process"]
            return _with_process(state, event["site"], process["name"], {**process, "code": None})
        case "refused":
            return replace(state, refused=event["offences"])
        case "link_out":
            return replace(state, links_out=(*state.links_out, event["link"]))
        case "link_back":
            return replace(state, links_out=tuple(link for link in state.links_out if link != event["link"]))
        case "go":
            members = _members(state.members, event)
            return state if state.ended else replace(state, phase="running", members=members)
        case "resumed":
            return replace(state, step=event["step"])
        case "step":
            return replace(state, step=event["step"], steps=event["of"], reward=event["reward"])
        case "process_exited":
            return _with_process(state, event["site"], event["process"], {"code": event["code"]})
        case "finished" | "failed" | "cancelled" as phase if not state.ended:
            return replace(state, phase=phase, cause=event.get("cause"), exit_code=event.get("exit_code"))
    return replace(state, members=_members(state.members, event))


def _members(members: Mapping[str, str], event: Mapping[str, Any]) -> Mapping[str, str]:
    """Return how the members are after an event."""
    match event["kind"]:
        case "member_ready":
            return {**members, event["member"]: "ready"}
        case "replica_lost":
            return {**members, event["member"]: "lost"}
        case "replica_released":
            return {**members, event["member"]: "released"}
        case "replicas_behind":
            return {**members, **dict.fromkeys(event["causes"], "behind")}
        case "replica_back" | "replica_joined":
            return {**members, event["member"]: "running"}
        case "go" | "replicas_caught_up":
            return {**members, **dict.fromkeys(event["members"], "running")}
    return members


def _is(job: Mapping[str, Any], event: Mapping[str, Any]) -> bool:
    return (job["site"], job["name"]) == (event["site"], event["job"])


def _with_job(state: State, event: Mapping[str, Any], /, **changes: Any) -> State:
    """Return the state with what an event says of a job; (site, job id, submit time) is who it is."""
    identity = {"id": event["job_id"], "submit_time": event["submit_time"]}
    jobs = tuple({**job, **identity, **changes} if _is(job, event) else job for job in state.jobs)
    return replace(state, jobs=jobs)


def _with_process(state: State, site: str, name: str, changes: Mapping[str, Any]) -> State:
    processes = ({**one, **changes} if (one["site"], one["name"]) == (site, name) else one for one in state.processes)
    return replace(state, processes=tuple(processes))
