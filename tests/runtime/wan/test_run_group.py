from __future__ import annotations

from hypothesis import given, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hetrl.runtime import wire
from hetrl.runtime.wan.run_group import Post, RunGroup

_A, _B, _C = "alpha/actor_training.rank/0", "beta/actor_training.rank/0", "gamma/actor_generation/1"
_EVERYONE = (_A, _B, _C)


def _started(*members: str) -> RunGroup:
    return RunGroup().start(members or _EVERYONE)[0]


def test_every_change_begins_an_epoch_that_everybody_hears_of() -> None:
    group, posts = RunGroup().start((_A, _B))
    assert posts == [Post((_A, _B), wire.Go(epoch=1, members=(_A, _B)))]
    group, posts = group.join(_C)
    assert posts == [Post(_EVERYONE, wire.Go(epoch=2, members=_EVERYONE))]
    group, posts = group.leave(_B, "silent for 60 s")
    assert posts == [Post((_A, _C), wire.Go(epoch=3, members=(_A, _C), left={_B: "silent for 60 s"}))]
    assert group.leave(_B, "again") == (group, [])
    assert group.abort("x") == [Post((_A, _C), wire.Abort(cause="x"))]


def test_a_barrier_answers_all_when_the_last_arrives() -> None:
    group = _started()
    for member, number in ((_A, 7), (_C, 8)):
        group, posts = group.arrive(member, wire.Arrive(epoch=1, barrier="step 3"), number)
        assert posts == []
    group, posts = group.arrive(_B, wire.Arrive(epoch=1, barrier="step 3"), 9)
    assert sorted(posts) == [Post((_A,), wire.Done(), 7), Post((_B,), wire.Done(), 9), Post((_C,), wire.Done(), 8)]
    assert not group.arrived


def test_a_change_ends_the_barriers_of_the_epoch_and_says_who_left() -> None:
    group, _ = _started().arrive(_A, wire.Arrive(epoch=1, barrier="step 3"), 7)
    group, posts = group.leave(_B, "declared dead")
    cause = f"barrier step 3: epoch 1 is over, this is epoch 2 since {_B} left (declared dead)"
    assert posts[0] == Post((_A,), wire.Failed(cause=cause), 7)
    assert not group.arrived


def test_an_old_epoch_and_a_stranger_are_refused_by_name() -> None:
    group = _started(_A, _B).join(_C)[0]
    same, posts = group.arrive(_A, wire.Arrive(epoch=1, barrier="b"), 1)
    assert same == group
    assert posts == [
        Post((_A,), wire.Failed(cause="barrier b: epoch 1 is over, this is epoch 2 since a member joined"), 1)
    ]
    _, posts = group.share("delta/x/0", wire.Share(epoch=2, name="version", value=b"3"), 2)
    assert posts == [
        Post(("delta/x/0",), wire.Failed(cause="version: delta/x/0 is no member in epoch 2; join first"), 2)
    ]


@given(st.binary(max_size=9))
def test_a_value_reaches_everybody(value: bytes) -> None:
    share = wire.Share(epoch=1, name="version", value=value)
    group, posts = _started().share(_B, share, 5)
    assert posts == [Post(_EVERYONE, share), Post((_B,), wire.Done(), 5)]
    assert group == _started()


class AnyRun(RuleBasedStateMachine):
    """Members that come, go and arrive in any order."""

    addresses = st.sampled_from(_EVERYONE)

    def __init__(self) -> None:
        super().__init__()
        self.group = RunGroup()
        self.waiting: dict[int, str] = {}
        self.number = 0

    def _step(self, transition: tuple[RunGroup, list[Post]]) -> list[Post]:
        before, (self.group, posts) = self.group, transition
        changed = before.members != self.group.members or before.epoch != self.group.epoch
        assert self.group.epoch == before.epoch + changed
        goes = [post for post in posts if isinstance(post.message, wire.Go)]
        assert len(goes) == (changed and bool(self.group.members))
        for post in posts:
            if post.reply_to is not None:
                assert self.waiting.pop(post.reply_to) == post.to[0]
        return posts

    @rule(member=addresses)
    def join(self, member: str) -> None:
        self._step(self.group.join(member))

    @rule(member=addresses)
    def leave(self, member: str) -> None:
        self.waiting = {number: who for number, who in self.waiting.items() if who != member}
        self._step(self.group.leave(member, "gone"))

    @precondition(lambda self: self.group.members)
    @rule(member=addresses, barrier=st.sampled_from("xy"), behind=st.integers(0, 1))
    def arrive(self, member: str, barrier: str, behind: int) -> None:
        if member in self.group.arrived.get(barrier, {}):
            return
        self.number += 1
        self.waiting[self.number] = member
        good = not behind and member in self.group.members
        message = wire.Arrive(epoch=self.group.epoch - behind, barrier=barrier)
        posts = self._step(self.group.arrive(member, message, self.number))
        assert good != any(isinstance(post.message, wire.Failed) for post in posts)

    @invariant()
    def nobody_waits_unknown_to_the_group(self) -> None:
        known = {number for here in self.group.arrived.values() for number in here.values()}
        assert known == set(self.waiting)
        assert all(set(here) < set(self.group.members) for here in self.group.arrived.values())


TestAnyRun = AnyRun.TestCase
