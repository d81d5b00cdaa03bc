"""The random load with a disk cache detects planted bugs, each of which a test here is named after."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.kv.block_pool import Block
from engine.kv.host.host_pool import HostPool
from engine.kv.tiers.arrivals import Arrival, Arrivals
from engine.kv.tiers.departures import Departures, Lease
from engine.kv.tiers.host_memory import HostMemory
from engine.kv.tiers.step_clock import StepClock
from tests.engine.kv.tiers.tiered_load import drive_with_tiers

NUM_SEEDS = 10
# KV is read, or content is published, that belongs to another text, or to none that the shadow model knows.
FOREIGN = "foreign|list index out of range"


def assert_found(plant: Callable[[pytest.MonkeyPatch], None], symptom: str, directory: Path) -> None:
    """Assert that sound code passes the runs until the one in which the planted bug shows this symptom."""
    for seed in range(NUM_SEEDS):
        drive_with_tiers(seed, directory / f"sound {seed}")
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            try:
                drive_with_tiers(seed, directory / f"planted {seed}")
            except Exception as error:
                seen = f"{type(error).__name__}: {error}"
                assert re.search(symptom, seen), f"seed {seed} shows another symptom: {seen}"
                return
    raise AssertionError(f"the planted bug was not found in {NUM_SEEDS} runs")


def test_pages_that_are_read_before_the_copy_is_made_are_detected(tmp_path: Path) -> None:
    def at_once(steps: StepClock, call: Callable[[], None], *, next_step: bool = False) -> None:
        call()

    assert_found(lambda patch: patch.setattr(StepClock, "call_after", at_once), FOREIGN, tmp_path)


def test_pages_that_are_published_before_they_have_come_are_detected(tmp_path: Path) -> None:
    def all_have_come(arrival: Arrival) -> list[list[Block | None]]:
        return [block.pages for block in arrival._blocks]

    assert_found(lambda patch: patch.setattr(Arrival, "arrived", all_have_come), FOREIGN, tmp_path)


def test_a_lease_that_does_not_pin_its_pages_is_detected(tmp_path: Path) -> None:
    lease = Departures.lease

    def unpinned(departures: Departures, *args: Any, **options: Any) -> Lease | None:
        made = lease(departures, *args, **options)
        if made is not None:
            for kind, page in departures._held.get(made, []):
                departures._pages.unpin(kind, page)
            departures._held[made] = []
        return made

    assert_found(lambda patch: patch.setattr(Departures, "lease", unpinned), FOREIGN, tmp_path)


def test_pages_that_are_reused_while_a_source_may_still_write_to_them_are_detected(tmp_path: Path) -> None:
    def release_at_once(arrivals: Arrivals, arrival: Arrival) -> None:
        arrival.is_cancelled = arrival.is_released = True
        for kind, page in arrivals._reserved.pop(arrival, ()):
            arrivals._unpin(kind, page)

    assert_found(lambda patch: patch.setattr(Arrivals, "release", release_at_once), FOREIGN, tmp_path)


def test_a_page_with_a_wrong_offset_is_detected(tmp_path: Path) -> None:
    page = HostMemory.page

    def views(departures: Departures, of_block: list[tuple[int, Block]]) -> list[memoryview | None]:
        pools = departures._pages.pools
        return [page(departures._memory, 0, (held.block_id + 1) % pools[0].num_pages) for _, held in of_block]

    assert_found(lambda patch: patch.setattr(Departures, "_views", views), FOREIGN, tmp_path)


def test_a_page_that_is_not_verified_is_detected(tmp_path: Path) -> None:
    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr("engine.kv.tiers.arrivals.checksum", lambda page: AnyNumber())

    assert_found(plant, FOREIGN, tmp_path)


class AnyNumber:
    """Equal to every number."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def test_a_load_that_is_counted_twice_is_detected(tmp_path: Path) -> None:
    reserve = HostPool.reserve

    def twice(pool: HostPool) -> Block | None:
        page = reserve(pool)
        return None if page is None else pool.pin_stored(page)

    assert_found(lambda patch: patch.setattr(HostPool, "reserve", twice), "pinned", tmp_path)
