"""Who draws which sample next."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings, strategies as st

from hetrl.dispatch import Begun, Capacity, Dispatch, Key
from hetrl.replicas import LATE_FACTOR, LATE_SECONDS

LONGEST, STRETCH = 100, 10


@dataclass
class Fleet:
    """Plays a dispatch: the samples under way end in a random order, replicas are lost, what is wanted is checked."""

    dispatch: Dispatch
    places: dict[str, int]
    lengths: dict[Key, int]
    draws: random.Random
    have: dict[Key, int] = field(default_factory=dict)
    under_way: set[Begun] = field(default_factory=set)
    complete: set[Key] = field(default_factory=set)
    clock: float = 0.0

    def begin(self, begun: list[Begun]) -> None:
        for name, key in begun:
            assert name in self.places
            assert key not in self.complete
            assert (name, key) not in self.under_way
            self.under_way.add((name, key))
            assert sum(other == name for other, _ in self.under_way) <= self.places[name]

    def end_one(self) -> None:
        name, key = self.draws.choice(sorted(self.under_way))
        self.under_way.remove((name, key))
        tokens = min(STRETCH, self.lengths[key] - self.have.get(key, 0))
        self.have[key] = self.have.get(key, 0) + tokens
        whole = self.have[key] == self.lengths[key]
        if whole:
            self.complete.add(key)
        for one in self.dispatch.advanced(name, key, tokens, self.draws.uniform(0.1, 5.0), complete=whole):
            self.under_way.remove(one)
        assert all(other != key for _, other in self.under_way)

    def lose_one(self) -> None:
        name = self.draws.choice(sorted(self.places))
        del self.places[name]
        in_vain = {one for one in self.under_way if one[0] == name}
        assert set(self.dispatch.lost(name)) == in_vain
        self.under_way -= in_vain

    def run(self, losses: int) -> None:
        self.begin(self.dispatch.next(self.clock))
        while len(self.complete) < len(self.lengths):
            assert self.under_way, "samples wait, and nobody draws"
            self.clock += self.draws.choice((1.0, 100.0))
            if losses and len(self.places) > 1 and self.draws.random() < 0.1:
                losses -= 1
                self.lose_one()
            elif self.under_way:
                self.end_one()
            self.begin(self.dispatch.next(self.clock))
            self.begin(self.dispatch.late(self.clock))


@settings(deadline=None)
@given(
    fleet=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 40)), min_size=1, max_size=5),
    prompts=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), min_size=1, max_size=8),
    losses=st.integers(0, 4),
    seed=st.integers(0, 10**6),
)
def test_every_sample_is_drawn_once_and_whole_whoever_is_slow_or_lost(
    fleet: list[tuple[int, int]], prompts: list[tuple[int, int]], losses: int, seed: int
) -> None:
    draws = random.Random(seed)
    capacities = {f"r{n}": Capacity(sequences, samples) for n, (sequences, samples) in enumerate(fleet)}
    dispatch = Dispatch(capacities, LONGEST, STRETCH)
    lengths = {(number, k): draws.randint(1, LONGEST) for number, (_, n) in enumerate(prompts) for k in range(n)}
    for number, (batch, samples) in enumerate(prompts):
        dispatch.add(number, batch, samples)
    places = {name: one.sequences for name, one in capacities.items()}
    Fleet(dispatch, places, lengths, draws).run(losses)
    assert dispatch.next(0.0) == []


def alone(*prompts: int, places: int = 1) -> Dispatch:
    """Return the dispatch of one replica with prompts of so many samples."""
    dispatch = Dispatch({"a": Capacity(places, 8)}, LONGEST, STRETCH)
    for number, samples in enumerate(prompts):
        dispatch.add(number, 0, samples)
    return dispatch


def test_every_prompt_is_begun_before_a_second_sample_of_any() -> None:
    assert [key for _, key in alone(2, 2, 2, places=4).next(0.0)] == [(0, 0), (1, 0), (2, 0), (0, 1)]


def test_the_prompt_whose_samples_prove_long_goes_first() -> None:
    dispatch = alone(3, 3, places=2)
    dispatch.next(0.0)
    dispatch.advanced("a", (0, 0), 5, 1.0, complete=True)
    dispatch.advanced("a", (1, 0), 9, 1.0, complete=True)
    assert [key for _, key in dispatch.next(1.0)] == [(1, 1), (1, 2)]


def test_a_replica_draws_of_the_prompts_whose_keys_and_values_it_holds() -> None:
    dispatch = Dispatch({name: Capacity(4, 4) for name in "ab"}, LONGEST, STRETCH)
    for number in range(2):
        dispatch.add(number, 0, 4)
    assert {(name, key[0]) for name, key in dispatch.next(0.0)} == {("a", 0), ("b", 1)}


def test_replicas_share_no_more_prompts_than_they_must() -> None:
    """Four samples each, of prompts of eight: whoever comes when all are begun goes where many are left."""
    dispatch = Dispatch({str(n): Capacity(4, 4) for n in range(16)}, LONGEST, STRETCH)
    for number in range(8):
        dispatch.add(number, 0, 8)
    begun = dispatch.next(0.0)
    assert len(begun) == 64
    assert len({(name, key[0]) for name, key in begun}) == 16


def test_samples_of_an_older_batch_go_first() -> None:
    dispatch = alone()
    dispatch.add(7, 1, 1)
    dispatch.add(8, 0, 1)
    assert dispatch.next(0.0) == [("a", (8, 0))]


@pytest.mark.parametrize(("tokens", "taken"), [(10, (0, 0)), (60, (1, 0))])
def test_a_sample_goes_on_where_its_keys_and_values_are_unless_another_one_lacks_far_more(
    tokens: int, taken: Key
) -> None:
    dispatch = Dispatch({"a": Capacity(1, 1), "b": Capacity(1, 1)}, LONGEST, STRETCH)
    dispatch.add(0, 0, 1)
    dispatch.add(1, 0, 1)
    assert dispatch.next(0.0) == [("a", (0, 0)), ("b", (1, 0))]
    dispatch.advanced("a", (0, 0), tokens, float(tokens), complete=False)
    dispatch.advanced("b", (1, 0), 5, 5.0, complete=False)
    assert dispatch.next(1.0)[0] == ("a", taken)


def test_the_last_long_sample_is_left_to_the_fast_replica() -> None:
    dispatch = Dispatch({"slow": Capacity(4, 4), "fast": Capacity(4, 16)}, LONGEST, STRETCH)
    dispatch.add(0, 0, 30)
    taken = {"slow": 0, "fast": 0}
    for now in range(100):
        for name, key in dispatch.next(float(now)):
            taken[name] += 1
            if key[1] > 25:
                assert name == "fast"
            dispatch.advanced(name, key, STRETCH, 4.0 if name == "slow" else 1.0, complete=True)
    assert taken["slow"] > 0


def test_a_slow_replica_leaves_the_longest_to_the_fast_one_and_goes_on_with_the_next_batch() -> None:
    dispatch = Dispatch({"slow": Capacity(1, 1), "fast": Capacity(1, 4)}, LONGEST, STRETCH)
    dispatch.add(1, 1, 4)
    assert dispatch.next(0.0) == [("fast", (1, 0)), ("slow", (1, 1))]
    dispatch.advanced("fast", (1, 0), 5, 1.0, complete=True)  # the others of this prompt are short, too
    assert dispatch.next(1.0) == [("fast", (1, 2))]
    dispatch.add(2, 0, 1)
    dispatch.advanced("slow", (1, 1), 5, 10.0, complete=True)
    assert dispatch.next(10.0) == [("slow", (1, 3))]


def test_what_hangs_is_drawn_elsewhere_and_the_replica_gets_no_more_until_it_answers() -> None:
    dispatch = Dispatch({"a": Capacity(2, 2), "b": Capacity(2, 2)}, LONGEST, STRETCH)
    dispatch.add(0, 0, 3)
    first = dispatch.next(0.0)
    for name, key in first[:2]:  # both speeds are known
        dispatch.advanced(name, key, STRETCH, 1.0, complete=True)
    hanging, key = first[2]
    (other,) = {"a", "b"} - {hanging}
    assert dispatch.late(LATE_SECONDS - 1) == []
    now = max(LATE_SECONDS, LATE_FACTOR) + 1
    assert dispatch.late(now) == [(other, key)]
    assert dispatch.late(now) == []
    dispatch.add(1, 0, 200)
    assert {name for name, _ in dispatch.next(now)} == {other}
    assert dispatch.advanced(hanging, key, STRETCH, 99.0, complete=True) == [(other, key)]
    assert hanging in {name for name, _ in dispatch.next(now)}


def test_a_replica_whose_work_was_done_elsewhere_shows_with_one_stretch_whether_it_still_hangs() -> None:
    dispatch = Dispatch({"a": Capacity(2, 2), "b": Capacity(2, 2)}, LONGEST, STRETCH)
    dispatch.add(0, 0, 3)
    *others, (hanging, key) = dispatch.next(0.0)
    for name, one in others:
        dispatch.advanced(name, one, STRETCH, 1.0, complete=True)
    now = max(LATE_SECONDS, LATE_FACTOR) + 1
    ((other, _),) = dispatch.late(now)
    dispatch.add(1, 0, 200)
    assert dispatch.advanced(other, key, STRETCH, 1.0, complete=True) == [(hanging, key)]
    (trial,) = [one for name, one in dispatch.next(now) if name == hanging]
    assert hanging not in {name for name, _ in dispatch.next(now)}
    dispatch.advanced(hanging, trial, STRETCH, 1.0, complete=True)
    assert [name for name, _ in dispatch.next(now)].count(hanging) == 2


def test_what_a_lost_replica_draws_is_drawn_by_another_one() -> None:
    dispatch = Dispatch({"a": Capacity(1, 1), "b": Capacity(1, 1)}, LONGEST, STRETCH)
    dispatch.add(0, 0, 1)
    ((name, key),) = dispatch.next(0.0)
    (other,) = {"a", "b"} - {name}
    assert dispatch.lost(name) == [(name, key)]
    assert dispatch.replicas == (other,)
    assert dispatch.next(1.0) == [(other, key)]


def test_a_replica_that_comes_back_is_taken_to_be_as_fast_as_planned_beside_the_others() -> None:
    dispatch = Dispatch({"a": Capacity(2, 2), "b": Capacity(2, 2)}, LONGEST, STRETCH)
    dispatch.add(0, 0, 4)
    for name, key in dispatch.next(0.0):
        dispatch.advanced(name, key, STRETCH, 0.01, complete=True)
    dispatch.lost("b")
    dispatch.back("b")
    dispatch.add(1, 1, 4)
    assert Counter(name for name, _ in dispatch.next(1.0)) == {"a": 2, "b": 2}


def test_a_prompt_that_is_dropped_is_drawn_by_nobody() -> None:
    dispatch = alone(3, places=2)
    begun = dispatch.next(0.0)
    assert sorted(dispatch.drop(0)) == sorted(begun)
    assert dispatch.next(0.0) == []
    assert dispatch.drop(0) == []


class Plain(Dispatch):
    """Chooses as the rule says it, one sample at a time: every replica looks at everything that waits."""

    def next(self, now: float) -> list[Begun]:
        begun, soon = list[Begun](), self._replicas.due(now)
        if not any(one.free for one in self._replicas.values()):
            return []
        parts, most = self._replicas.parts(), self._replicas.most(self._lacking, now)
        able = [name for name, one in self._replicas.items() if one.free or soon[name]]
        left = len(self._waiting_keys())
        while able and left:
            name = min(able, key=lambda one: self._replicas[one].load(soon[one]))
            if self._replicas[name].free:
                key = self._choice(name, parts[name], most[name])
                if key is None:
                    able.remove(name)
                    continue
                begun.append(self._begin(name, key, now))
            else:
                soon[name] -= 1
            left -= 1
            able = [one for one in able if self._replicas[one].free or soon[one]]
        return begun

    def _waiting_keys(self) -> list[Key]:
        return [(number, k) for number, prompt in self._prompts.items() for k in (*prompt.paused, *prompt.fresh)]

    def _choice(self, name: str, part: int, most: float) -> Key | None:
        for batch in sorted({prompt.batch for prompt in self._prompts.values()}):
            if sum(self._prompts[number].batch == batch for number, _ in self._replicas[name].under_way) >= part:
                continue
            waiting = [
                (number, k)
                for number, prompt in self._prompts.items()
                if prompt.batch == batch
                for k in (*prompt.paused, *prompt.fresh[-1:])
            ]
            choices = [(*self._ranked(key, name), key) for key in waiting if self._sample(key).lacks <= most]
            if choices:
                return max(choices)[-1]
        return None

    def _ranked(self, key: Key, name: str) -> tuple[tuple[bool, float], int, tuple[bool, int]]:
        unknown, lacks, held, order = self._worth(key, name)
        follow = len(self._prompts[key[0]].fresh) if not unknown and not self._replicas[name].prompts else 0
        return (unknown, lacks), follow, (held, order)


def test_a_sample_that_ends_earlier_where_it_waits_is_left() -> None:
    """Four places that are four times as fast: what is left of many takes longer than one sample where it is slow."""
    for samples, slow in ((4, 0), (30, 4)):
        dispatch = Dispatch({"slow": Capacity(4, 4), "fast": Capacity(4, 16)}, LONGEST, STRETCH)
        dispatch.add(0, 0, samples)
        assert Counter(name for name, _ in dispatch.next(0.0)) == {"fast": 4} | ({"slow": slow} if slow else {})


def test_no_more_of_a_batch_runs_at_a_replica_than_is_planned_unless_others_are_gone() -> None:
    dispatch = Dispatch({"narrow": Capacity(2, 6), "wide": Capacity(9, 3)}, LONGEST, STRETCH)
    dispatch.add(0, 0, 9)
    assert Counter(name for name, _ in dispatch.next(0.0)) == {"narrow": 2, "wide": 3}
    dispatch.add(1, 1, 9)
    assert Counter(name for name, _ in dispatch.next(0.0)) == {"wide": 3}
    dispatch.lost("narrow")
    assert Counter(name for name, _ in dispatch.next(0.0)) == {"wide": 3}


def test_a_replica_that_drew_of_two_batches_at_once_is_not_slow_for_the_next_one() -> None:
    """Twice as many as planned ran beside each other, and each took twice as long."""
    dispatch = Dispatch({"narrow": Capacity(2, 6), "wide": Capacity(9, 3)}, STRETCH, STRETCH)
    dispatch.add(0, 0, 5)
    dispatch.add(1, 1, 3)
    begun = dispatch.next(0.0)
    assert Counter(name for name, _ in begun) == {"narrow": 2, "wide": 6}
    for name, key in begun:
        dispatch.advanced(name, key, STRETCH, {"narrow": 3.3, "wide": 20.0}[name], complete=True)
    dispatch.add(2, 2, 9)
    assert Counter(name for name, _ in dispatch.next(20.0)) == {"narrow": 2, "wide": 3}


@pytest.mark.parametrize("longest", [STRETCH, STRETCH - 3])
def test_replicas_that_end_together_share_what_waits(longest: int) -> None:
    """The first one to end leaves the other one as much, though it has places for all."""
    dispatch = Dispatch({"a": Capacity(4, 6), "b": Capacity(4, 6)}, longest, STRETCH)
    dispatch.add(0, 0, 12)
    first = dispatch.next(0.0)
    assert len(first) == 8
    for end, name in ((10.0, "a"), (10.1, "b")):
        for key in [key for other, key in first if other == name]:
            dispatch.advanced(name, key, longest, end, complete=True)
        assert [other for other, _ in dispatch.next(end)] == [name] * 2


def test_it_waits_for_nobody_whose_stretches_are_not_about_to_end() -> None:
    dispatch = Dispatch({"a": Capacity(4, 6), "b": Capacity(4, 6)}, STRETCH, STRETCH)
    dispatch.add(0, 0, 12)
    for name, key in dispatch.next(0.0):
        if name == "a":
            dispatch.advanced(name, key, STRETCH - 1, 5.0, complete=True)
    assert [name for name, _ in dispatch.next(5.0)] == ["a"] * 4


@given(st.randoms(use_true_random=False), st.integers(1, 5), st.integers(1, 12))
def test_samples_are_chosen_as_the_rule_says_it(rng: random.Random, replicas: int, prompts: int) -> None:
    """Whatever the fleet, the lengths, and the order in which stretches end."""
    fleet = {f"replica {n}": Capacity(rng.randint(1, 4), rng.randint(1, 16)) for n in range(replicas)}
    both = Dispatch(fleet, 64, 16), Plain(fleet, 64, 16)
    under_way: list[Begun] = []
    now, to_add = 0.0, [*range(prompts)]
    while to_add or under_way:
        if to_add and (not under_way or rng.random() < 0.3):
            prompt, batch, samples = to_add.pop(0), rng.randint(0, 2), rng.randint(1, 4)
            for one in both:
                one.add(prompt, batch, samples)
        else:
            name, key = under_way.pop(rng.randrange(len(under_way)))
            tokens, seconds, complete = rng.randint(1, 16), rng.choice((1.0, 2.0, 5.0)), rng.random() < 0.5
            for one in both:
                assert one.advanced(name, key, tokens, seconds, complete=complete) == []
        now += 1.0
        begun, expected = (one.next(now) for one in both)
        assert begun == expected
        under_way += begun
