"""Who is waited for and watched, and without whom a run goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import pytest

from hetrl.errors import GangTimeoutError, HetrlError
from hetrl.runtime import wire
from hetrl.runtime.gateway.peer_link import OUT_SECONDS
from hetrl.runtime.run import membership
from hetrl.runtime.run.deaths import ReleasedError
from hetrl.runtime.run.membership import Membership
from hetrl.runtime.transport.heartbeat import BEAT_SECONDS
from hetrl.runtime.transport.links import Links
from hetrl.runtime.transport.member import DeadlineError, Envelope

TRAINER, REPLICA, OTHER = "alpha/actor_training/0", "beta/actor_generation/0", "beta/actor_generation/1"
MEMBERS = (TRAINER, REPLICA, OTHER)
JOIN = wire.Join(ranks=1, host="h", pid=1, engines={})


class _Member:
    """Hears what is in the list, and then nothing."""

    def __init__(self, heard: Sequence[tuple[str, wire.Message]]) -> None:
        self.heard, self.sent = list(heard), list[tuple[Sequence[str], wire.Message]]()
        self.links = Links()

    @property
    def has_mail(self) -> bool:
        return bool(self.heard)

    async def receive(self, timeout_seconds: float) -> Envelope:
        await asyncio.sleep(0)
        if not self.heard:
            raise DeadlineError("nothing")
        source, message = self.heard.pop(0)
        return Envelope(wire.Header(run="run", source=source, to=("alpha/controller/0",), id=1), message, ())

    async def send(self, to: Sequence[str], message: wire.Message) -> None:
        self.sent.append((to, message))


class _Turns:
    async def start(self, connected: Callable[[str], object], timeout_seconds: float) -> None:
        return


def _gathered(
    *heard: tuple[str, wire.Message], queue_seconds: float = 60.0, seconds: float = 60.0, enough: int | None = None
) -> tuple[Membership, _Member]:
    """Gather, all or, where so many are `enough`, without some replicas."""
    member = _Member([*heard])
    found = Membership(member, MEMBERS, lambda name, join: None)  # type: ignore[arg-type]
    late = ((), 0) if enough is None else (MEMBERS[1:], enough)
    absent = asyncio.run(found.gather(queue_seconds, seconds, _Turns(), *late))  # type: ignore[arg-type]
    assert absent == tuple(name for name in MEMBERS if name not in found.joined)
    return found, member


def _watched(
    heard: Sequence[tuple[str, wire.Message]], spare: Callable[[str, HetrlError], bool], seconds: float = 5.0
) -> None:
    found, member = _gathered(*((name, JOIN) for name in MEMBERS))
    member.heard = [*heard]

    async def watch() -> None:
        async with asyncio.timeout(seconds):
            await found.watch(spare)

    asyncio.run(watch())


def test_who_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LAST_WORD_SECONDS", 0.0)
    waits = f"{OTHER}: no word within 0.01 s; their jobs wait in the queue or did not start: .* launch.queue_timeout"
    with pytest.raises(GangTimeoutError, match=waits):
        _gathered((TRAINER, JOIN), (REPLICA, JOIN), queue_seconds=0.01)
    starts = f"{OTHER}: not ready within 0.01 s; look into their logs, or raise launch.gang_timeout"
    with pytest.raises(GangTimeoutError, match=starts):
        _gathered((TRAINER, JOIN), (OTHER, wire.Heartbeat()), (REPLICA, JOIN), seconds=0.01)


def test_whoever_comes_late_from_the_queue_has_its_time_to_get_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(_Member):
        async def receive(self, timeout_seconds: float) -> Envelope:
            if self.heard and self.heard[0][0] == OTHER:
                await asyncio.sleep(0.3)
            return await super().receive(timeout_seconds)

    monkeypatch.setattr(membership, "LAST_WORD_SECONDS", 0.0)
    member = Late([(TRAINER, JOIN), (REPLICA, JOIN), (OTHER, wire.Heartbeat()), (OTHER, JOIN)])
    found = Membership(member, MEMBERS, lambda name, join: None)  # type: ignore[arg-type]
    asyncio.run(found.gather(60.0, 0.5, _Turns()))  # type: ignore[arg-type]
    assert set(found.joined) == {*MEMBERS}


def test_everyone_hears_go_when_all_are_ready() -> None:
    _, member = _gathered(*((name, JOIN) for name in MEMBERS))
    assert member.sent == [(MEMBERS, wire.Go())]


def test_a_run_begins_as_soon_as_enough_replicas_are_there_and_takes_the_others_when_they_come() -> None:
    found, member = _gathered((OTHER, wire.Heartbeat()), (REPLICA, JOIN), (TRAINER, JOIN), enough=1)
    assert member.sent == [((REPLICA, TRAINER), wire.Go())]
    assert found.living == (TRAINER, REPLICA)
    member.heard = [(OTHER, JOIN), (TRAINER, wire.Failed(cause="the end"))]
    came: list[str] = []

    def back(name: str) -> bool:
        came.append(name)
        return True

    with pytest.raises(HetrlError, match="the end"):
        asyncio.run(found.watch(lambda name, error: False, back))
    assert came == [OTHER]
    assert member.sent[1:] == [((OTHER,), wire.Go())]
    assert found.living == MEMBERS


def test_nobody_watches_a_replica_that_is_not_there_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(membership, "CHECK_SECONDS", 0.0)
    found, member = _gathered((REPLICA, JOIN), (TRAINER, JOIN), enough=1)

    async def watch() -> None:
        watching = asyncio.ensure_future(found.watch(lambda name, error: False))
        for _ in range(10):
            member.heard += [(REPLICA, wire.Heartbeat()), (TRAINER, wire.Heartbeat())]
            await asyncio.sleep(0.05)
        assert not watching.done()
        with pytest.raises(HetrlError, match="has been silent for 0.2 s"):
            await watching

    asyncio.run(watch())


def test_the_trainer_and_enough_replicas_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LAST_WORD_SECONDS", 0.0)
    with pytest.raises(GangTimeoutError, match=f"{TRAINER}, {OTHER}: no word"):
        _gathered((REPLICA, JOIN), queue_seconds=0.01, enough=2)
    with pytest.raises(GangTimeoutError, match=f"^{TRAINER}: no word"):
        _gathered((REPLICA, JOIN), queue_seconds=0.01, enough=1)
    with pytest.raises(GangTimeoutError, match=f"^{TRAINER}: not ready"):
        _gathered((REPLICA, JOIN), (TRAINER, wire.Heartbeat()), seconds=0.01, enough=1)


def test_a_replica_that_fails_at_its_start_is_no_matter_as_long_as_enough_others_may_come() -> None:
    failed = wire.Failed(cause="no such model")
    found, _ = _gathered((OTHER, JOIN), (OTHER, failed), (REPLICA, JOIN), (TRAINER, JOIN), enough=1)
    assert found.living == (TRAINER, REPLICA)
    found, _ = _gathered((OTHER, failed), (OTHER, JOIN), (REPLICA, failed), (TRAINER, JOIN), enough=1)
    assert found.living == (TRAINER, OTHER), "started again"
    with pytest.raises(HetrlError, match=f"{REPLICA}: no such model"):
        _gathered((OTHER, failed), (REPLICA, failed), (TRAINER, JOIN), enough=1)
    with pytest.raises(HetrlError, match=f"{TRAINER}: no such model"):
        _gathered((OTHER, JOIN), (REPLICA, JOIN), (TRAINER, failed), enough=1)


def test_who_fails_before_go_ends_the_run() -> None:
    with pytest.raises(HetrlError, match=f"{REPLICA}: out of memory"):
        _gathered((TRAINER, JOIN), (REPLICA, wire.Failed(cause="out of memory")))


@pytest.mark.parametrize(
    "last", [wire.Failed(cause="out of memory"), wire.Undeliverable(receiver=REPLICA, cause="out of memory")]
)
def test_a_run_goes_on_without_whom_it_can_spare(last: wire.Message, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "SILENCE_SECONDS", 0.2)
    told: list[tuple[str, str]] = []
    lives = [(name, wire.Heartbeat()) for name in (TRAINER, OTHER)]

    def spare(member: str, error: HetrlError) -> bool:
        told.append((member, str(error)))
        return member == REPLICA

    with pytest.raises(HetrlError, match=f"{TRAINER} has been silent for 0.2 s"):
        _watched([(REPLICA, last), *lives], spare)
    (first, cause), *rest = told
    assert (first, "out of memory" in cause) == (REPLICA, True)
    assert REPLICA not in [member for member, _ in rest]  # it is not watched any more


def test_a_rank_that_stands_still_is_named_before_a_member_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "RANK_SILENCE_SECONDS", 0.2)
    rank, other = f"{TRAINER.rpartition('/')[0]}.rank/0", f"{TRAINER.rpartition('/')[0]}.rank/1"
    member = _Member([(rank, wire.Heartbeat(doing="all_reduce 7 of group 1"))])

    async def watch() -> None:
        found = Membership(member, (), lambda name, join: None, (rank, other))  # type: ignore[arg-type]
        await found.gather(1.0, 1.0, _Turns())  # type: ignore[arg-type]
        watching = asyncio.ensure_future(found.watch(lambda member, error: False))
        while not watching.done():
            member.heard.append((other, wire.Heartbeat(doing="all_reduce 8 of group 1")))
            await asyncio.sleep(0.05)
        await watching

    said = rf"alpha: {rank} has been silent for 0.2 s \(its last word: in all_reduce 7 of group 1\); look into its log"
    with pytest.raises(HetrlError, match=said):
        asyncio.run(watch())


def test_who_was_killed_is_named_with_the_signal_before_its_silence_tells() -> None:
    """A replica that the run can do without is spared, a rank of the trainer is not."""
    rank, killed, told = f"{TRAINER.rpartition('/')[0]}.rank/1", dict[str, str](), list[str]()

    def spare(member: str, error: HetrlError) -> bool:
        told.append(str(error))
        killed[rank] = "SIGSEGV"
        return member == REPLICA

    async def watch() -> None:
        member = _Member([(REPLICA, JOIN)])
        found = Membership(member, [REPLICA], lambda name, join: None, (rank,), lambda: dict(killed))  # type: ignore[arg-type]
        await found.gather(1.0, 1.0, _Turns())  # type: ignore[arg-type]
        killed[REPLICA] = "SIGKILL"
        await asyncio.wait_for(found.watch(spare), 20)

    with pytest.raises(HetrlError, match=f"alpha: {rank} was killed by SIGSEGV; look into its log"):
        asyncio.run(watch())
    assert told[0].startswith(f"beta: {REPLICA} was killed by SIGKILL (out of memory?); look into")
    assert len(told) == 2


def test_replicas_of_a_site_that_are_given_back_are_spared_for_that_and_a_trainer_there_is_watched_on() -> None:
    released, told = set[str](), dict[str, type[HetrlError]]()
    other, trainer = wire.address("beta", "actor_generation", 1), wire.address("beta", "actor_training", 0)

    def spare(member: str, error: HetrlError) -> bool:
        told[member] = type(error)
        return len(told) < 2  # else the test is over

    async def watch() -> None:
        names = [REPLICA, other, trainer]
        found = Membership(_Member([(name, JOIN) for name in names]), names, lambda *_: None, released=lambda: released)  # type: ignore[arg-type]
        await found.gather(1.0, 1.0, _Turns())  # type: ignore[arg-type]
        released.add("beta")
        await asyncio.wait_for(found.watch(spare), 20)

    with pytest.raises(ReleasedError, match="beta: its rollouts were given back"):
        asyncio.run(watch())
    assert told == {REPLICA: ReleasedError, other: ReleasedError}


def test_a_link_counts_as_out_well_before_a_rank_behind_it_counts_as_silent() -> None:
    late_seconds = 2.0  # a beat, or the gateway, of a machine that is busy
    assert BEAT_SECONDS + OUT_SECONDS + late_seconds <= membership.RANK_SILENCE_SECONDS


def test_who_is_behind_a_link_that_is_out_is_not_silent_until_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "SILENCE_SECONDS", 0.2)

    async def watch() -> None:
        member = _Member([])
        found = Membership(member, [REPLICA], lambda name, join: None)  # type: ignore[arg-type]
        member.links.lost("beta")
        watching = asyncio.ensure_future(found.watch(lambda member, error: False))
        await asyncio.sleep(0.5)
        assert not watching.done()
        member.links.restored("beta")
        with pytest.raises(HetrlError, match=f"{REPLICA} has been silent for 0.2 s"):
            await asyncio.wait_for(watching, 10)

    asyncio.run(watch())


def test_who_is_behind_a_link_that_is_given_up_is_lost_with_its_cause() -> None:
    told: list[tuple[str, str]] = []

    def spare(member: str, error: HetrlError) -> bool:
        told.append((member, str(error)))
        return member == REPLICA

    async def watch() -> None:
        member = _Member([])
        found = Membership(member, [TRAINER, REPLICA, OTHER], lambda name, join: None)  # type: ignore[arg-type]
        member.links.lost("beta")
        member.links.give_up("beta", "no connection for 600 s")
        with pytest.raises(HetrlError, match=f"beta: {OTHER} cannot be reached: no connection for 600 s"):
            await asyncio.wait_for(found.watch(spare), 10)

    asyncio.run(watch())
    assert [member for member, _ in told] == [REPLICA, OTHER]


def test_nobody_expects_a_gateway_to_go_on_speaking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "SILENCE_SECONDS", 0.2)
    word = ("alpha/gateway/0", wire.Undeliverable(receiver=REPLICA, cause="no connection"))
    told: list[str] = []

    def spare(member: str, error: HetrlError) -> bool:
        told.append(member)
        return True

    with pytest.raises(TimeoutError):
        _watched([word], spare, seconds=1.0)
    assert sorted(told) == sorted((REPLICA, TRAINER, OTHER))


def test_a_run_ends_with_the_failure_of_whom_it_needs() -> None:
    with pytest.raises(HetrlError, match=f"{TRAINER}: out of memory"):
        _watched([(TRAINER, wire.Failed(cause="out of memory"))], lambda member, error: False)


def test_a_site_that_cannot_be_reached_ends_the_run() -> None:
    with pytest.raises(HetrlError, match="beta cannot be reached: the link"):
        _watched([("alpha/gateway/0", wire.Undeliverable(receiver="beta", cause="the link"))], lambda *_: False)


def test_only_members_that_were_heard_and_are_not_lost_are_told_of_the_controller() -> None:
    found, member = _gathered(*((name, JOIN) for name in MEMBERS))
    assert found.living == MEMBERS
    member.heard = [(REPLICA, wire.Failed(cause="gone"))]

    async def watch() -> None:
        async with asyncio.timeout(0.5):
            await found.watch(lambda name, error: True)

    with pytest.raises(TimeoutError):
        asyncio.run(watch())
    assert found.living == (TRAINER, OTHER)
    assert Membership(member, MEMBERS, lambda name, join: None).living == ()  # type: ignore[arg-type]


def test_a_controller_that_stood_still_hears_what_was_said_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"SILENCE_SECONDS": 0.5, "CHECK_SECONDS": 0.02, "POLL_SECONDS": 0.02}.items():
        monkeypatch.setattr(membership, name, seconds)
    found, member = _gathered(*((name, JOIN) for name in MEMBERS))
    told: list[str] = []

    async def speak() -> None:
        await asyncio.sleep(0.05)
        time.sleep(1.0)
        for _ in range(20):
            member.heard += [(name, wire.Heartbeat()) for name in MEMBERS]
            await asyncio.sleep(0.02)

    async def watch() -> None:
        watching = asyncio.ensure_future(found.watch(lambda name, error: not told.append(name)))
        await speak()
        watching.cancel()

    asyncio.run(watch())
    assert told == []


def test_nobody_counts_as_silent_whose_word_waits_behind_those_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"RANK_SILENCE_SECONDS": 0.3, "CHECK_SECONDS": 0.02, "POLL_SECONDS": 0.02}.items():
        monkeypatch.setattr(membership, name, seconds)
    rank, told = "alpha/actor_training.rank/0", list[str]()

    def look_slowly() -> dict[str, str]:
        time.sleep(0.1)
        return {}

    member = _Member([(REPLICA, JOIN)])
    found = Membership(member, [REPLICA], lambda *_: None, (rank,), look_slowly)  # type: ignore[arg-type]
    asyncio.run(found.gather(60.0, 60.0, _Turns()))  # type: ignore[arg-type]
    many: list[tuple[str, wire.Message]] = [*[(REPLICA, wire.Heartbeat())] * 60, (rank, wire.Heartbeat())]
    member.heard = [*many, *many, (REPLICA, wire.Failed(cause="it is over", exit_code=1))]
    with pytest.raises(HetrlError, match="it is over"):
        asyncio.run(found.watch(lambda name, error: bool(told.append(name))))
    assert told == [REPLICA]


def test_a_site_whose_job_slurm_ends_is_told_once_whenever_it_says_so() -> None:
    found, member = _gathered((OTHER, JOIN), (OTHER, wire.Heartbeat(ending=True)), (TRAINER, JOIN), (REPLICA, JOIN))
    last = (OTHER, wire.Failed(cause="the end"))
    member.heard = [
        ("gamma/actor_generation/9", wire.Heartbeat(ending=True)),  # nobody of this run
        *((name, wire.Heartbeat(ending=ending)) for name, ending in ((TRAINER, False), (TRAINER, True)) * 2),
        last,
    ]
    told: list[str] = []
    with pytest.raises(HetrlError, match="the end"):
        asyncio.run(found.watch(lambda member, error: False, ending=told.append))
    assert told == ["beta", "alpha"]


@pytest.mark.parametrize("lost", [True, False])
@pytest.mark.parametrize("taken", [True, False])
def test_who_was_started_again_takes_part_again_where_it_may(lost: bool, taken: bool) -> None:
    """Whether or not its end was noticed before."""
    found, member = _gathered(*((name, JOIN) for name in MEMBERS))
    before = len(member.sent)
    last = [(REPLICA, wire.Failed(cause="killed"))] if lost else []
    late = [("gateway", wire.Undeliverable(receiver=REPLICA, cause="restarted"))] if taken else []  # of its life before
    member.heard = [*last, (REPLICA, JOIN), *late, (TRAINER, wire.Failed(cause="the end"))]
    asked: list[str] = []

    def back(name: str) -> bool:
        asked.append(name)
        return taken

    with pytest.raises(HetrlError, match="the end"):
        asyncio.run(found.watch(lambda name, error: name == REPLICA, back))
    assert asked == [REPLICA]
    assert (REPLICA in found.living) == (taken or not lost)
    assert member.sent[before:] == ([((REPLICA,), wire.Go())] if taken else [])
