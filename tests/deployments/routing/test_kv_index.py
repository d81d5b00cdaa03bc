"""KVIndex against a plain model of it."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deployments.routing.kv_index import KVIndex

names = st.sampled_from(["a", "b", "c", "d"])
hash_lists = st.lists(st.integers(0, 11), max_size=6, unique=True)
times = st.integers(0, 9).map(float)


class IndexMachine(RuleBasedStateMachine):
    """Compares every block's holders after any sequence of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.index = KVIndex()
        self.confirmed: dict[str, set[int]] = {}
        self.assumed: dict[str, dict[int, float]] = {}  # oldest first

    @rule(name=names)
    def add(self, name: str) -> None:
        self.index.add_replica(name)
        self.confirmed.setdefault(name, set())
        self.assumed.setdefault(name, {})

    @rule(name=names)
    def remove(self, name: str) -> None:
        self.index.remove_replica(name)
        self.confirmed.pop(name, None)
        self.assumed.pop(name, None)

    @rule(name=names, hashes=hash_lists)
    def stored(self, name: str, hashes: list[int]) -> None:
        self.index.stored(name, hashes)
        if name in self.confirmed:
            self.confirmed[name] |= set(hashes)
            self._drop_assumed(name, hashes)

    @rule(name=names, hashes=hash_lists)
    def removed(self, name: str, hashes: list[int]) -> None:
        self.index.removed(name, hashes)
        if name in self.confirmed:
            self.confirmed[name] -= set(hashes)
            self._drop_assumed(name, hashes)

    @rule(name=names)
    def cleared(self, name: str) -> None:
        self.index.cleared(name)
        if name in self.confirmed:
            self.confirmed[name], self.assumed[name] = set(), {}

    @rule(name=names, hashes=hash_lists)
    def replaced(self, name: str, hashes: list[int]) -> None:
        """Apply a snapshot as RoutingState does."""
        self.index.removed(name, self.index.blocks(name).difference(hashes))
        self.index.stored(name, hashes)
        if name in self.confirmed:
            self.confirmed[name] = set(hashes)
            self._drop_assumed(name, hashes)

    @rule(name=names, length=st.integers(0, 8), expires_at=st.one_of(times, st.just(inf)))
    def assume(self, name: str, length: int, expires_at: float) -> None:
        # Confirmed blocks are skipped by halving, so a run must be unbroken: see `num_cached_blocks`.
        hashes = list(range(length))
        run = next((block for block in hashes if block not in self.confirmed.get(name, ())), length)
        if any(block in self.confirmed.get(name, ()) for block in hashes[run:]):
            return
        self.index.assume(name, hashes, expires_at)
        if name in self.assumed:
            for block in reversed(hashes[run:]):
                self.assumed[name].pop(block, None)
                self.assumed[name][block] = expires_at

    @rule(now=times)
    def expire(self, now: float) -> None:
        self.index.expire(now)
        for name, assumed in self.assumed.items():
            self.assumed[name] = {block: end for block, end in assumed.items() if end > now}

    @rule(name=names, max_blocks=st.integers(0, 6))
    def trim(self, name: str, max_blocks: int) -> None:
        self.index.trim(name, max_blocks)
        if name in self.assumed:
            kept = list(self.assumed[name].items())
            self.assumed[name] = dict(kept[max(0, len(kept) - max_blocks) :])

    @precondition(lambda self: self.confirmed)
    @rule(name=names)
    def mark_unconfirmed(self, name: str) -> None:
        order = [*sorted(self.index.blocks(name)), *self.assumed.get(name, {})]
        self.index.mark_unconfirmed(name)
        if name in self.confirmed:
            self.confirmed[name] = set()
            self.assumed[name] = dict.fromkeys(order, inf)
            self.index.assume(name, list(reversed(order)), inf)  # the order of confirmed blocks is not pinned

    @invariant()
    def agrees(self) -> None:
        held = {name: self.confirmed[name] | set(self.assumed[name]) for name in self.confirmed}
        assert len(self.index) == len(set().union(*held.values(), set()))
        for block in range(12):
            assert self.index.num_cached_blocks([block]) == {
                name: 1 for name, blocks in held.items() if block in blocks
            }
        for name in "abcd":
            assert self.index.blocks(name) == self.confirmed.get(name, set())

    def _drop_assumed(self, name: str, hashes: Sequence[int]) -> None:
        for block in hashes:
            self.assumed[name].pop(block, None)


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=50, stateful_step_count=30)


@given(st.lists(st.integers(0, 40), max_size=70), st.integers(0, 40))
def test_numbers_of_cached_blocks_equal_those_of_a_walk_along_the_prompt(held: list[int], length: int) -> None:
    """With as many replicas as there may be bits, each of which holds a run of its own."""
    index, prompt = KVIndex(), [1000 + block for block in range(length)]
    expected = {}
    for number, run in enumerate(held):
        index.add_replica(str(number))
        index.stored(str(number), [1000 + block for block in range(run)])
        if min(run, length):
            expected[str(number)] = min(run, length)
    assert index.num_cached_blocks(prompt) == expected


@given(st.lists(st.sets(st.integers(0, 20)), max_size=5))
def test_after_a_hole_the_last_counted_block_is_held(held: list[set[int]]) -> None:
    index = KVIndex()
    for number, blocks in enumerate(held):
        index.add_replica(str(number))
        index.stored(str(number), blocks)
    for name, number in index.num_cached_blocks(range(21)).items():
        assert {0, number - 1} <= held[int(name)]


def test_a_reused_bit_has_no_blocks_of_its_last_replica() -> None:
    index = KVIndex()
    for life in range(100):
        index.add_replica(f"replica-{life}")
        assert index.num_cached_blocks([1, 2]) == {}
        index.stored(f"replica-{life}", [1, 2])
        index.assume(f"replica-{life}", [1, 2, 3], expires_at=5.0)
        assert index.num_cached_blocks([1, 2, 3]) == {f"replica-{life}": 3}
        index.remove_replica(f"replica-{life}")
    assert len(index) == 0


def test_events_confirm_assumed_blocks_and_later_assumptions_extend_them() -> None:
    index = KVIndex()
    index.add_replica("a")
    index.assume("a", [1, 2, 3], expires_at=5.0)
    index.stored("a", [1])
    index.assume("a", [1, 2], expires_at=7.0)
    index.expire(5.0)
    assert index.num_cached_blocks([1, 2, 3]) == {"a": 2}
    index.expire(7.0)
    assert index.num_cached_blocks([1, 2, 3]) == {"a": 1}


@pytest.mark.parametrize("first", range(1, 9))
def test_assumed_blocks_take_none_from_a_replica_that_lacks_the_blocks_before(first: int) -> None:
    """It has evicted the beginning of the prompt, and computes that again."""
    index, prompt = KVIndex(), list(range(10))
    for name in ("a", "b"):
        index.add_replica(name)
    index.stored("b", prompt[first:])
    index.assume("a", prompt, expires_at=5.0)
    assert index.num_cached_blocks(prompt) == {"a": 10}
    assert index.num_cached_blocks(prompt[first:]) == {"a": 10 - first, "b": 10 - first}
    index.stored("b", prompt[:first])
    assert index.num_cached_blocks(prompt) == {"a": 10, "b": 10}
    index.expire(5.0)
    assert index.num_cached_blocks(prompt) == {"b": 10}


def test_trim_removes_the_suffixes_of_the_least_recent_prompts() -> None:
    index = KVIndex()
    index.add_replica("a")
    index.assume("a", [1, 2, 3], inf)
    index.assume("a", [1, 7], inf)
    index.trim("a", 3)
    assert index.num_cached_blocks([1, 2, 3]) == {"a": 2}
    assert index.num_cached_blocks([1, 7]) == {"a": 2}


def test_unconfirmed_blocks_are_older_than_assumed_ones() -> None:
    index = KVIndex()
    index.add_replica("a")
    index.stored("a", [1, 2, 3])
    index.assume("a", [5, 6], expires_at=1.0)
    index.mark_unconfirmed("a")
    index.expire(2.0)
    assert (index.blocks("a"), len(index)) == (frozenset(), 5)
    index.trim("a", 2)
    assert index.num_cached_blocks([5, 6]) == {"a": 2}
    assert index.num_cached_blocks([1, 2, 3]) == {}


@given(st.lists(st.lists(st.integers(0, 6), max_size=12), min_size=1, max_size=3))
def test_held_blocks_are_the_same_in_each_form(rounds: list[list[int]]) -> None:
    """By name, by slot and deepest first; with more replicas than an integer has bits, of which some have left."""
    index, prompt = KVIndex(), list(range(6))
    for number in range(70):
        index.add_replica(f"before-{number}")
    for number in range(0, 70, 3):
        index.remove_replica(f"before-{number}")
    slots, held = {}, dict[str, int]()
    for number, depth in enumerate(depth for depths in rounds for depth in depths):
        name = f"r{number}"
        slots[name] = index.add_replica(name)
        index.stored(name, prompt[:depth])
        held |= {name: depth} if depth else {}
    num_blocks = index.num_cached_blocks(prompt)
    assert num_blocks == held
    assert len(num_blocks) == len(held)
    assert num_blocks.most == max(held.values(), default=0)
    by_slot = num_blocks.by_slot(200)
    assert {name: by_slot[slot] for name, slot in slots.items() if by_slot[slot]} == held
    assert by_slot.sum() == sum(held.values())
    deepest = list(num_blocks.deepest())
    assert dict(deepest) == held
    assert [depth for _, depth in deepest] == sorted(held.values(), reverse=True)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=80))
def test_blocks_by_slot_where_all_replicas_hold_some(depths: list[int]) -> None:
    """As of a system prompt: it is filled in at once, and those that hold more are set after it."""
    index, prompt = KVIndex(), list(range(6))
    for number, depth in enumerate(depths):
        assert index.add_replica(f"r{number}") == number
        index.stored(f"r{number}", prompt[:depth])
    assert index.num_cached_blocks(prompt).by_slot(len(depths)).tolist() == depths
    assert index.num_cached_blocks(prompt).by_slot(len(depths) + 1).tolist() == [*depths, 0.0]
