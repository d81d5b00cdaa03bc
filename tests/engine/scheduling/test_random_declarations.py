"""Random load on engines whose layers declare windows and states, with and without host pools of each kind."""

from __future__ import annotations

import random

import pytest

from engine.kv.pool_sizes import pages_in_reach
from kernels.attention.window import Chunk
from tests.engine.random_load import drive, drive_seeds
from tests.engine.random_requests import random_options

# With recurrent layers, whose states are copied, saved, forked and restored; a fifth of the drafts are rejected.
LEAST_WITH_STATES = {
    "finished": 4000,
    "evicted": 20_000,
    "prefill beside decode": 3000,
    "preempted to recompute": 500,
    "copied on write": 300,
    "beam searches": 300,
    "tokens drafted": 5000,
    "tokens from drafts": 2000,
    "cached": 250,
    "copied states": 10_000,
    "saved states": 3000,
    "evicted snapshots": 1000,
}
LEAST_WITH_STATES_IN_FLIGHT = {name: least // 3 for name, least in LEAST_WITH_STATES.items()} | {
    "steps on pending tokens": 8000,  # those that may get drafts wait for their last token
    "waits for a token": 3000,
    "wasted": 300,
    "resampled on the host": 300,
}
# With windows, states or both, and host pools of each kind, some of them too small for most swaps.
LEAST_OF_ALL_KINDS = {
    "finished": 4000,
    "evicted to the host": 20_000,
    "preempted to recompute": 300,
    "preempted by swap": 300,
    "swapped blocks": 3000,
    "pages from the host": 700,
    "states from the host": 500,
    "loaded from the host": 200,
    "cached": 700,
    "of a group that comes back": 150,
    "copied on write": 1500,
    "beam searches": 500,
    "tokens from drafts": 2000,
    "copied states": 10_000,
    "evicted snapshots": 2000,
}


def window_options(seed: int) -> dict[str, object]:
    """Draw one or two windows or chunks with few pages: enough for a step and for what one to four sequences reach."""
    options, rng = random_options(random.Random(seed)), random.Random(-seed)
    size, budget, num_blocks = (
        int(str(options[key])) for key in ("block_size", "max_num_batched_tokens", "num_blocks")
    )
    chunks = [Chunk(tokens) for tokens in (1, 3, 4, 8, 13, 24)]
    windows = rng.sample([1, 2, 3, 5, 8, 13, 20, *chunks], rng.choice([1, 1, 2]))
    pages = [rng.choice([1, 2, 4]) * pages_in_reach(window, size) * 4 + -(-budget // size) for window in windows]
    counts = [min(num_blocks, count) for count in pages]
    return {"windows": tuple(zip(windows, counts, strict=True)), "num_host_blocks": 0, "twins_share": False}


def options_of_all_kinds(seed: int) -> dict[str, object]:
    """Draw windows, states or both, and the sizes of their host pools."""
    rng = random.Random(seed)
    kinds = rng.choice([("windows",), ("states",), ("windows", "states"), ("windows", "states")])
    options: dict[str, object] = {"num_host_blocks": rng.choice([2, 8, 24, 80]), "twins_share": False}
    if "windows" in kinds:
        windows = window_options(seed)["windows"]
        options["windows"] = windows
        options["num_host_window_pages"] = tuple(rng.choice([1, 4, 12, 60]) for _ in windows)  # type: ignore[attr-defined]
    if "states" in kinds:
        options["num_slots"], options["num_host_slots"] = (
            rng.choice([1, 2, 3, 6, 12, 40]),
            rng.choice([0, 1, 4, 12, 40]),
        )
        options["snapshot_interval"] = rng.choice([0, 8, 16])
    return options


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}, {"num_slots": 12}], ids=str)
@pytest.mark.parametrize(
    "seeds",
    [
        range(3),
        pytest.param(range(10, 14), marks=pytest.mark.long),
        pytest.param(range(14, 300), marks=pytest.mark.exhaustive("more seeds, 100,000 steps in all")),
    ],
    ids=str,
)
def test_random_steps_with_windows(seeds: range, options: dict[str, object]) -> None:
    for seed in seeds:
        drive(seed, **(window_options(seed) | options))


@pytest.mark.parametrize("num_slots", [1, 2, 3, 6, 12, 40])
def test_random_steps_with_states(num_slots: int) -> None:
    for seed in range(2):
        drive(seed, num_slots=num_slots, num_host_blocks=0, snapshot_interval=8 * seed)


@pytest.mark.parametrize(
    ("first_seed", "num_steps"),
    [
        pytest.param(1_000, 7_000, marks=pytest.mark.long),
        pytest.param(5_000, 93_000, marks=pytest.mark.exhaustive("more seeds than the 7,000 steps of CI")),
    ],
)
def test_many_random_steps_with_states(first_seed: int, num_steps: int) -> None:
    for num_slots in (3, 12):
        drive_seeds(
            first_seed,
            num_steps // 2,
            LEAST_WITH_STATES,
            num_slots=num_slots,
            num_host_blocks=0,
            snapshot_interval=8 * (num_slots > 3),
        )


@pytest.mark.parametrize("num_slots", [1, 3, 12])
def test_random_steps_with_states_that_overlap(num_slots: int) -> None:
    drive(num_slots, num_slots=num_slots, num_host_blocks=0, async_scheduling=True)


@pytest.mark.parametrize(
    ("first_seed", "num_steps"),
    [
        pytest.param(1_000, 7_000, marks=pytest.mark.long),
        pytest.param(
            5_000,
            93_000,
            marks=[pytest.mark.exhaustive("more seeds than the 7,000 steps of CI"), pytest.mark.timeout(3600)],
        ),
    ],
)
def test_many_random_steps_with_states_that_overlap(first_seed: int, num_steps: int) -> None:
    for num_slots in (3, 12):
        drive_seeds(
            first_seed,
            num_steps // 2,
            LEAST_WITH_STATES_IN_FLIGHT,
            num_slots=num_slots,
            num_host_blocks=0,
            async_scheduling=True,
        )


@pytest.mark.parametrize("seed", range(6))
def test_random_steps_with_all_kinds_and_their_host_pools(seed: int) -> None:
    drive(seed, **options_of_all_kinds(seed), async_scheduling=bool(seed % 2))


@pytest.mark.long
@pytest.mark.parametrize("overlaps", [False, True])
def test_five_thousand_random_steps_with_all_kinds_and_their_host_pools(overlaps: bool) -> None:
    least = {name: count // (4 if overlaps else 2) for name, count in LEAST_OF_ALL_KINDS.items()}
    drive_seeds(100, 5_000, least, options_of_all_kinds, async_scheduling=overlaps)


@pytest.mark.exhaustive("a hundred thousand steps in one piece")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("overlaps", [False, True])
def test_a_hundred_thousand_random_steps_with_all_kinds_and_their_host_pools(overlaps: bool) -> None:
    least = {name: count // (3 if overlaps else 1) for name, count in LEAST_OF_ALL_KINDS.items()}
    drive_seeds(10_000, 100_000, least, options_of_all_kinds, async_scheduling=overlaps)
