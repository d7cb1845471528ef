from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from hetrl.runtime import wire

_LEAVES: dict[object, st.SearchStrategy[object]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=10),
    bytes: st.binary(max_size=10),
    bool: st.booleans(),
    type(None): st.none(),
    wire.Priority: st.sampled_from(wire.Priority),
}


def _values(kind: object) -> st.SearchStrategy[object]:
    """Generate values of an annotated type."""
    if kind in _LEAVES:
        return _LEAVES[kind]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = msgspec.structs.fields(kind)
        return st.fixed_dictionaries({field.name: _values(field.type) for field in fields}).map(lambda v: kind(**v))
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is tuple and ... not in arguments:
        return st.tuples(*map(_values, arguments))
    if typing.get_origin(kind) is tuple:
        return st.lists(_values(arguments[0]), max_size=3).map(tuple)
    if typing.get_origin(kind) is dict:
        return st.dictionaries(_values(arguments[0]), _values(arguments[1]), max_size=3)
    return st.one_of([_values(argument) for argument in arguments])


_HEADERS = typing.cast(st.SearchStrategy[wire.Header], _values(wire.Header)).map(
    lambda header: msgspec.structs.replace(header, format=wire.WIRE_FORMAT)
)
_HEADER = wire.Header(run="r", source="alpha/controller/0", to=("beta/actor_generation/0",), id=1)


@settings(max_examples=20)
@pytest.mark.parametrize("kind", typing.get_args(wire.Message), ids=lambda kind: kind.__name__)
@given(data=st.data(), header=_HEADERS)
def test_every_message_survives_the_wire(kind: type[wire.Tagged], data: st.DataObject, header: wire.Header) -> None:
    message = data.draw(_values(kind))
    frames = wire.encode(header, message)
    assert wire.decode_header(frames[0]) == header
    arrived = wire.decode_message(memoryview(frames[1]))
    assert arrived == message
    assert type(arrived) is kind


def test_every_tagged_message_is_one_that_may_arrive() -> None:
    assert set(wire.Tagged.__subclasses__()) == set(typing.get_args(wire.Message))


@given(st.binary(max_size=60))
def test_garbage_is_no_header_and_no_message(garbage: bytes) -> None:
    for decode in (wire.decode_header, wire.decode_message):
        with pytest.raises((msgspec.MsgspecError, ValueError)):
            decode(garbage)


@given(st.integers(0, 200))
def test_a_cut_frame_is_refused(length: int) -> None:
    header, message = wire.encode(_HEADER, wire.Abort(cause="x" * 20))
    for decode, frame in ((wire.decode_header, header), (wire.decode_message, message)):
        with pytest.raises((msgspec.MsgspecError, ValueError)):
            decode(frame[: min(length, len(frame) - 1)])


def test_another_format_is_refused() -> None:
    frame = wire.encode(msgspec.structs.replace(_HEADER, format="hetrl-wire/9"), wire.Done())[0]
    with pytest.raises(msgspec.ValidationError, match="hetrl-wire/9"):
        wire.decode_header(frame)


@pytest.mark.parametrize("raw", [{"type": "Nothing"}, {"type": "Abort"}, {"type": "Abort", "cause": 1}, {"cause": "x"}])
def test_an_unknown_or_incomplete_message_is_refused(raw: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        wire.decode_message(msgspec.msgpack.encode(raw))


def structs() -> list[type[msgspec.Struct]]:
    """Return every struct of the wire, those inside of messages included."""
    found, todo = [], [wire.Header, *typing.get_args(wire.Message)]
    while todo:
        kind = todo.pop()
        todo += typing.get_args(kind)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in found:
            found.append(kind)
            todo += typing.get_type_hints(kind).values()
    return found


@pytest.mark.parametrize("kind", structs(), ids=lambda kind: kind.__name__)
def test_no_struct_has_fields_that_nobody_knows_or_anything_inside(kind: type[msgspec.Struct]) -> None:
    assert kind.__struct_config__.forbid_unknown_fields
    assert not [hint for hint in typing.get_type_hints(kind).values() if hint in (Any, object)]


@pytest.mark.parametrize("fields", [b"\xa1y%b\xa4type\xa4Done", b"\xa4type\xa4Done\xa1y%b"], ids=["first", "last"])
@pytest.mark.parametrize("decode", [wire.decode_header, wire.decode_message])
def test_arrays_in_arrays_in_arrays_are_refused(decode: Callable[[bytes], object], fields: bytes) -> None:
    """The type may come last, and what stands before it is skipped unread."""
    with pytest.raises(msgspec.MsgspecError):
        decode(b"\x82" + fields % (b"\x91" * 100_000 + b"\x01"))


def test_what_carries_tensors_or_samples_is_not_control() -> None:
    begin = wire.WeightsBegin(version=1, encoding="full")
    priorities = [wire.priority_of(message) for message in (wire.Done(), wire.Score(0, "values", ()), begin)]
    assert priorities == [wire.Priority.CONTROL, wire.Priority.DATA, wire.Priority.WEIGHTS]


@pytest.mark.parametrize("gives_way", [False, True])
def test_all_of_a_version_travels_in_one_channel(gives_way: bool) -> None:
    spec = wire.TensorSpec(name="w", dtype="float32", shape=(1,), bytes=4)
    parts = (
        wire.WeightsBegin(version=1, gives_way=gives_way),
        wire.WeightsTensor(version=1, tensor=spec, offset=0, bytes=4, digest="0", gives_way=gives_way),
        wire.WeightsEnd(version=1, tensors=1, bytes=4, digest="0", gives_way=gives_way),
    )
    channel = wire.Priority.LATER_WEIGHTS if gives_way else wire.Priority.WEIGHTS
    assert {wire.priority_of(part) for part in parts} == {channel}


def test_receivers_are_grouped_by_site_in_order() -> None:
    members = [wire.address("beta", "actor_generation", 1), wire.address("alpha", "controller"), "beta/critic/0"]
    assert wire.by_site(members) == {
        "beta": ("beta/actor_generation/1", "beta/critic/0"),
        "alpha": ("alpha/controller/0",),
    }
