"""The random load detects planted bugs of blocks and queues: nano-vllm's, and some that this engine could have.

Every test is named after the bug that is detected. First the runs pass with the code as it is. Then the test plants the
bug, and a run must fail with the symptom that the test expects. This shows that the checks of the random load work.
Bugs of drafts and of overlapping steps are in ``test_planted_step_bugs.py``.
The bugs of nano-vllm that do not concern scheduling are tested elsewhere:

- only one EOS id is read: ``test_generation.test_every_eos_id_of_generation_config_ends_the_answer``
- temperature 0 is refused: ``test_sampling_params.test_temperature_zero_is_greedy_and_not_refused``
- unknown options are dropped: ``test_config.test_a_bad_option_is_refused``, ``test_llm``
- a fixed port and shared-memory name: ``ranks.test_rank_processes.test_two_engines_at_once_do_not_collide``
- CUDA-graph buckets that miss max_num_seqs: ``test_batch_graphs.test_the_sizes_end_with_max_num_seqs``
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from engine import sequence as sequence_module
from engine.engine import Engine
from engine.errors import OverloadedError
from engine.kv import prefix_cache as prefix_cache_module
from engine.kv.block_manager import BlockManager
from engine.kv.block_pool import Block
from engine.kv.host.host_pool import HostPool
from engine.kv.page_copies import BlockPair
from engine.kv.prefix_cache import PrefixCache, PrefixMatch
from engine.kv.prefix_hash import packed_block_hash
from engine.outputs import FinishReason
from engine.request import RequestValidator
from engine.sampling_params import SamplingParams
from engine.scheduling.preemption import Preemption
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.scheduler_output import SchedulerOutput
from engine.scheduling.step_builder import StepBuilder
from engine.sequence import Sequence, SequenceGroup
from tests.engine.random_load import RandomLoad, drive
from tests.engine.random_requests import Arrival, lone_arrival
from tests.engine.scheduling.planted_bugs import Plant, assert_found

# --- nano-vllm's ----------------------------------------------------------------------------------------------------


def test_a_stale_hash_entry_that_serves_a_foreign_prefix_is_detected() -> None:
    def evict_but_stay_published(cache: PrefixCache) -> None:
        cache._pool.uncache(cache._pool.choose_evicted())

    assert_found(
        lambda patch: patch.setattr(PrefixCache, "_evict", evict_but_stay_published),
        "reads foreign KV|published with foreign content|not found under its hash",
    )


def plant_weak_hash(patch: pytest.MonkeyPatch) -> None:
    for module in (sequence_module, prefix_cache_module):
        patch.setattr(module, "packed_block_hash", lambda parent, packed: packed_block_hash(parent, packed) % 8)


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 30), marks=pytest.mark.long)], ids=str)
def test_a_colliding_hash_is_harmless_because_hits_are_verified(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_weak_hash(monkeypatch)
    for seed in seeds:
        drive(seed, draw=lone_arrival, twins_share=False, enable_prefix_caching=True)


@pytest.mark.parametrize(
    "seeds", [range(43, 46), pytest.param(range(60), marks=pytest.mark.exhaustive("more seeds"))], ids=str
)
def test_colliding_hashes_may_cost_one_of_several_answers_but_not_the_engine(
    seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several answers rely on sharing to fit a tight pool, which colliding hashes can prevent for ever."""
    plant_weak_hash(monkeypatch)
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts += drive(seed, twins_share=False, enable_prefix_caching=True).counts
    assert counts["dropped"] > 0


def test_a_hash_collision_without_verification_is_detected() -> None:
    def plant(patch: pytest.MonkeyPatch) -> None:
        plant_weak_hash(patch)
        patch.setattr(Block, "holds", lambda block, token_bytes, parent: True)

    assert_found(plant, "reads foreign KV", twins_share=False, enable_prefix_caching=True)


def test_a_block_verified_without_its_parent_is_detected() -> None:
    def plant(patch: pytest.MonkeyPatch) -> None:
        plant_weak_hash(patch)
        patch.setattr(Block, "holds", lambda block, token_bytes, parent: block.token_bytes == token_bytes)

    assert_found(plant, "reads foreign KV", twins_share=False, enable_prefix_caching=True)


def test_an_empty_query_for_a_fully_cached_prompt_is_detected() -> None:
    take_prefix = BlockManager.take_prefix

    def take_all(manager: BlockManager, sequence: Sequence, match: PrefixMatch) -> None:
        take_prefix(manager, sequence, match)
        sequence.num_computed_tokens = match.num_tokens

    assert_found(
        lambda patch: patch.setattr(BlockManager, "take_prefix", take_all), "empty query|computes nothing|starved"
    )


def test_a_preemption_that_loses_the_last_token_is_detected() -> None:
    preempt_last = Preemption.preempt_last

    def preempt_and_lose(preemption: Preemption, step: StepBuilder) -> SequenceGroup:
        group = preempt_last(preemption, step)
        for sequence in group.unfinished:
            if sequence.num_output_tokens:
                sequence.token_ids.pop()
        return group

    assert_found(lambda patch: patch.setattr(Preemption, "preempt_last", preempt_and_lose), "answers|reads foreign KV")


def test_a_recomputation_at_a_wrong_position_is_detected() -> None:
    take_prefix = BlockManager.take_prefix

    def go_on_too_far(manager: BlockManager, sequence: Sequence, match: PrefixMatch) -> None:
        take_prefix(manager, sequence, match)
        if sequence.group.num_preemptions and sequence.num_computed_tokens < sequence.num_tokens - 2:
            sequence.num_computed_tokens += 1

    assert_found(
        lambda patch: patch.setattr(BlockManager, "take_prefix", go_on_too_far),
        "reads foreign KV|published with foreign content",
    )


def test_accepting_a_prompt_larger_than_the_pool_is_detected() -> None:
    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(RequestValidator, "_check_length", lambda *of_request: None)
        patch.setattr(RequestValidator, "_check_num_sequences", lambda *of_request: None)

    assert_found(plant, "cannot fit|cannot hold|no progress|computes nothing|KeyError|continues after its end")


def test_a_sequence_that_outgrows_the_pool_is_detected() -> None:
    limit = RequestValidator.max_total_tokens
    assert_found(
        lambda patch: patch.setattr(RequestValidator, "max_total_tokens", lambda *of_request: limit(*of_request) + 20),
        "cannot fit|cannot hold|no progress|computes nothing|KeyError",
    )


def test_duplicate_blocks_of_identical_prompts_in_one_step_are_detected() -> None:
    publish = PrefixCache.publish

    def publish_when_computed(cache: PrefixCache, sequence: Sequence, num_tokens: int) -> None:
        publish(cache, sequence, min(num_tokens, sequence.num_computed_tokens))

    assert_found(
        lambda patch: patch.setattr(PrefixCache, "publish", publish_when_computed),
        "equal prompts get duplicate blocks",
    )


def test_decodes_starved_by_sustained_prefill_are_detected() -> None:
    build = StepBuilder.build

    def prefills_only(step: StepBuilder) -> SchedulerOutput:
        output = build(step)
        keep = [index for index, num_new in enumerate(output.num_new_tokens) if num_new > 1]
        if keep and not output.forks:
            kept_index = {old: new for new, old in enumerate(keep)}
            pairs = zip(output.sampling, output.logit_indices, strict=True)
            kept = [(sequence, kept_index[index]) for sequence, index in pairs if index in kept_index]
            output.sampling, output.logit_indices = [sequence for sequence, _ in kept], [index for _, index in kept]
            output.sequences = [output.sequences[index] for index in keep]
            output.num_new_tokens = [output.num_new_tokens[index] for index in keep]
        return output

    assert_found(lambda patch: patch.setattr(StepBuilder, "build", prefills_only), "is starved")


# --- copy-on-write, swapping and forks ------------------------------------------------------------------------------


def test_a_write_into_a_shared_block_is_detected() -> None:
    assert_found(
        lambda patch: patch.setattr(BlockManager, "_unshare", lambda manager, sequence: None),
        "is written while others hold it",
    )


def patch_swap_in(change: Callable[[list[BlockPair]], list[BlockPair]]) -> Plant:
    take_copies = HostPool.take_copies

    def take_changed(pool: HostPool) -> tuple[list[BlockPair], list[BlockPair]]:
        swap_out, swap_in = take_copies(pool)
        return swap_out, change(swap_in)

    return lambda patch: patch.setattr(HostPool, "take_copies", take_changed)


def test_a_lost_swapped_block_is_detected() -> None:
    assert_found(patch_swap_in(lambda pairs: pairs[:-1]), "reads foreign KV|published with foreign content")


def test_blocks_swapped_in_in_the_wrong_order_are_detected() -> None:
    def reverse(pairs: list[BlockPair]) -> list[BlockPair]:
        return list(zip([source for source, _ in pairs], [target for _, target in reversed(pairs)], strict=True))

    assert_found(patch_swap_in(reverse), "reads foreign KV|published with foreign content")


def test_an_evicted_block_that_is_not_copied_is_detected() -> None:
    take_copies = HostPool.take_copies

    def lose_one(pool: HostPool) -> tuple[list[BlockPair], list[BlockPair]]:
        swap_out, swap_in = take_copies(pool)
        return swap_out[1:], swap_in

    assert_found(
        lambda patch: patch.setattr(HostPool, "take_copies", lose_one),
        "reads foreign KV|published with foreign content",
    )


def test_a_page_that_is_reused_in_the_step_that_loads_it_is_detected() -> None:
    def load_unpinned(pool: HostPool, page: Block, page_id: int) -> None:
        pool.pages.release(page)
        pool._copies_in.append((page.block_id, page_id))

    assert_found(
        lambda patch: patch.setattr(HostPool, "load", load_unpinned), "reads foreign KV|published with foreign content"
    )


def test_a_reused_page_that_gets_the_block_that_it_was_to_hold_first_is_detected() -> None:
    keep = HostPool.keep

    def keep_first(pool: HostPool, block: Block | None, page_id: int) -> Block:
        before = dict(pool._copies_out)
        page = keep(pool, block, page_id)
        pool._copies_out |= before
        return page

    assert_found(
        lambda patch: patch.setattr(HostPool, "keep", keep_first),
        "reads foreign KV|published with foreign content",
        num_host_blocks=2,
    )


def test_host_blocks_that_are_never_released_are_detected() -> None:
    assert_found(
        lambda patch: patch.setattr(HostPool, "release", lambda pool, host_table: None),
        "0 tables list it",
    )


def test_a_block_published_with_tokens_that_it_does_not_hold_is_detected() -> None:
    free = BlockManager.free

    def free_too_full(manager: BlockManager, sequence: Sequence) -> None:
        if sequence.block_table and manager.enable_prefix_caching:
            last = min(sequence.num_tokens, len(sequence.block_table) * manager.block_size)  # with the uncomputed token
            manager.prefix_cache.publish(sequence, last)
        free(manager, sequence)

    assert_found(lambda patch: patch.setattr(BlockManager, "free", free_too_full), "published with foreign content")


def test_a_prefix_evicted_before_what_follows_it_is_detected() -> None:
    free = BlockManager.free

    def free_head_first(manager: BlockManager, sequence: Sequence) -> None:
        if manager.enable_prefix_caching and not sequence.host_table:
            manager.prefix_cache.publish(sequence, sequence.num_computed_tokens)
        sequence.block_table.reverse()
        free(manager, sequence)

    assert_found(lambda patch: patch.setattr(BlockManager, "free", free_head_first), "a prefix is evicted first")


def test_an_abort_that_leaks_blocks_is_detected() -> None:
    def forget(scheduler: Scheduler, group: SequenceGroup, reason: Any) -> None:
        if group in scheduler.waiting:
            scheduler.end_sequence(group.unfinished[0], reason)
            return
        for sequence in group.unfinished:
            scheduler.running.remove(sequence)
            sequence.finish(reason)
        scheduler.queues.num_used_slots -= group.num_slots

    assert_found(lambda patch: patch.setattr(Scheduler, "abort", forget), "0 tables list it|in the wrong list")


def test_a_request_that_stays_in_the_engine_after_its_end_is_detected() -> None:
    def report_only(engine: Engine, group: SequenceGroup, rejection: OverloadedError | None = None) -> None:
        engine.observers.request_left(group, rejection)

    load = RandomLoad(num_blocks=8)
    load.add(Arrival(tokens=[1, 2, 3], params=SamplingParams(max_tokens=4)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_remove", report_only)
        with pytest.raises(AssertionError, match="keeps a request"):
            load.finish()


def test_a_block_that_leaks_with_the_last_request_is_detected() -> None:
    """No step follows that could find it."""

    def leak_the_last(scheduler: Scheduler, group: SequenceGroup, reason: FinishReason = FinishReason.ABORT) -> None:
        if len(scheduler.running) == len(group.unfinished) and not scheduler.waiting:
            scheduler.block_manager.pool.take()
        abort(scheduler, group, reason)

    abort = Scheduler.abort
    load = RandomLoad(num_blocks=8)
    load.add(Arrival(tokens=[1, 2, 3], params=SamplingParams(max_tokens=4)))
    load.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "abort", leak_the_last)
        load.engine.abort(next(iter(load.requests)))
    load.requests.clear()
    with pytest.raises(AssertionError, match="0 tables list it"):
        load.finish()


def test_a_fork_that_is_not_counted_as_a_user_of_its_blocks_is_detected() -> None:
    def fork(manager: BlockManager, parent: Sequence, child: Sequence) -> None:
        child.block_table, child.content_ids = list(parent.block_table), list(parent.content_ids)
        child.num_computed_tokens = parent.num_computed_tokens

    assert_found(lambda patch: patch.setattr(BlockManager, "fork", fork), "tables list it")
