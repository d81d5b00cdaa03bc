"""The host pool as the second tier of the prefix cache, beside the pages of swapped sequences."""

from __future__ import annotations

import random

import pytest

from engine.engine import Engine
from engine.kv.block_manager import BlockManager
from engine.kv.events import AllBlocksCleared, BlockRemoved, KVEvent
from engine.kv.swapping import can_swap_out, swap_in, swap_out
from engine.observability import metrics as m
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from tests.engine.kv.test_block_manager import make_sequence, set_hash, start
from tests.engine.observability.test_metrics import RecordingSink
from tests.engine.shadow import make_engine, run_to_end

SIZE = 4
PREFIX = 24  # tokens


def end(manager: BlockManager, sequence: Sequence) -> None:
    """Compute a sequence in a step of its own, and end it."""
    manager.host_pool.take_copies()
    sequence.num_computed_tokens = sequence.num_tokens
    manager.free(sequence)


def answer(engine: Engine, prompt: list[int]) -> list[int]:
    engine.add_request(EngineRequest("request", prompt, SamplingParams(temperature=0, max_tokens=2)))
    return run_to_end(engine)["request"]


def cached_tokens(num_blocks: int, num_host_blocks: int) -> tuple[list[int], list[list[int]], float]:
    """Ask about each of ten documents three times, one question after the other.

    Returns:
        The cached tokens of each request, the answers, and the counter of cache hits.
    """
    sink, cached = RecordingSink(), []
    engine, _ = make_engine(
        block_size=SIZE, num_blocks=num_blocks, num_host_blocks=num_host_blocks, sink=sink, max_model_len=64
    )
    rng = random.Random(3)
    answers = []
    for _ in range(3):
        for document in rng.sample(range(10), 10):
            prompt = [*range(document, document + PREFIX), *rng.choices(range(64), k=3)]
            group = engine.add_request(EngineRequest("request", prompt, SamplingParams(temperature=0, max_tokens=2)))
            answers.append(run_to_end(engine)["request"])
            cached.append(group.sequences[0].num_cached_tokens)
    return cached, answers, sink.counters[m.CACHE_HITS]


def test_prefixes_that_fit_the_host_alone_are_hit_as_in_one_pool_of_both_sizes() -> None:
    tiers, answers, num_hits = cached_tokens(16, 80)
    one_pool, expected, _ = cached_tokens(96, 0)
    assert tiers == one_pool
    assert answers == expected
    assert tiers[10:] == [PREFIX] * 20
    assert num_hits == sum(tiers)
    assert sum(cached_tokens(16, 0)[0]) < sum(tiers) / 2


def test_an_evicted_block_is_copied_to_the_host_and_back_once_each() -> None:
    manager = BlockManager(3, SIZE, num_host_blocks=3, record_events=True)
    end(manager, start(manager, list(range(8))))
    manager.prefix_cache.events.take()
    other = start(manager, [*range(20, 31)])
    swap_out, swap_in = manager.host_pool.take_copies()
    assert (swap_out, swap_in) == ([(1, 0), (0, 1)], []), "the end of the prompt is evicted first"
    end(manager, other)
    again = start(manager, list(range(9)))
    assert (again.num_computed_tokens, again.num_matched_tokens) == (8, 8)
    swap_out, swap_in = manager.host_pool.take_copies()
    assert [page for page, _ in swap_in] == [1, 0]
    assert [block for _, block in swap_in] == again.block_table[:2]
    assert len(swap_out) == 1, "only one page is left for what the device evicts in this step"
    end(manager, again)
    manager.check_integrity([])
    end(manager, start(manager, [*range(40, 51)]))
    swap_out, _ = manager.host_pool.take_copies()
    assert not swap_out, "the host has kept what was loaded"
    assert len(manager.match_prefix(make_sequence(list(range(8)))).pages) == 2


def test_a_match_continues_on_the_host_where_the_chain_on_the_device_ends() -> None:
    manager = BlockManager(4, SIZE, num_host_blocks=4)
    end(manager, start(manager, list(range(16))))
    end(manager, start(manager, [60, 61]))  # takes the last block
    match = manager.match_prefix(make_sequence(list(range(20))))
    assert (len(match.blocks), len(match.pages), match.num_tokens) == (3, 1, 16)
    assert match.num_free_taken == 4
    sequence = make_sequence(list(range(16)))
    assert manager.awaited_hash(sequence) == sequence.block_hash(3, SIZE)
    manager.take_prefix(sequence, manager.match_prefix(sequence))
    manager.host_pool.take_copies()
    assert sequence.block_table[:3] == [0, 1, 2]
    manager.check_integrity([sequence])


def test_a_page_that_a_step_loads_is_not_reused_in_it() -> None:
    """Copies to the host are made first and would overwrite it. So what has no other page is lost."""
    manager = BlockManager(2, SIZE, num_host_blocks=1)
    end(manager, start(manager, list(range(4))))
    end(manager, start(manager, [*range(20, 28)]))
    loading = start(manager, list(range(5)))  # which evicts both blocks
    assert manager.host_pool.take_copies() == ([], [(0, loading.block_table[0])])
    end(manager, loading)
    manager.check_integrity([])
    end(manager, start(manager, [*range(40, 48)]))
    manager.check_integrity([])
    on_host = [manager.match_prefix(make_sequence(list(range(first, first + 4)))).pages for first in (0, 20)]
    assert list(map(len, on_host)) == [1, 0]


def test_of_a_chain_that_has_more_blocks_than_the_host_has_pages_the_beginning_is_kept() -> None:
    """It was the end, which nothing can hit, because the end was evicted first."""
    manager = BlockManager(8, SIZE, num_host_blocks=3, record_events=True)
    prompt = make_sequence(list(range(32)))
    end(manager, start(manager, prompt.token_ids))
    manager.prefix_cache.events.take()
    other = start(manager, list(range(32, 64)))
    swap_out, _ = manager.host_pool.take_copies()
    assert sorted(block for block, _ in swap_out) == [0, 1, 2], "of each reused page only the last copy is made"
    assert len({page for _, page in swap_out}) == 3
    hashes = [prompt.block_hash(index, SIZE) for index in range(8)]
    removed = [event for event in manager.prefix_cache.events.take() if isinstance(event, BlockRemoved)]
    assert removed == [BlockRemoved(block_hash) for block_hash in reversed(hashes[3:])]
    assert [block_hash in manager.prefix_cache.published_hashes() for block_hash in hashes] == [True] * 3 + [False] * 5
    end(manager, other)
    manager.check_integrity([])
    assert len(manager.match_prefix(prompt).pages) == 3


def test_a_page_that_a_swapped_sequence_or_a_load_uses_is_not_given_up() -> None:
    manager = BlockManager(4, SIZE, num_host_blocks=3)
    end(manager, start(manager, list(range(8))))
    swapped = swapped_out(manager, list(range(20, 24)))
    manager.host_pool.take_copies()
    evicting = start(manager, list(range(40, 56)))  # which evicts three blocks: two take pages, one has its page
    swap_out_pairs, _ = manager.host_pool.take_copies()
    assert sorted(page for _, page in swap_out_pairs) == [1, 2]
    end(manager, evicting)
    loading = start(manager, list(range(12)))  # which loads two pages and evicts all of the last prompt
    _, swap_in = manager.host_pool.take_copies()
    assert [page for page, _ in swap_in] == [2, 1]
    end(manager, loading)
    manager.check_integrity([swapped])


def test_a_page_from_an_earlier_step_that_the_device_evicts_is_given_up_too() -> None:
    """The host has its copy already, and keeps the block that is evicted after it instead."""
    manager = BlockManager(2, SIZE, num_host_blocks=1, record_events=True)
    first, second = list(range(4)), list(range(20, 24))
    end(manager, start(manager, first))
    end(manager, start(manager, [*second, *range(24, 28)]))
    end(manager, start(manager, first))  # loaded, so both tiers hold it
    end(manager, start(manager, second))
    manager.prefix_cache.events.take()
    block_id = manager.match_prefix(make_sequence(second)).blocks[0].block_id
    other = start(manager, list(range(40, 48)))
    assert manager.host_pool.take_copies() == ([(block_id, 0)], [])
    events = manager.prefix_cache.events.take()
    assert [event for event in events if isinstance(event, BlockRemoved)] == [
        BlockRemoved(make_sequence(first).block_hash(0, SIZE))
    ]
    end(manager, other)
    manager.check_integrity([])
    assert [len(manager.match_prefix(make_sequence(tokens)).pages) for tokens in (first, second)] == [0, 1]


def test_events_say_which_blocks_one_of_the_tiers_holds() -> None:
    events: list[KVEvent] = []
    engine, _ = make_engine(
        block_size=SIZE, num_blocks=3, num_host_blocks=4, on_kv_events=lambda batch: events.extend(batch.events)
    )
    cache = engine.block_manager.prefix_cache

    def run(first: int) -> list[KVEvent]:
        events.clear()
        answer(engine, list(range(first, first + 9)))
        return [event for event in events if isinstance(event, BlockRemoved)]

    assert not run(0)
    kept = cache.published_hashes()
    assert not run(20), "what moves to the host is not removed"
    assert set(kept) < set(cache.published_hashes())
    assert not run(0), "what comes back is not removed either"
    assert not events, "nor stored again"
    removed = run(40) + run(50)
    assert removed, "what the host evicts is removed"
    assert not {event.block_hash for event in removed} & set(cache.published_hashes())
    engine.reset_prefix_cache()
    assert events[-1] == AllBlocksCleared()
    assert cache.published_hashes() == []


def test_a_reset_forgets_the_pages_too() -> None:
    engine, runner = make_engine(block_size=SIZE, num_blocks=3, num_host_blocks=4)
    answer(engine, list(range(9)))
    answer(engine, list(range(20, 29)))
    assert engine.block_manager.host_pool.by_name
    engine.reset_prefix_cache()
    assert not engine.block_manager.host_pool.by_name
    assert engine.block_manager.host_pool.pages.counts().free == 4
    assert answer(engine, list(range(9))) == runner.answer(list(range(9)), 2)
    assert not runner.num_copied["block in"]


def test_a_page_with_the_same_hash_never_serves_another_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    set_hash(monkeypatch, lambda packed: 7)
    manager = BlockManager(2, SIZE, num_host_blocks=4, record_events=True)
    end(manager, start(manager, [1, 2, 3, 4]))
    end(manager, start(manager, [50, 51, 52, 53, 54]))  # the newest content has the name
    assert manager.match_prefix(make_sequence([1, 2, 3, 4])).num_tokens == 0
    end(manager, start(manager, [60, 61, 62, 63, 64]))
    manager.check_integrity([])
    assert manager.match_prefix(make_sequence([50, 51, 52, 53])).num_tokens == 0
    assert len(manager.prefix_cache.published_hashes()) == 1


def test_a_page_that_follows_another_parent_is_not_hit() -> None:
    manager = BlockManager(2, SIZE, num_host_blocks=4)
    end(manager, start(manager, list(range(8))))
    end(manager, start(manager, [*range(40, 48)]))
    page = manager.host_pool.by_name.get(make_sequence(list(range(8))).block_hash(1, SIZE))
    assert page is not None
    page.parent = 99
    assert len(manager.match_prefix(make_sequence(list(range(8)))).pages) == 1


def test_a_block_that_is_computed_again_keeps_its_identity_so_that_pages_after_it_can_be_hit() -> None:
    manager = BlockManager(2, SIZE, num_host_blocks=4, record_events=True)
    end(manager, start(manager, list(range(8))))
    end(manager, start(manager, [*range(40, 48)]))
    manager.prefix_cache.events.take()
    again = make_sequence(list(range(4)))
    manager.allocate(again, 4)  # without a look-up
    end(manager, again)
    assert not [event for event in manager.prefix_cache.events.take() if not isinstance(event, BlockRemoved)]
    match = manager.match_prefix(make_sequence(list(range(8))))
    assert (len(match.blocks), len(match.pages)) == (1, 1)
    manager.check_integrity([])


def swapped_out(manager: BlockManager, tokens: list[int]) -> Sequence:
    sequence = start(manager, tokens)
    sequence.num_computed_tokens = sequence.num_tokens
    swap_out(manager, [sequence])
    return sequence


def test_a_swapped_sequence_pins_its_pages_and_shares_the_full_ones() -> None:
    manager = BlockManager(3, SIZE, num_host_blocks=4)
    swapped = swapped_out(manager, list(range(9)))
    manager.host_pool.take_copies()
    for first in (20, 40, 60):  # evict more than the host has room for
        end(manager, start(manager, [*range(first, first + 12)]))
        manager.host_pool.take_copies()
        manager.check_integrity([swapped])
    other = start(manager, list(range(8)))
    assert other.num_matched_tokens == 8, "another prompt hits the pages of a swapped sequence"
    end(manager, other)
    swap_in(manager, [swapped])
    _, loaded = manager.host_pool.take_copies()
    assert len(loaded) == 3
    manager.check_integrity([swapped])


def test_the_cached_pages_yield_to_a_swapped_sequence() -> None:
    manager = BlockManager(3, SIZE, num_host_blocks=3, record_events=True)
    end(manager, start(manager, [*range(20, 32)]))
    end(manager, start(manager, [*range(40, 52)]))
    manager.prefix_cache.events.take()
    assert manager.host_pool.pages.counts().cached == 3
    sequence = start(manager, list(range(12)))
    manager.host_pool.take_copies()
    manager.prefix_cache.events.take()
    sequence.num_computed_tokens = 12
    assert can_swap_out(manager, [sequence])
    swap_out(manager, [sequence])
    manager.host_pool.take_copies()
    assert sum(isinstance(event, BlockRemoved) for event in manager.prefix_cache.events.take()) == 3
    manager.check_integrity([sequence])
    end(manager, start(manager, [*range(60, 72)]))
    manager.check_integrity([sequence])
    assert manager.host_pool.num_free == 0, "evicted blocks take no page of a swapped sequence"


def test_an_aborted_swapped_sequence_leaves_its_full_blocks_cached_on_the_host() -> None:
    manager = BlockManager(3, SIZE, num_host_blocks=4)
    swapped = swapped_out(manager, list(range(9)))
    end(manager, start(manager, [*range(40, 52)]))
    manager.free(swapped)
    manager.host_pool.take_copies()
    manager.check_integrity([])
    assert manager.match_prefix(make_sequence(list(range(8)))).num_tokens == 8


def test_pages_that_were_swapped_before_a_reset_are_not_hit_after_it() -> None:
    manager = BlockManager(3, SIZE, num_host_blocks=4)
    swapped = swapped_out(manager, list(range(9)))
    manager.host_pool.take_copies()
    manager.prefix_cache.reset()
    assert manager.match_prefix(make_sequence(list(range(8)))).num_tokens == 0
    swap_in(manager, [swapped])
    manager.host_pool.take_copies()
    manager.check_integrity([swapped])
    manager.free(swapped)
    assert manager.match_prefix(make_sequence(list(range(8)))).num_tokens == 0


def test_several_answers_start_with_a_prefix_from_the_host() -> None:
    engine, runner = make_engine(block_size=SIZE, num_blocks=8, num_host_blocks=8)
    prompt = list(range(14))
    answer(engine, prompt)
    answer(engine, list(range(30, 60)))
    group = engine.add_request(EngineRequest("forks", prompt, SamplingParams(n=3, max_tokens=2)))
    while engine.has_unfinished:
        engine.step()
    assert group.sequences[0].num_cached_tokens == 12
    assert [sequence.output_token_ids for sequence in group.sequences] == [
        runner.answer(prompt, 2, index=i) for i in range(3)
    ]


def test_without_prefix_caching_nothing_is_kept_but_swapped_sequences() -> None:
    manager = BlockManager(3, SIZE, num_host_blocks=4, enable_prefix_caching=False)
    end(manager, start(manager, list(range(9))))
    end(manager, start(manager, list(range(9))))
    assert manager.host_pool.take_copies() == ([], [])
    swapped = swapped_out(manager, list(range(9)))
    assert len(manager.host_pool.take_copies()[0]) == 3
    assert not manager.host_pool.by_name
    manager.check_integrity([swapped])
