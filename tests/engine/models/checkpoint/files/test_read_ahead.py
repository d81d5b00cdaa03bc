"""Reading ahead on threads: order, the bound on memory, errors, and what is left when the caller stops."""

from __future__ import annotations

import threading

import pytest

from engine.models.checkpoint.files import read_ahead as module
from engine.models.checkpoint.files.read_ahead import read_ahead
from tests.waiting import HANG_S


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("pagoda-load")]


def test_results_come_in_order_whichever_is_read_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NUM_THREADS", 2)
    was_read = [threading.Event() for _ in range(20)]

    def read(item: int) -> int:
        if item % 3 == 0:
            assert was_read[item + 1].wait(HANG_S)
        was_read[item].set()
        return item * item

    assert list(read_ahead(range(20), read, lambda _: 1)) == [(item, item * item) for item in range(20)]
    assert readers() == []


def test_no_more_than_the_bound_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    sizes = [40, 40, 40, 250, 10, 90, 5, 5, 100, 1]
    started: list[int] = []
    yielded = 0
    for index, _ in read_ahead(range(len(sizes)), started.append, sizes.__getitem__):
        assert index == yielded
        assert sum(sizes[item] for item in started[index:]) <= max(100, sizes[index])
        yielded += 1
    assert yielded == len(sizes)


def test_a_caller_may_set_a_lower_bound() -> None:
    started: list[int] = []
    for index, _ in read_ahead(range(20), started.append, lambda _: 10, max_bytes=30):
        assert len(started) - index <= 3


def test_the_first_error_in_order_ends_it_and_its_threads() -> None:
    def read(item: int) -> int:
        if item >= 3:
            raise ValueError(f"item {item}")
        return item

    results = read_ahead(range(10), read, lambda _: 1)
    assert [next(results) for _ in range(3)] == [(0, 0), (1, 1), (2, 2)]
    with pytest.raises(ValueError, match="item 3"):
        next(results)
    assert readers() == []


def test_a_caller_that_stops_leaves_no_thread() -> None:
    results = read_ahead(range(1000), lambda item: item, lambda _: 2**20)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert readers() == []
