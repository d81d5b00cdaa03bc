"""Random requests on an engine with storage: every read is right, every answer undisturbed, nothing stays pinned.

Three thousand steps in `make test`, 100,000 in `make test-all`, half of them with windows and states as well. Reads and
writes end in a random order, bits flip, leases expire, requests give up, and each engine is followed by
another that finds its file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.kv.tiers.tiered_load import drive_with_tiers
from tests.engine.scheduling.test_random_declarations import options_of_all_kinds

# What has to have happened in 100,000 steps, and how often.
LEAST = {
    "finished": 4000,
    "found on the disk": 6000,
    "kv_tier_tokens disk out": 40_000,
    "kv_tier_tokens disk in": 3000,
    "kv_tier_failures disk checksum": 20,
    "kv_tier_failures disk late": 30,
    "kv_tier_failures disk full": 100,
    "waits": 1500,
    "bits flipped": 800,
    "leases expired": 100,
    "loaded from the host": 2000,
    "aborted": 150,
    "steps on pending tokens": 1500,
}
LEAST_SHARED = {name.replace(" disk ", " shared "): least for name, least in LEAST.items()} | {"vanished": 1000}
LEAST_OF_ALL_KINDS = {name: least // 4 for name, least in LEAST.items()}


def of_shared(seed: int) -> dict[str, Any]:
    return {"storage": "shared"}


def of_all_kinds_shared(seed: int) -> dict[str, Any]:
    return options_of_all_kinds(seed) | of_shared(seed)


def drive_seeds(
    directory: Path,
    seed: int,
    num_steps: int,
    least: dict[str, int],
    draw_options: Callable[[int], dict[str, Any]] = lambda seed: {},
) -> None:
    counts: Counter[str] = Counter()
    while counts["steps"] < num_steps:
        try:
            counts += drive_with_tiers(seed, directory / str(seed), **draw_options(seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        seed += 1
    wanted = {name: count * num_steps // 100_000 for name, count in least.items()}
    missed = {name: counts[name] for name, count in wanted.items() if counts[name] < count}
    assert not missed, f"too seldom in {counts['steps']} steps: {missed}"


def test_random_steps_with_a_disk_cache(tmp_path: Path) -> None:
    drive_seeds(tmp_path, 0, 2_000, LEAST)


def test_random_steps_with_windows_and_states(tmp_path: Path) -> None:
    drive_seeds(tmp_path, 0, 1_000, LEAST_OF_ALL_KINDS, options_of_all_kinds)


def test_random_steps_with_a_shared_cache(tmp_path: Path) -> None:
    drive_seeds(tmp_path / "blocks", 0, 1_000, LEAST_SHARED, of_shared)
    least = {name: count // 4 for name, count in LEAST_SHARED.items()}
    drive_seeds(tmp_path / "all kinds", 0, 1_000, least, of_all_kinds_shared)


@pytest.mark.exhaustive("minutes of random steps")
def test_a_hundred_thousand_random_steps_with_a_disk_cache(tmp_path: Path) -> None:
    drive_seeds(tmp_path / "blocks", 1_000, 50_000, LEAST)
    drive_seeds(tmp_path / "all kinds", 1_000, 50_000, LEAST_OF_ALL_KINDS, options_of_all_kinds)
    drive_seeds(tmp_path / "shared", 1_000, 20_000, LEAST_SHARED, of_shared)
