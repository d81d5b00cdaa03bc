"""What replicas need not compute because their disks, or the shared cache, hold it."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.routing.storage_index import StorageIndex
from engine.kv.events import StorageName
from tests.deployments.routing.views import make_view

PROMPT = list(range(100, 110))


def test_a_disk_continues_what_memory_holds() -> None:
    disk = StorageIndex()
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
    disk = StorageIndex()
    disk.saved("a", PROMPT[first:end])
    expected = {"a": end} if first <= in_memory < end else {}
    assert disk.num_held_blocks(PROMPT, {"a": in_memory}) == expected


@pytest.mark.parametrize("storage", get_args(StorageName))
def test_the_state_follows_events_snapshots_and_restarts(storage: StorageName) -> None:
    routing = make_view("ab").routing
    index, snapshot = routing.storage[storage], "saved" if storage == "disk" else "shared"
    routing.saved("a", [1, 2, 3], storage)
    routing.unsaved("a", [3], storage)
    routing.saved("unknown", [1], storage)
    assert (index.blocks("a"), index.blocks("unknown")) == ({1, 2}, frozenset())
    routing.replaced("a", [7], **{snapshot: [5]})
    assert (routing.index.blocks("a"), index.blocks("a")) == ({7}, {5})
    routing.replaced("a", [7])
    assert not index.blocks("a")
    routing.saved("a", [1], storage)
    routing.cleared("a")
    assert not index.blocks("a")
    routing.saved("b", [1], storage)
    routing.set_replicas(["a"])
    assert not any(routing.storage.values())
