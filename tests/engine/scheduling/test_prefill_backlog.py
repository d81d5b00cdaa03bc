"""PrefillBacklog: the tokens that requests compute before they decode, each shared block counted once."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.engine import Engine
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.engine.random_load import RandomLoad, drive
from tests.engine.random_requests import Arrival, lone_arrival
from tests.engine.shadow import make_engine, run_to_end


def add(engine: Engine, request_id: str, prompt: list[int], max_tokens: int = 4, **options: Any) -> None:
    engine.add_request(EngineRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens, **options)))


def queued(engine: Engine) -> int:
    return engine.meter.load().queued_prefill_tokens


def test_ten_equal_prompts_count_once_but_for_their_tails() -> None:
    engine, _ = make_engine(block_size=4)
    for i in range(10):
        add(engine, str(i), list(range(18)))
    assert queued(engine) == 16 + 10 * 2


def test_blocks_that_twins_await_still_count_when_the_first_of_them_leaves() -> None:
    engine, _ = make_engine(block_size=4)
    for name in ("a", "b"):
        add(engine, name, list(range(18)))
    engine.abort("a")
    assert queued(engine) == 18
    engine.abort("b")
    assert queued(engine) == 0


def test_cached_tokens_do_not_count() -> None:
    engine, _ = make_engine(block_size=4)
    add(engine, "a", list(range(18)))
    run_to_end(engine)
    add(engine, "b", list(range(16)) + [40] * 5)
    assert queued(engine) == 5
    add(engine, "other", list(range(16)) + [40] * 5, prompt_logprobs=0)  # these need every position's logits
    assert queued(engine) == 5 + 21


def test_a_running_prefill_counts_down_and_its_twins_tail_remains() -> None:
    engine, _ = make_engine(block_size=4, max_num_batched_tokens=8)
    add(engine, "a", list(range(22)))
    add(engine, "b", list(range(22)))
    seen = []
    while queued(engine):
        seen.append(queued(engine))
        engine.step()
    assert seen[:3] == [24, 16, 8]
    assert engine.has_unfinished, "both decode by now"


def test_blocks_that_the_first_twin_computed_count_for_none_even_if_it_ends_with_its_first_token() -> None:
    engine, _ = make_engine(block_size=4, max_num_seqs=1)
    for name in ("a", "b", "c"):
        add(engine, name, list(range(18)), max_tokens=1)
    engine.step()
    assert queued(engine) == 2 * 2


@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_a_recomputation_counts_and_a_swapped_request_hardly_does(num_host_blocks: int) -> None:
    engine, _ = make_engine(block_size=4, num_blocks=12, num_host_blocks=num_host_blocks, enable_prefix_caching=False)
    for i in range(2):
        add(engine, str(i), [i] * 17, max_tokens=20)
    engine.step()
    while not engine.scheduler.waiting:
        engine.step()
    [preempted] = engine.scheduler.waiting[0].sequences
    assert queued(engine) == (1 if num_host_blocks else preempted.num_tokens)
    run_to_end(engine)
    assert queued(engine) == 0


def test_without_a_prefix_cache_every_token_counts() -> None:
    engine, _ = make_engine(block_size=4, enable_prefix_caching=False)
    for i in range(3):
        add(engine, str(i), list(range(18)))
    assert queued(engine) == 54


def test_arrivals_are_hashed_no_further_than_the_first_block_that_is_not_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = make_engine(block_size=4)
    add(engine, "a", list(range(18)))
    group = engine.queue_request(EngineRequest("b", [60] * 40, SamplingParams()))
    engine.abort("b")
    group.sequences[0].block_hashes.clear()
    assert engine.backlog.tokens_of(group.sequences[0]) == 40
    assert len(group.sequences[0].block_hashes) == 1


def counted_anew(engine: Engine) -> int:
    """The same number from nothing but the sequences, of which none decodes, and the cache."""
    size, manager = engine.info.block_size, engine.block_manager
    published = set(manager.prefix_cache.published_hashes())
    hashes, tails = set(), 0
    waiting = [sequence for group in engine.scheduler.waiting for sequence in group.unfinished]
    for sequence in waiting + engine.scheduler.running:
        full = sequence.num_tokens // size if manager.enable_prefix_caching else 0
        hashes |= {sequence.block_hash(index, size) for index in range(full)} - published
        tails += sequence.num_tokens - max(sequence.num_computed_tokens, full * size)
    return len(hashes) * size + tails


def watch(monkeypatch: pytest.MonkeyPatch, check: Callable[[RandomLoad], None]) -> None:
    step = RandomLoad.step

    def step_and_check(self: RandomLoad) -> None:
        step(self)
        check(self)

    monkeypatch.setattr(RandomLoad, "step", step_and_check)


def lone_prefill(rng: random.Random) -> Arrival:
    """Draw a request that never decodes: the backlog does not notice blocks that decodes publish."""
    return replace(lone_arrival(rng), params=SamplingParams(max_tokens=1))


@pytest.mark.parametrize("seed", range(8))
def test_it_is_exact_while_nothing_is_evicted(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    seen = []

    def check(load: RandomLoad) -> None:
        seen.append(queued(load.engine))
        assert seen[-1] == counted_anew(load.engine)

    watch(monkeypatch, check)
    monkeypatch.setattr(RandomLoad, "reset_prefix_cache", lambda load: None)
    load = drive(seed, 80, lone_prefill, num_blocks=1500, num_host_blocks=0, max_num_batched_tokens=8)
    assert max(seen) > 0
    assert load.engine.block_manager.prefix_cache.num_evicted == 0


@pytest.mark.parametrize("seed", range(20))
def test_no_tokens_stay_counted_whatever_happens(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    def check(load: RandomLoad) -> None:
        backlog = load.engine.backlog
        assert backlog._num_tail_tokens >= 0
        assert all(count > 0 for count in backlog._awaited.values())
        running = load.engine.scheduler.running
        assert backlog._backlogs.keys() == backlog._started.keys() | set(load.engine.scheduler.waiting)
        assert backlog._started.keys() <= {sequence.group for sequence in running}
        assert backlog._started.keys() >= {sequence.group for sequence in running if sequence.remaining_tokens > 1}

    watch(monkeypatch, check)
    engine = drive(seed).engine
    assert queued(engine) == 0
    assert not engine.backlog._awaited
    assert not engine.backlog._backlogs
    assert not engine.backlog._started
