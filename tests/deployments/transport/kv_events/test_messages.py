"""KV messages round-trip, and any other bytes raise KVMessageError."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple, replace

from deployments.transport.hashes import pack_hashes, unpack_hashes
from deployments.transport.kv_events.codec import (
    MAX_MESSAGE_BYTES,
    KVMessageError,
    decode_awaited,
    decode_events,
    decode_load,
    decode_snapshot,
    encode,
)
from deployments.transport.kv_events.messages import (
    CLEARED,
    MAX_EVENT_GROUPS,
    MAX_SNAPSHOT_BYTES,
    REMOVED,
    STATE_REMOVED,
    STATE_STORED,
    STORED,
    AwaitedMessage,
    EventsMessage,
    LoadMessage,
    Snapshot,
    events_message,
)
from deployments.transport.kv_events.mirror import KVMirror
from deployments.transport.kv_events.topics import Topics
from engine.errors import ConfigError
from engine.observability.load import MAX_SOURCE_RATES, EngineLoad, SourceRate
from engine.observability.step_costs import StepCosts
from tests.deployments import kv_listener
from tests.deployments.kv_listener import batch, load, removed, saved, states_removed, states_stored, stored, unsaved

Decode = Callable[[bytes], object]
DECODERS: list[Decode] = [decode_awaited, decode_events, decode_load, decode_snapshot]
BIG = 2**64 - 1

VALID = [
    encode(events_message(batch(5, (*stored(1, BIG), *removed(1), *kv_listener.CLEARED, *stored(2))), 12.5)),
    encode(LoadMessage(3, -1, load(7))),
    encode(LoadMessage(0, -1, None)),
    encode(events_message(batch(5, (*stored(1, BIG), *states_removed(2), *states_stored(1, BIG))), 12.5)),
    encode(Snapshot(1, 4, pack_hashes([1, 2, BIG]))),
    encode(Snapshot(1, 4, pack_hashes([1, 2, BIG]), pack_hashes([2]))),
    encode(AwaitedMessage(pack_hashes([1, 2, BIG]))),
]


def test_the_order_within_a_step_is_kept() -> None:
    events = (*stored(1, BIG), *removed(1), *stored(1), *kv_listener.CLEARED, *kv_listener.CLEARED, *removed(0))
    message = decode_events(encode(events_message(batch(5, events, run_id=BIG), 12.5)))
    assert (message.run_id, message.number, message.sent_at) == (BIG, 5, 12.5)
    changes = [(kind, list(hashes)) for kind, hashes in message.changes()]
    assert changes == [(STORED, [1, BIG]), (REMOVED, [1]), (STORED, [1]), (CLEARED, []), (REMOVED, [0])]


def test_hashes_are_little_endian_words() -> None:
    assert pack_hashes([1, 2**63]) == bytes([1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x80])
    assert list(unpack_hashes(pack_hashes([0, 1, BIG]))) == [0, 1, BIG]
    assert pack_hashes(unpack_hashes(pack_hashes([7, 8]))) == pack_hashes([7, 8])


def test_a_load_round_trips() -> None:
    numbers = range(1, len(EngineLoad.__struct_fields__) - 1)
    rates = tuple(SourceRate(f"tcp://10.0.0.{number}:1", 0.1, 7.0) for number in range(MAX_SOURCE_RATES))
    sent = EngineLoad(*numbers, step_costs=StepCosts(0.1, 0.2, 0.3, 0.4), source_rates=rates)
    received = decode_load(encode(LoadMessage(9, 8, sent)))
    assert (received.run_id, received.number, received.load) == (9, 8, sent)
    assert decode_load(encode(LoadMessage(0, -1, None))).load is None


def test_a_snapshot_round_trips() -> None:
    message = decode_snapshot(encode(Snapshot(2, -1, pack_hashes([3, 4]))))
    assert (message.run_id, message.number, list(message.hashes), message.states) == (2, -1, [3, 4], None)


def test_a_snapshot_with_states_round_trips() -> None:
    for states in ([], [3]):
        message = decode_snapshot(encode(Snapshot(2, 7, pack_hashes([3, 4]), pack_hashes(states))))
        assert message.states is not None
        assert (list(message.hashes), list(message.states)) == ([3, 4], states)
    with pytest.raises(KVMessageError, match="7 bytes"):
        decode_snapshot(msgspec.msgpack.encode([2, 7, b"12345678", b"1234567"]))


def test_a_snapshot_with_a_disk_cache_round_trips() -> None:
    mirror = KVMirror()
    mirror.apply(events_message(batch(0, (*stored(3), *saved(3, 4, 5))), 0.0))
    mirror.apply(events_message(batch(1, unsaved(4)), 0.0))
    message = decode_snapshot(mirror.snapshot())
    assert (list(message.hashes), message.states, sorted(message.saved)) == ([3], None, [3, 5])
    mirror.apply(events_message(batch(2, kv_listener.CLEARED), 0.0))
    assert not decode_snapshot(mirror.snapshot()).saved
    with pytest.raises(KVMessageError, match="7 bytes"):
        decode_snapshot(msgspec.msgpack.encode([2, 7, b"12345678", None, b"1234567"]))


def test_a_snapshot_with_a_shared_cache_round_trips() -> None:
    mirror = KVMirror()
    mirror.apply(events_message(batch(0, (*saved(3), *saved(3, 4, 5, storage="shared"))), 0.0))
    mirror.apply(events_message(batch(1, unsaved(4, storage="shared")), 0.0))
    message = decode_snapshot(mirror.snapshot())
    assert (message.states, list(message.saved), sorted(message.shared)) == (None, [3], [3, 5])
    mirror.apply(events_message(batch(2, kv_listener.CLEARED), 0.0))
    assert not decode_snapshot(mirror.snapshot()).shared
    with pytest.raises(KVMessageError, match="7 bytes"):
        decode_snapshot(msgspec.msgpack.encode([2, 7, b"12345678", None, b"", b"1234567"]))


def test_a_snapshot_has_only_the_fields_that_it_needs() -> None:
    fields = [2, 7, pack_hashes([3, 4]), None, pack_hashes([5])]
    assert encode(Snapshot(2, 7, pack_hashes([3, 4]), None, pack_hashes([5]))) == msgspec.msgpack.encode(fields)


def test_a_replica_without_states_sends_what_it_sent_before_there_were_any() -> None:
    """So that during an update, ingresses and replicas of either version understand each other."""
    snapshot = msgspec.msgpack.encode([2, 7, pack_hashes([3, 4])])
    assert encode(Snapshot(2, 7, pack_hashes([3, 4]))) == snapshot
    events = events_message(batch(5, (*stored(1), *removed(1), *kv_listener.CLEARED)), 12.5)
    groups = [[0, pack_hashes([1])], [1, pack_hashes([1])], [2, b""]]
    assert encode(events) == msgspec.msgpack.encode([1, 5, 12.5, groups])


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, -math.inf, 1e300])
def test_numbers_are_finite_and_not_negative(value: float) -> None:
    for bad in (replace(load(), prefill_tokens_per_s=value), replace(load(), step_costs=StepCosts(value))):
        with pytest.raises(KVMessageError):
            decode_load(encode(LoadMessage(1, 1, bad)))
    for rates in ((SourceRate("", value, 1.0),), (SourceRate("", 1.0, value),)):
        bad = replace(load(), source_rates=rates)
        with pytest.raises(KVMessageError):
            decode_load(encode(LoadMessage(1, 1, bad)))
    with pytest.raises(KVMessageError):
        decode_events(encode(EventsMessage(1, 1, value, [])))


@pytest.mark.parametrize(
    "fields",
    [
        [1, 1, 1.0],  # too few
        [1, 1, 1.0, [], 0],  # too many
        [-1, 1, 1.0, []],
        [1, -1, 1.0, []],
        [1, True, 1.0, []],
        ["1", 1, 1.0, []],
        [1, 1, "now", []],
        [1, 1, 1.0, None],
        [1, 1, 1.0, [[STORED, b"1234567"]]],  # no whole hash
        [1, 1, 1.0, [[STORED, b""]]],
        [1, 1, 1.0, [[CLEARED, b"12345678"]]],
        [1, 1, 1.0, [[9, b"12345678"]]],
        [1, 1, 1.0, [[STATE_STORED, b""]]],
        [1, 1, 1.0, [[STATE_REMOVED, b"1234567"]]],
        [1, 1, 1.0, [[STORED, "12345678"]]],
        [1, 1, 1.0, [[STORED, [1, 2]]]],
        [1, 1, 1.0, [[STORED, b"12345678", b""]]],
        [1, 1, 1.0, [[CLEARED, b""]] * (MAX_EVENT_GROUPS + 1)],
        {"run_id": 1, "number": 1, "sent_at": 1.0, "groups": []},
        None,
        [],
    ],
)
def test_events_of_another_shape_are_malformed(fields: Any) -> None:
    with pytest.raises(KVMessageError) as caught:
        decode_events(msgspec.msgpack.encode(fields))
    assert caught.value.reason == "malformed"


def test_the_error_of_a_malformed_message_names_the_field() -> None:
    """It is logged, and is all that an operator sees of a peer of another version."""
    with pytest.raises(KVMessageError, match=r"`int` >= 0 - at `\$\[1\]`"):
        decode_events(msgspec.msgpack.encode([1, -1, 1.0, []]))
    with pytest.raises(KVMessageError, match="7 bytes are not a whole number of 8-byte hashes"):
        decode_awaited(msgspec.msgpack.encode([b"1234567"]))


@pytest.mark.parametrize(
    ("decode", "limit"),
    [(decode, MAX_SNAPSHOT_BYTES if decode is decode_snapshot else MAX_MESSAGE_BYTES) for decode in DECODERS],
)
def test_oversized_messages_are_not_decoded(decode: Decode, limit: int) -> None:
    with pytest.raises(KVMessageError) as caught:
        decode(bytes(limit + 1))
    assert caught.value.reason == "oversized"


@given(st.binary(max_size=200), st.sampled_from(DECODERS))
def test_random_bytes_are_malformed_or_valid(data: bytes, decode: Decode) -> None:
    check(decode, data)


@given(st.sampled_from(VALID), st.sampled_from(DECODERS), st.data())
def test_mutated_messages_are_malformed_or_valid(valid: bytes, decode: Decode, draw: st.DataObject) -> None:
    data = bytearray(valid)
    for _ in range(draw.draw(st.integers(1, 4))):
        index = draw.draw(st.integers(0, max(0, len(data) - 1)))
        how = draw.draw(st.sampled_from(["flip", "cut", "insert", "remove"]))
        if how == "flip" and data:
            data[index] = draw.draw(st.integers(0, 255))
        elif how == "cut":
            del data[index:]
        elif how == "insert":
            data[index:index] = draw.draw(st.binary(min_size=1, max_size=9))
        else:
            del data[index : index + 3]
    check(decode, bytes(data))


def test_deep_nesting_and_huge_length_fields_are_harmless() -> None:
    for data in (
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x94\x01\x01\xcb" + b"\xff" * 8,
    ):
        for decode in DECODERS:
            with pytest.raises(KVMessageError):
                decode(data)


def check(decode: Decode, data: bytes) -> None:
    """Decode ``data``: the result is a message within all limits, or a KVMessageError."""
    try:
        message = decode(data)
    except KVMessageError:
        return
    match message:
        case EventsMessage():
            assert message.run_id >= 0
            assert message.number >= 0
            assert math.isfinite(message.sent_at)
            assert all(0 <= block_hash <= BIG for _, hashes in message.changes() for block_hash in hashes)
        case Snapshot():
            assert message.number >= -1
            assert all(0 <= block_hash <= BIG for block_hash in (*message.hashes, *(message.states or ())))
        case LoadMessage():
            assert message.load is None or all(math.isfinite(value) and value >= 0 for value in astuple(message.load))
        case AwaitedMessage():
            assert all(0 <= block_hash <= BIG for block_hash in message.hashes)
        case _:
            raise AssertionError(message)


# ---- topics ----------------------------------------------------------------------------------------------------------


def test_no_topic_is_a_prefix_of_another_replicas_topic() -> None:
    names = ["r1", "r10", "r", "r1/", "r1/x", "r1%2F", "ü", "default#Engine#r1", " "]
    topics = [Topics(name) for name in names]
    flat = [topic for of in topics for topic in (of.events, of.load, of.snapshots)]
    assert not [(a, b) for a in flat for b in flat if a is not b and a.startswith(b)]


def test_a_snapshot_topic_needs_a_valid_nonce() -> None:
    topics = Topics("r1")
    assert topics.is_snapshot(topics.snapshot("0123456789abcdef"))
    for nonce in (
        "",
        "0123456789abcde",
        "0123456789abcdef0",
        "0123456789abcdeF",
        "0123456789abcde/",
        "012345678\n9abcde",
    ):
        assert not topics.is_snapshot(topics.snapshot(nonce))
    assert not topics.is_snapshot(Topics("r10").snapshot("0123456789abcdef"))
    assert not topics.is_snapshot(topics.events)


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb", "\ud800"])
def test_invalid_replica_names_are_rejected(name: str) -> None:
    with pytest.raises(ConfigError):
        Topics(name)


def test_the_error_of_a_long_name_shows_its_start() -> None:
    with pytest.raises(ConfigError, match=f"^replica='{'x' * 40}' is not a name; it needs 1 to 256 printable letters$"):
        Topics("x" * 257)
