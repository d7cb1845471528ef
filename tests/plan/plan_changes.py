"""Changes of a plan, for tests that ask what comes of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hetrl.plan.plan import Plan, Replica

Change = Callable[[Plan], Plan]


def both(*changes: Change) -> Change:
    """Make these changes, one after the other."""

    def change(plan: Plan) -> Plan:
        for one in changes:
            plan = one(plan)
        return plan

    return change


def algorithm(**changes: Any) -> Change:
    """Change what the plan was made for."""
    return lambda plan: replace(plan, algorithm=replace(plan.algorithm, **changes))


def group(index: int, **changes: Any) -> Change:
    """Change a group."""

    def change(plan: Plan) -> Plan:
        groups = list(plan.groups)
        groups[index] = replace(groups[index], **changes)
        return replace(plan, groups=tuple(groups))

    return change


def task(name: str, **changes: Any) -> Change:
    """Change a task."""
    return lambda plan: replace(plan, tasks={**plan.tasks, name: replace(plan.tasks[name], **changes)})


def replicas(name: str, change: Callable[[tuple[Replica, ...]], tuple[Replica, ...]]) -> Change:
    """Change the replicas of a task."""
    return lambda plan: task(name, replicas=change(plan.tasks[name].replicas))(plan)


def samples(name: str, *shares: int) -> Change:
    """Give the replicas of a task these samples."""
    return replicas(name, lambda old: tuple(replace(one, samples=n) for one, n in zip(old, shares, strict=True)))
