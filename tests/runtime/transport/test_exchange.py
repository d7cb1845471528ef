"""The channels of members against a network that loses, doubles and reorders by a seed; no sockets, no clock."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings, strategies as st

from hetrl.runtime import wire
from hetrl.runtime.transport import chunks, exchange
from hetrl.runtime.transport.chunks import Arrival, Buffer
from hetrl.runtime.transport.exchange import Exchange
from hetrl.runtime.wire import Priority

_A, _B, _C = "alpha/a/0", "beta/b/0", "beta/c/1"
_WINDOW, _CHUNK = 1000, 100
_TURNS = 4000


@dataclass
class _Faults:
    """What happens to a frame on its way; `until` is the turn from which the network is sound."""

    drop: float = 0.0
    double: float = 0.0
    reorder: float = 0.0
    until: int = 200


@dataclass
class _Network:
    """Members and the frames between them; a turn is a tenth of a second."""

    faults: _Faults
    random: random.Random
    members: dict[str, Exchange] = field(default_factory=dict)
    arrived: dict[str, list[tuple[str, int, bytes]]] = field(default_factory=lambda: defaultdict(list))
    failed: list[tuple[str, int, str]] = field(default_factory=list)
    offences: list[str] = field(default_factory=list)
    waiting: dict[str, list[Arrival]] = field(default_factory=lambda: defaultdict(list))
    frames: list[tuple[str, wire.Header, list[memoryview]]] = field(default_factory=list)
    turn: int = 0
    seen: int = 0

    def join(self, address: str, incarnation: int = 1) -> Exchange:
        member = Exchange(address, "run", incarnation, self._emit, self._fail, self._offended)
        self.members[address] = member
        return member

    def now(self) -> float:
        return self.turn / 10

    def _emit(self, header: wire.Header, frames: Sequence[Buffer]) -> None:
        copies = [memoryview(bytes(frame)) for frame in frames]
        for receiver in header.to:
            self.frames.append((receiver, header, copies))

    def _fail(self, receiver: str, messages: tuple[int, ...], cause: str) -> None:
        self.failed += [(receiver, message, cause) for message in messages]

    def _offended(self, source: str, error: ValueError) -> None:
        self.offences.append(source)

    def step(self, take: bool = True) -> None:
        """Deliver what is on its way, let applications take what they got, and let time pass."""
        self.turn += 1
        frames, self.frames = self.frames, []
        faulty = self.turn < self.faults.until
        if faulty and self.random.random() < self.faults.reorder:
            self.random.shuffle(frames)
        for receiver, header, views in frames:
            self.seen += 1
            if faulty and self.random.random() < self.faults.drop:
                continue
            for _ in range(1 + (faulty and self.random.random() < self.faults.double)):
                self._deliver(receiver, header, views)
        if take:
            self.take()
        for member in self.members.values():
            member.settle()
            member.tick(self.now())

    def _deliver(self, receiver: str, header: wire.Header, views: list[memoryview]) -> None:
        member = self.members[receiver]
        if header.places:
            self.waiting[receiver] += member.heard(header, views[1:])
            return
        match wire.decode_message(views[1]):
            case wire.Acknowledged() as report:
                member.acknowledged(header, report, self.now())
            case wire.Probe() as probe:
                member.probed(header, probe)

    def take(self) -> None:
        for address, arrivals in self.waiting.items():
            for arrival in arrivals:
                self.arrived[address].append(
                    (arrival.header.source, arrival.header.id, b"|".join(bytes(frame) for frame in arrival.frames))
                )
                self.members[address].taken(arrival)
            arrivals.clear()

    def run(self) -> None:
        """Go on until nothing is under way."""
        while self.frames or any(map(_busy, self.members.values())):
            self.step()
            assert self.turn < _TURNS, "the channels never came to rest"


def _busy(member: Exchange) -> bool:
    """Whether something waits, or was sent and not taken out."""
    return bool(member._waiting) or any(channel.open_bytes for channel in member._outbound.values())


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", _CHUNK)
    monkeypatch.setattr(exchange, "WINDOW_BYTES", _WINDOW)


def _network(seed: int = 0, **faults: float) -> _Network:
    return _Network(_Faults(**faults), random.Random(seed))  # type: ignore[arg-type]


_MESSAGES = st.lists(
    st.tuples(
        st.sampled_from(((_B,), (_C,), (_B, _C))),
        st.sampled_from(Priority),
        # A struct, then buffers: empty ones, some of exactly a chunk, a message larger than the window.
        st.tuples(st.integers(1, 250), st.sampled_from((0, 1, 99, 100, 101, 400, 1500))),
    ),
    max_size=25,
)


@settings(max_examples=60)
@given(
    messages=_MESSAGES,
    seed=st.integers(0, 2**32),
    drop=st.floats(0, 0.6),
    double=st.floats(0, 0.5),
    reorder=st.floats(0, 1),
)
def test_everything_arrives_once_in_order_and_as_it_was(
    messages: list[tuple[tuple[str, ...], Priority, tuple[int, int]]],
    seed: int,
    drop: float,
    double: float,
    reorder: float,
) -> None:
    network = _network(seed, drop=drop, double=double, reorder=reorder)
    sender, _, _ = (network.join(address) for address in (_A, _B, _C))
    sent: dict[tuple[str, Priority], list[tuple[str, int, bytes]]] = defaultdict(list)
    priorities = {}
    for number, (receivers, priority, sizes) in enumerate(messages, start=1):
        frames = [random.Random(f"{seed} {number} {size}").randbytes(size) for size in sizes]
        sender.ship(number, receivers, priority, None, frames, network.now())
        priorities[number] = priority
        for receiver in receivers:
            sent[receiver, priority].append((_A, number, b"|".join(frames)))
        network.step(take=network.random.random() < 0.7)
    network.run()
    for receiver in (_B, _C):
        for priority in Priority:
            got = [item for item in network.arrived[receiver] if priorities[item[1]] is priority]
            assert got == sent[receiver, priority]
    assert network.failed == []


def test_what_the_network_loses_is_sent_again_and_what_it_doubles_is_dropped() -> None:
    network = _network(seed=1, drop=0.3, double=0.3, reorder=0.5)
    sender, receiver = network.join(_A), network.join(_B)
    for number in range(1, 20):
        sender.ship(number, (_B,), Priority.DATA, None, [b"x" * 250], network.now())
    network.run()
    assert sender.chunks_resent > 0
    assert receiver.chunks_duplicate > 0


def test_a_sound_network_sees_every_chunk_once() -> None:
    network = _network()
    sender, receiver = network.join(_A), network.join(_B)
    for number in range(1, 20):
        sender.ship(number, (_B,), Priority.DATA, None, [b"x" * 250], network.now())
    network.run()
    assert len(network.arrived[_B]) == 19
    assert (sender.chunks_resent, receiver.chunks_duplicate) == (0, 0)


def test_a_receiver_that_takes_nothing_bounds_what_is_under_way() -> None:
    network = _network()
    sender = network.join(_A)
    network.join(_B)
    shipments = [sender.ship(n, (_B,), Priority.DATA, None, [b"x" * 300], network.now()) for n in range(1, 9)]
    for _ in range(50):
        network.step(take=False)
    assert [shipment.posted for shipment in shipments] == [True] * 3 + [False] * 5
    assert sum(arrival.bytes for arrival in network.waiting[_B]) <= _WINDOW
    network.run()
    assert [number for _, number, _ in network.arrived[_B]] == list(range(1, 9))


def test_channels_do_not_wait_for_each_other() -> None:
    network = _network()
    sender = network.join(_A)
    network.join(_B)
    for number in range(1, 9):
        sender.ship(number, (_B,), Priority.WEIGHTS, None, [b"x" * 300], network.now())
    assert sender.ship(9, (_B,), Priority.CONTROL, None, [b"x"], network.now()).posted
    network.run()


def test_a_slow_receiver_delays_only_what_goes_to_it() -> None:
    network = _network()
    sender = network.join(_A)
    network.join(_B)
    network.join(_C)
    for number in (1, 2):
        sender.ship(number, (_B,), Priority.DATA, None, [b"x" * 900], network.now())
    assert sender.ship(3, (_C,), Priority.DATA, None, [b"x"], network.now()).posted
    assert not sender.ship(4, (_B, _C), Priority.DATA, None, [b"x"], network.now()).posted
    # Nobody overtakes number 4 on the way to C.
    assert not sender.ship(5, (_C,), Priority.DATA, None, [b"x"], network.now()).posted
    network.run()
    assert [number for _, number, _ in network.arrived[_C]] == [3, 4, 5]


def test_a_message_that_is_given_up_lets_the_next_one_go() -> None:
    network = _network()
    sender = network.join(_A)
    network.join(_B)
    shipments = [sender.ship(n, (_B,), Priority.DATA, None, [b"x" * 600], network.now()) for n in (1, 2)]
    small = sender.ship(3, (_B,), Priority.DATA, None, [b"x"], network.now())
    sender.withdraw(shipments[1], network.now())
    assert small.posted
    sender.withdraw(shipments[0], network.now())
    network.run()
    assert [number for _, number, _ in network.arrived[_B]] == [1, 3]


def test_a_receiver_that_restarts_gets_nothing_of_what_was_under_way() -> None:
    network = _network()
    sender = network.join(_A)
    network.join(_B)
    sender.ship(1, (_B,), Priority.DATA, None, [b"first"], network.now())
    network.run()
    network.join(_B, incarnation=2)
    for number in (2, 3):
        sender.ship(number, (_B,), Priority.DATA, None, [b"x" * 700], network.now())
    network.run()
    assert {(number, cause) for _, number, cause in network.failed} == {(2, f"{_B} restarted"), (3, f"{_B} restarted")}
    sender.ship(4, (_B,), Priority.DATA, None, [b"again"], network.now())
    network.run()
    assert [number for _, number, _ in network.arrived[_B]] == [1, 4]


def test_a_sender_that_restarts_begins_anew_and_its_past_is_not_heard() -> None:
    network = _network()
    network.join(_B)
    for life in (7, 3):  # incarnations have no order
        sender = network.join(_A, incarnation=life)
        sender.ship(1, (_B,), Priority.DATA, None, [b"life %d" % life], network.now())
        late = list(network.frames)
        network.run()
        if life == 7:
            past = late
    network.frames += past
    network.run()
    assert [frames for _, _, frames in network.arrived[_B]] == [b"life 7", b"life 3"]


def test_an_end_fails_what_is_under_way_and_the_channel_goes_on() -> None:
    network = _network(drop=1.0, until=5)
    sender = network.join(_A)
    network.join(_B)
    for number in (1, 2, 3):
        sender.ship(number, (_B,), Priority.DATA, None, [b"x" * 800], network.now())
    network.step()
    sender.end("beta", "no connection")
    assert network.failed == [(_B, number, "no connection") for number in (2, 3, 1)]
    network.turn = 5
    sender.ship(4, (_B,), Priority.DATA, None, [b"y"], network.now())
    network.run()
    assert network.arrived[_B] == [(_A, 4, b"y")]


def test_a_forgotten_member_is_not_heard_and_no_longer_waited_for() -> None:
    network = _network()
    here, there = network.join(_A), network.join(_B)
    waiting = [here.ship(n, (_B,), Priority.DATA, None, [b"x" * 800], network.now()) for n in (1, 2)]
    there.ship(1, (_A,), Priority.DATA, None, [b"late"], network.now())
    here.forget(_B, "dead")
    assert all(shipment.posted for shipment in waiting)
    for _ in range(3):
        network.step()
    assert network.failed[:2] == [(_B, 2, "dead"), (_B, 1, "dead")]


@given(st.lists(st.integers(0, 400), min_size=1, max_size=6).filter(lambda sizes: sizes[0] > 0))
def test_a_message_that_is_cut_comes_together_again(sizes: list[int]) -> None:
    frames = [random.Random(size).randbytes(size) for size in sizes]
    first, *rest = chunks.cut(7, 3, frames)
    whole = chunks.Assembly(first)
    for chunk in rest:
        assert not whole.complete
        assert chunk.bytes <= _CHUNK
        whole.add(chunk)
    assert whole.complete
    assert [bytes(frame) for frame in whole.frames] == frames


def test_a_message_of_one_chunk_is_not_copied() -> None:
    buffer = bytearray(50)
    (chunk,) = chunks.cut(1, None, [b"s", buffer])
    frames = chunks.Assembly(chunk).frames
    buffer[0] = 1
    assert frames[1][0] == 1


@pytest.mark.parametrize("sizes", [(), (-1,), (2**40,), (3, 3), (2**23,), (1,) * 5000])
def test_sizes_that_no_message_has_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="message 1"):
        chunks.Assembly(chunks.Chunk(1, None, sizes, (memoryview(b"1234"), memoryview(b"56"))))


@settings(max_examples=60)
@given(st.data())
def test_bogus_frames_are_refused_or_dropped(data: st.DataObject) -> None:
    network = _network()
    member = network.join(_A)
    network.join(_B)
    integers = st.integers(0, 2**40)
    places = tuple(
        wire.Place(stream=data.draw(integers), sequence=data.draw(integers))
        for _ in range(data.draw(st.integers(0, 2)))
    )
    header = wire.Header(
        run="run", source=_B, to=(_A,), id=1, incarnation=1, places=places, sizes=tuple(data.draw(st.lists(integers)))
    )
    try:
        member.heard(header, [memoryview(b"abc")])
    except ValueError:
        assert len(places) != 1
    report = wire.Acknowledged(
        priority=Priority.DATA,
        incarnation=1,
        stream=1,
        cumulative=data.draw(integers),
        ranges=tuple(data.draw(st.lists(st.tuples(integers, integers), max_size=3))),
        taken_bytes=data.draw(integers),
    )
    member.acknowledged(header, report, 0.0)
    member.ship(5, (_B,), Priority.DATA, None, [b"still here"], network.now())
    network.run()
    assert network.arrived[_B] == [(_A, 5, b"still here")]
    assert _A not in network.offences


@pytest.mark.parametrize("hop", ["stream", "life"])
def test_who_begins_its_channel_anew_before_each_message_is_held_to_the_window_all_the_same(
    monkeypatch: pytest.MonkeyPatch, hop: str
) -> None:
    monkeypatch.setattr(exchange, "WINDOW_BYTES", _WINDOW)
    member = Exchange(_A, "run", 1, lambda *_: None, lambda *_: None, lambda *_: pytest.fail("it is no offence"))

    def say(number: int, priority: Priority = Priority.DATA, size: int = 300) -> list[Arrival]:
        stream, life = (number, 1) if hop == "stream" else (1, number)
        header = wire.Header(
            **{"run": "run", "source": _B, "to": (_A,), "id": number, "incarnation": life, "priority": priority},
            places=(wire.Place(stream=stream, sequence=0),),
            sizes=(size,),
        )
        return member.heard(header, [memoryview(bytes(size))])

    arrived = [arrival for number in range(1, 50) for arrival in say(number)]
    assert len(arrived) == 4, "one more than the window holds"
    assert len(say(60, Priority.CONTROL, 1)) == 1, "another channel goes on"
    assert say(60) == []
    for arrival in arrived[:2]:
        member.taken(arrival)
    assert len(say(60)) == 1
