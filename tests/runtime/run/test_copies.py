"""Which checkpoints a controller has copied, and where it finds those to go on from."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hetrl.errors import HetrlError
from hetrl.files import read_lines
from hetrl.plan.plan import Plan
from hetrl.runtime import wire
from hetrl.runtime.checkpoints.files import TAKES_UP
from hetrl.runtime.run import copies
from hetrl.runtime.run.copies import KeptCheckpoints
from hetrl.runtime.run.record import Record
from hetrl.runtime.wire.members import addresses_of, keepers_of
from hetrl.workload import ACTOR_TRAINING, CRITIC_TRAINING
from lab.quick import quick_plan
from tests.launch.launch_cases import quick_experiment

PLAN: Plan = quick_plan()  # the trainer is at alpha, replicas at beta and gamma
SITES = {wire.site_of(keeper): keeper for keeper in keepers_of(PLAN).values()}
MEMBERS = [member for task in PLAN.tasks for member in addresses_of(PLAN, task)]


class Keepers:
    """The other end of the wire: what lies at each site; who is not among them does not answer."""

    def __init__(self, **steps: tuple[int, ...]) -> None:
        self.steps, self.heard = steps, list[tuple[str, int, str]]()
        self.lent = list[tuple[str, int, str]]()
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def request(self, to: str, message: wire.Message, *, timeout_seconds: float, doing: str) -> Any:
        site = wire.site_of(to)
        if isinstance(message, wire.LendCheckpoint):
            self.lent.append((site, message.step, wire.site_of(message.to)))
            return SimpleNamespace(message=wire.Done())
        await self.go_on.wait()
        if site not in self.steps:
            raise HetrlError(f"{site}: cannot be reached ({doing})")
        if isinstance(message, wire.FindCheckpoints):
            return SimpleNamespace(message=wire.FoundCheckpoints(steps=self.steps[site]))
        assert isinstance(message, wire.TakeCheckpoint)
        self.heard.append((site, message.step, wire.site_of(message.source)))
        return SimpleNamespace(message=wire.CheckpointTaken(step=message.step, bytes=8, seconds=0.5))


def kept(
    keepers: Keepers,
    directory: Path,
    *copy_to: str,
    lost: tuple[str, ...] = (),
    plan: Plan = PLAN,
    living: set[str] | None = None,
) -> KeptCheckpoints:
    experiment = quick_experiment(checkpoints={"copy_to": copy_to})
    context = SimpleNamespace(
        plan=plan, experiment=experiment, directory=directory, addresses=lambda task: addresses_of(plan, task)
    )
    if living is None:
        living = {member for member in MEMBERS if wire.site_of(member) not in lost}
    return KeptCheckpoints(cast(Any, context), cast(Any, keepers), Record(directory, "alpha"), lambda: living)


def events(directory: Path) -> list[dict[str, Any]]:
    kept_keys = ("kind", "step", "site", "cause")
    rows = read_lines(directory / "events.jsonl")
    return [{key: row[key] for key in kept_keys if key in row} for row in rows]


def copied(keepers: Keepers, directory: Path, *copy_to: str, lost: tuple[str, ...] = (), steps: Any = (2,)) -> None:
    async def scenario() -> None:
        ours = kept(keepers, directory, *copy_to, lost=lost)
        serving = asyncio.create_task(ours.serve())
        for step in steps:
            ours.wanted(ACTOR_TRAINING, step)
        await asyncio.wait_for(ours.settle(), 20)
        serving.cancel()

    asyncio.run(scenario())


def test_a_checkpoint_is_copied_to_the_first_other_site_that_takes_part(tmp_path: Path) -> None:
    for lost, there in (((), "gamma"), (("gamma",), "beta")):
        keepers, directory = Keepers(beta=(), gamma=()), tmp_path / there
        directory.mkdir()
        copied(keepers, directory, "alpha", "gamma", "beta", lost=lost)
        assert keepers.heard == [(there, 2, "alpha")]
        assert keepers.lent == [("alpha", 2, there)]
        assert events(directory) == [{"kind": "checkpoint_copied", "step": 2, "site": there}]


def test_without_a_site_to_copy_to_nothing_is(tmp_path: Path) -> None:
    copied(Keepers(beta=()), tmp_path)
    assert not (tmp_path / "events.jsonl").exists()


def test_what_cannot_be_copied_is_said_and_the_next_one_is_tried(tmp_path: Path) -> None:
    copied(Keepers(), tmp_path, "beta", steps=(2,))
    copied(Keepers(), tmp_path, "beta", lost=("beta",), steps=(4,))
    first, second = events(tmp_path)
    assert first["kind"] == second["kind"] == "checkpoint_not_copied"
    assert "cannot be reached" in first["cause"]
    assert second["cause"] == "none of beta takes part beside alpha"


def test_of_those_that_wait_the_newest_and_the_first_are_copied(tmp_path: Path) -> None:
    keepers = Keepers(beta=())

    async def scenario() -> None:
        ours = kept(keepers, tmp_path, "beta")
        serving = asyncio.create_task(ours.serve())
        keepers.go_on.clear()
        ours.wanted(ACTOR_TRAINING, 0)
        await asyncio.sleep(0.01)
        assert ours.under_way() == 0
        for step in (2, 4, 6):
            ours.wanted(ACTOR_TRAINING, step)
        keepers.go_on.set()
        await asyncio.wait_for(ours.settle(), 20)
        assert ours.under_way() is None
        serving.cancel()

    asyncio.run(scenario())
    assert [step for _, step, _ in keepers.heard] == [0, 6]


@pytest.mark.parametrize("gone", ["beta", "alpha"])
def test_a_copy_ends_with_either_of_those_that_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    monkeypatch.setattr(copies, "LOOK_SECONDS", 0.01)
    keepers, living = Keepers(beta=()), {*MEMBERS}
    keepers.go_on.clear()  # it never answers

    async def scenario() -> None:
        ours = kept(keepers, tmp_path, "beta", living=living)
        serving = asyncio.create_task(ours.serve())
        ours.wanted(ACTOR_TRAINING, 2)
        await asyncio.sleep(0.1)
        assert ours.under_way() == 2
        living.difference_update([member for member in MEMBERS if wire.site_of(member) == gone])
        await asyncio.wait_for(ours.settle(), 20)
        serving.cancel()

    asyncio.run(scenario())
    (said,) = events(tmp_path)
    assert said["kind"] == "checkpoint_not_copied"
    assert (
        f"{gone}: {SITES[gone]} is gone (copy the checkpoint of actor_training after step 2 to beta)" in said["cause"]
    )


SPARED: dict[int, tuple[int, ...]] = {2: (), 4: (2,), 6: (4,), 8: (6,)}


def test_actor_and_critic_of_a_step_are_copied_before_those_of_another(tmp_path: Path) -> None:
    """A copy takes longer than the next checkpoint, and the actor's is whole first each time."""
    plan = replace(PLAN, tasks={**PLAN.tasks, CRITIC_TRAINING: PLAN.tasks[ACTOR_TRAINING]})

    class Slow(Keepers):
        async def request(self, to: str, message: wire.Message, **more: Any) -> Any:
            if isinstance(message, wire.LendCheckpoint):
                return SimpleNamespace(message=wire.Done())
            assert isinstance(message, wire.TakeCheckpoint)
            asked.append((message.task, message.step, message.spared))
            await self.go_on.wait()
            return SimpleNamespace(message=wire.CheckpointTaken(step=message.step, bytes=8, seconds=0.5))

    asked = list[tuple[str, int, tuple[int, ...]]]()
    keepers = Slow()

    async def scenario() -> None:
        ours = kept(keepers, tmp_path, "beta", plan=plan)
        serving = asyncio.create_task(ours.serve())
        for step in (2, 4, 6, 8):
            keepers.go_on.clear()
            for task in (ACTOR_TRAINING, CRITIC_TRAINING):
                ours.wanted(task, step)
                await asyncio.sleep(0.01)  # the actor's is not copied before there is the critic's
            if step != 4:  # of which a copy takes longer than the next checkpoint
                keepers.go_on.set()
                await asyncio.wait_for(ours.settle(), 20)
        ours.wanted(ACTOR_TRAINING, 10)
        await asyncio.wait_for(ours.settle(), 20)
        serving.cancel()

    asyncio.run(scenario())
    pairs = [((ACTOR_TRAINING, step, before), (CRITIC_TRAINING, step, ())) for step, before in SPARED.items()]
    assert asked == [one for pair in pairs for one in pair]


def test_what_lies_elsewhere_is_brought_to_where_the_model_is_trained(tmp_path: Path) -> None:
    async def scenario(first: bool, **steps: tuple[int, ...]) -> tuple[int | None, bool, Any]:
        keepers = Keepers(**steps)
        ours = kept(keepers, tmp_path)
        newest = await ours.newest()
        warm = newest is not None and await ours.bring(newest, first=first)
        return newest, warm, keepers.heard

    assert asyncio.run(scenario(True, alpha=(), beta=(0, 4), gamma=(2,))) == (
        4,
        True,
        [("alpha", 0, "beta"), ("alpha", 4, "beta")],
    )
    assert asyncio.run(scenario(False, alpha=(0, 4), beta=(0, 4), gamma=())) == (4, True, [])
    assert asyncio.run(scenario(False, alpha=(2,), gamma=(6,))) == (6, False, [("alpha", 6, "gamma")])
    assert asyncio.run(scenario(False, alpha=())) == (None, False, [])


def test_a_run_goes_on_from_no_earlier_checkpoint_than_its_launcher_saw(tmp_path: Path) -> None:
    """Its site has no member where a run begins without it, or does not answer."""
    absent = {member for member in MEMBERS if wire.site_of(member) != "beta"}
    there = Keepers(alpha=(80,), beta=(80, 120), gamma=())
    assert asyncio.run(kept(there, tmp_path, living=absent).newest()) == 80
    (tmp_path / TAKES_UP).write_text('{"step": 120, "site": "beta"}')
    assert asyncio.run(kept(there, tmp_path).newest()) == 120
    for keepers, living in ((there, absent), (Keepers(alpha=(80,), gamma=()), None)):
        with pytest.raises(HetrlError, match="beta: .* after step 120, .* that of step 80 is the last found"):
            asyncio.run(kept(keepers, tmp_path, living=living).newest())
    with pytest.raises(HetrlError, match="none is found"):
        asyncio.run(kept(Keepers(alpha=(), gamma=()), tmp_path).newest())
