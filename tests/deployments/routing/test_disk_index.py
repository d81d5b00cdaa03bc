"""What replicas need not compute because their disks hold it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deployments.routing.disk_index import DiskIndex
from tests.deployments.routing.views import make_view

PROMPT = list(range(100, 110))


def test_a_disk_continues_what_memory_holds() -> None:
    disk = DiskIndex()
    assert not disk
    disk.saved("a", PROMPT[:6])
    disk.saved("b", PROMPT[4:8])
    disk.saved("c", PROMPT[:2])
    assert disk.num_held_blocks(PROMPT, {}) == {"a": 6, "c": 2}
    assert disk.num_held_blocks(PROMPT, {"a": 2, "b": 4, "c": 2}) == {"a": 6, "b": 8}
    assert disk.num_held_blocks(PROMPT[:5], {"b": 4}) == {"a": 5, "b": 5, "c": 2}
    assert disk.num_held_blocks([], {}) == {}
    disk.unsaved("a", PROMPT[3:])
    assert disk.num_held_blocks(PROMPT, {}) == {"a": 3, "c": 2}
    disk.remove_replica("c")
    disk.unsaved("c", PROMPT)
    assert disk.num_held_blocks(PROMPT, {}) == {"a": 3}


@given(st.integers(0, 10), st.integers(0, 10), st.integers(0, 10))
def test_it_counts_an_unbroken_run(in_memory: int, first: int, end: int) -> None:
    disk = DiskIndex()
    disk.saved("a", PROMPT[first:end])
    expected = {"a": end} if first <= in_memory < end else {}
    assert disk.num_held_blocks(PROMPT, {"a": in_memory}) == expected


def test_the_state_follows_events_snapshots_and_restarts() -> None:
    routing = make_view("ab").routing
    routing.saved("a", [1, 2, 3])
    routing.unsaved("a", [3])
    routing.saved("unknown", [1])
    assert (routing.disk.blocks("a"), routing.disk.blocks("unknown")) == ({1, 2}, frozenset())
    routing.replaced("a", [7], saved=[5])
    assert (routing.index.blocks("a"), routing.disk.blocks("a")) == ({7}, {5})
    routing.replaced("a", [7])
    assert not routing.disk.blocks("a")
    routing.saved("a", [1])
    routing.cleared("a")
    assert not routing.disk.blocks("a")
    routing.saved("b", [1])
    routing.set_replicas(["a"])
    assert not routing.disk
