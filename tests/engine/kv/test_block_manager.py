"""The block manager: allocation, sharing, eviction, and the ways in which a prefix cache can lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine import sequence as sequence_module
from engine.kv import prefix_cache as prefix_cache_module
from engine.kv.block_manager import BlockManager
from engine.kv.block_pool import BlockCounts
from engine.kv.growth import Growth, num_new_blocks
from engine.kv.prefix_hash import pack_tokens, root_hash
from engine.kv.swapping import can_swap_out, num_blocks_to_swap_in, swap_in, swap_out
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence, SequenceGroup


def make_sequence(tokens: list[int], salt: str = "", n: int = 1) -> Sequence:
    group = SequenceGroup(
        EngineRequest("request", tokens, SamplingParams(n=n), cache_salt=salt),
        arrival=0,
        root=root_hash("model", salt),
        stop_token_ids=frozenset(),
        max_total_tokens=10**6,
        seed=0,
    )
    return group.sequences[0]


def set_hash(monkeypatch: pytest.MonkeyPatch, function: Callable[[bytes], int]) -> None:
    """Replace the hash of a block by one of its packed tokens only."""
    for module in (sequence_module, prefix_cache_module):
        monkeypatch.setattr(module, "packed_block_hash", lambda parent, packed: function(packed))


def start(manager: BlockManager, tokens: list[int], salt: str = "") -> Sequence:
    """Allocate a sequence as the scheduler does: what is cached first, then the rest."""
    sequence = make_sequence(tokens, salt)
    manager.take_prefix(sequence, manager.match_prefix(sequence))
    manager.allocate(sequence, len(tokens))
    return sequence


def test_a_table_grows_block_by_block() -> None:
    manager = BlockManager(8, 4)
    sequence = make_sequence(list(range(9)))
    for num_tokens, blocks in ((1, 1), (4, 1), (5, 2), (9, 3)):
        manager.allocate(sequence, num_tokens)
        assert len(sequence.block_table) == blocks
    manager.check_integrity([sequence])
    assert manager.num_free_blocks == 5


def test_equal_prefixes_share_full_blocks_only() -> None:
    manager = BlockManager(8, 4)
    first = start(manager, [*range(8), 90])
    second = start(manager, [*range(8), 91, 92])
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    assert second.num_computed_tokens == 8
    assert manager.pool.counts().shared == 2
    manager.check_integrity([first, second])


def test_identical_prompts_started_in_one_step_share_their_blocks() -> None:
    """A block is published when its step is scheduled, so a twin in the same step finds it."""
    manager = BlockManager(8, 4)
    twins = [start(manager, list(range(8))) for _ in range(3)]
    assert manager.pool.counts().used == 2
    manager.check_integrity(twins)


def test_a_fully_cached_prompt_still_computes_its_last_token_without_writing_it() -> None:
    manager = BlockManager(8, 4)
    start(manager, list(range(8)))
    second = start(manager, list(range(8)))
    assert second.num_computed_tokens == 7
    assert second.num_matched_tokens == 8  # so position 7 is not written: its block is shared


def test_salts_keep_prefixes_apart() -> None:
    manager = BlockManager(8, 4)
    first = start(manager, list(range(8)), salt="a")
    second = start(manager, list(range(8)), salt="b")
    assert not set(first.block_table) & set(second.block_table)


def test_freed_blocks_stay_cached_and_the_suffix_is_evicted_before_the_prefix() -> None:
    manager = BlockManager(3, 4)
    sequence = start(manager, list(range(12)))
    prefix, middle, suffix = sequence.block_table
    manager.free(sequence)
    assert manager.pool.counts().cached == 3
    other = start(manager, [50, 51, 52, 53])
    assert other.block_table == [suffix]
    assert manager.prefix_cache.num_evicted == 1
    again = make_sequence(list(range(12)))
    assert [block.block_id for block in manager.match_prefix(again).blocks] == [prefix, middle]


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    manager = BlockManager(2, 4)
    old, new = start(manager, [1] * 4), start(manager, [2] * 4)
    manager.free(old)
    manager.free(new)
    manager.free(start(manager, [1] * 4))  # used again: now the more recent one
    start(manager, [3] * 4)
    assert manager.match_prefix(make_sequence([1] * 4)).num_tokens == 4
    assert manager.match_prefix(make_sequence([2] * 4)).num_tokens == 0


def test_an_evicted_block_takes_exactly_its_own_entry_with_it() -> None:
    """nano-vllm deleted whatever entry had the hash, and a stale one then served a foreign prefix's KV."""
    manager = BlockManager(4, 2)
    twins = [start(manager, [1, 2]), make_sequence([1, 2])]
    manager.allocate(twins[1], 2)  # computed beside the first without a look-up: a duplicate, not published
    manager.free(twins[1])
    manager.free(twins[0])
    for filler in ([3, 4], [5, 6], [7, 8]):  # reuse the duplicate, which must not unpublish the original
        start(manager, filler)
    assert manager.match_prefix(make_sequence([1, 2])).num_tokens == 2
    start(manager, [9, 10])
    assert manager.match_prefix(make_sequence([1, 2])).num_tokens == 0


def test_a_hash_collision_never_serves_a_foreign_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every hash equal, only comparing tokens and parents keeps prefixes apart."""
    set_hash(monkeypatch, lambda packed: 42)
    manager = BlockManager(8, 2)
    first = start(manager, [1, 2, 3, 4])
    second = start(manager, [5, 6, 3, 4])
    assert not set(first.block_table) & set(second.block_table)
    manager.check_integrity([first, second])


def test_a_colliding_parent_does_not_validate_its_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two first blocks with one hash and equal second blocks: the second ones still differ by what precedes them."""
    set_hash(monkeypatch, lambda packed: hash(packed) % 2**64 if packed == pack_tokens([3, 4]) else 7)
    manager = BlockManager(8, 2)
    first = start(manager, [1, 2, 3, 4])
    second = start(manager, [5, 6, 3, 4])  # takes over both hashes: the newest wins
    assert manager.match_prefix(make_sequence([5, 6, 3, 4])).num_tokens == 4
    assert manager.match_prefix(make_sequence([1, 2, 3, 4])).num_tokens == 0
    manager.check_integrity([first, second])


def test_a_chain_whose_parent_was_computed_again_is_usable_again() -> None:
    manager = BlockManager(2, 2)
    manager.free(start(manager, [1, 2, 3, 4]))
    start(manager, [9, 9])  # evicts the child
    manager.free(start(manager, [1, 2]))
    assert manager.match_prefix(make_sequence([1, 2, 3, 4])).num_tokens == 2


def test_reset_forgets_everything_but_leaves_used_blocks_alone() -> None:
    manager = BlockManager(4, 2)
    running = start(manager, [1, 2])
    manager.free(start(manager, [3, 4]))
    manager.prefix_cache.reset()
    assert manager.pool.counts().cached == 0
    assert manager.match_prefix(make_sequence([1, 2])).num_tokens == 0
    manager.check_integrity([running])
    manager.free(running)
    assert manager.pool.counts().free == 4


def test_without_prefix_caching_nothing_is_published() -> None:
    manager = BlockManager(4, 2, enable_prefix_caching=False)
    manager.free(start(manager, [1, 2, 3, 4]))
    assert manager.pool.counts().free == 4
    assert manager.match_prefix(make_sequence([1, 2, 3, 4])).num_tokens == 0


# --- forks and swaps ------------------------------------------------------------------------------------------------


def start_forks(manager: BlockManager, tokens: list[int], n: int) -> list[Sequence]:
    """Compute a prompt, fork it, and give each sequence a token of its own to compute next."""
    first = make_sequence(tokens, n=n)
    manager.take_prefix(first, manager.match_prefix(first))
    manager.allocate(first, len(tokens))
    first.num_computed_tokens = len(tokens)
    forks = first.group.fork()
    for fork in forks:
        manager.fork(first, fork)
    for index, sequence in enumerate(first.group.sequences):
        sequence.token_ids.append(90 + index)
    return first.group.sequences


def test_forks_share_every_block_and_each_freed_one_gives_back_its_share_only() -> None:
    manager = BlockManager(8, 4)
    sequences = start_forks(manager, list(range(6)), n=3)
    assert all(sequence.block_table == sequences[0].block_table for sequence in sequences)
    assert manager.pool.counts() == BlockCounts(free=6, cached=0, used=2, shared=2)
    for position, sequence in enumerate(list(sequences)):
        manager.check_integrity(sequences[position:])
        manager.free(sequence)
    assert manager.num_free_blocks == 8


def test_a_write_into_a_shared_block_copies_it_and_the_last_user_writes_in_place() -> None:
    manager = BlockManager(8, 4)
    sequences = start_forks(manager, list(range(6)), n=3)
    full, half_full = sequences[0].block_table
    assert num_new_blocks([Growth(sequence, 7) for sequence in sequences], manager.pool, 4) == 2
    copies = [manager.allocate(sequence, 7) for sequence in sequences]
    assert copies == [(half_full, sequences[0].block_table[1]), (half_full, sequences[1].block_table[1]), None]
    assert sequences[2].block_table == [full, half_full]
    assert len({sequence.block_table[1] for sequence in sequences}) == 3
    assert {sequence.block_table[0] for sequence in sequences} == {full}
    manager.check_integrity(sequences)


def test_forks_at_the_end_of_a_block_copy_nothing() -> None:
    manager = BlockManager(8, 4)
    sequences = start_forks(manager, list(range(8)), n=3)
    assert num_new_blocks([Growth(sequence, 9) for sequence in sequences], manager.pool, 4) == 3
    assert [manager.allocate(sequence, 9) for sequence in sequences] == [None] * 3
    assert manager.pool.counts().used == 5


def test_what_sequences_share_stays_shared_on_the_host_and_when_they_come_back() -> None:
    manager = BlockManager(8, 4, num_host_blocks=4)
    sequences = start_forks(manager, list(range(6)), n=3)
    for sequence in sequences:
        manager.allocate(sequence, 7)
    assert can_swap_out(manager, sequences)
    swap_out(manager, sequences)
    out, _ = manager.host_pool.take_copies()
    assert len(out) == 4
    assert manager.host_pool.num_free == 0
    assert manager.num_free_blocks == 8
    assert [sequence.num_computed_tokens for sequence in sequences] == [6] * 3
    manager.check_integrity(sequences)
    swap_in(manager, sequences)
    _, back = manager.host_pool.take_copies()
    assert [source for source, _ in back] == [target for _, target in out]
    assert len({sequence.block_table[0] for sequence in sequences}) == 1
    assert len({sequence.block_table[1] for sequence in sequences}) == 3
    assert manager.host_pool.num_free == 4
    manager.check_integrity(sequences)


def test_what_does_not_fit_the_host_is_not_swapped() -> None:
    manager = BlockManager(8, 4, num_host_blocks=1)
    assert not can_swap_out(manager, start_forks(manager, list(range(6)), n=3))
    assert not can_swap_out(manager, [make_sequence([1])])  # nothing to keep


def test_a_swapped_prompt_stays_cached_also_when_the_device_evicts_it() -> None:
    manager = BlockManager(4, 2, num_host_blocks=2)
    sequence = start(manager, [1, 2, 3])
    sequence.num_computed_tokens = 3
    swap_out(manager, [sequence])
    assert len(manager.match_prefix(make_sequence([1, 2])).blocks) == 1
    fillers = [start(manager, [10 * i, 10 * i + 1]) for i in range(1, 5)]
    swap_outs, _ = manager.host_pool.take_copies()
    assert len(swap_outs) == 2, "a block that was swapped is copied again when it is evicted"
    match = manager.match_prefix(make_sequence([1, 2]))
    assert (match.blocks, [page.block_id for page in match.pages]) == ((), sequence.host_table[:1])
    for filler in fillers:
        manager.free(filler)
    swap_in(manager, [sequence])
    manager.host_pool.take_copies()
    assert manager.match_prefix(make_sequence([1, 2])).blocks[0].block_id == sequence.block_table[0]
    manager.check_integrity([sequence])


def test_what_was_computed_before_a_reset_is_not_published_after_it() -> None:
    """A reset comes with new weights: a block that was swapped out, or partly filled, holds the old ones' keys."""
    manager = BlockManager(8, 4, num_host_blocks=8)
    manager.prefix_cache.reset()  # there may be several
    swapped, running = start(manager, [1, 2, 3, 4, 5]), start(manager, [6, 7])
    for sequence in (swapped, running):
        sequence.num_computed_tokens = sequence.num_tokens
    swap_out(manager, [swapped])
    manager.prefix_cache.reset()
    swap_in(manager, [swapped])
    running.token_ids += [8, 9]
    manager.allocate(running, 4)
    running.num_computed_tokens = 4
    for sequence in (swapped, running):
        manager.free(sequence)
    for prompt in ([1, 2, 3, 4, 5], [6, 7, 8, 9]):
        assert manager.match_prefix(make_sequence(prompt)).num_tokens == 0
    start(manager, [1, 2, 3, 4, 5])
    assert manager.match_prefix(make_sequence([1, 2, 3, 4, 5])).num_tokens == 4


@pytest.mark.parametrize("is_swapped", [False, True])
def test_after_a_reset_each_fork_publishes_what_it_computes(is_swapped: bool) -> None:
    manager = BlockManager(16, 4, num_host_blocks=16)
    manager.prefix_cache.reset()
    sequences = start_forks(manager, list(range(6)), n=3)
    for sequence in sequences:
        sequence.token_ids += [50] * 4
        manager.allocate(sequence, sequence.num_tokens)
        sequence.num_computed_tokens = sequence.num_tokens
    if is_swapped:
        swap_out(manager, sequences)
        swap_in(manager, sequences)
    for sequence in sequences:
        manager.free(sequence)
    matched = [manager.match_prefix(make_sequence(sequence.token_ids)) for sequence in sequences]
    assert [match.num_tokens for match in matched] == [8] * 3


@pytest.mark.parametrize("num_tokens", [7, 9])  # in the shared last block, and in one more
def test_sequences_are_swapped_in_with_exactly_the_blocks_that_were_counted(num_tokens: int) -> None:
    manager = BlockManager(16, 4, num_host_blocks=8)
    first = make_sequence(list(range(6)), n=3)
    manager.allocate(first, 6)
    first.num_computed_tokens = 6
    members = [first, *first.group.fork()]
    for fork in members[1:]:
        manager.fork(first, fork)
    for member in members:
        member.token_ids += range(10, 4 + num_tokens)
    swap_out(manager, members)
    num_counted = num_blocks_to_swap_in(manager, members)
    swap_in(manager, members)
    for member in members:
        manager.allocate(member, num_tokens)
    manager.host_pool.take_copies()
    manager.check_integrity(members)
    assert manager.pool.counts().used == num_counted


def test_drafts_count_the_blocks_that_they_add() -> None:
    manager = BlockManager(8, 4)
    sequence = start(manager, list(range(5)))
    assert [manager.extend(sequence, num_tokens) for num_tokens in (8, 9, 16)] == [0, 1, 1]


def test_a_used_block_replaces_its_free_twin_so_that_no_parent_is_evicted_before_its_child() -> None:
    """A swapped sequence came back to blocks of its own, and those that published its prefix were evicted first."""
    manager = BlockManager(8, 4, num_host_blocks=8, record_events=True)
    sequence = start(manager, list(range(8)))
    sequence.num_computed_tokens = 8
    swap_out(manager, [sequence])
    published = manager.prefix_cache.published_hashes()
    events = manager.prefix_cache.events.take()
    swap_in(manager, [sequence])
    manager.host_pool.take_copies()
    assert manager.prefix_cache.published_hashes() == published == [event.block_hash for event in events]
    assert manager.prefix_cache.events.take() == (), "what is published is the same"
    assert [manager.pool.blocks[block_id].block_hash for block_id in sequence.block_table] == published
    assert manager.pool.counts() == BlockCounts(free=6, cached=0, used=2, shared=0)
    manager.check_integrity([sequence])
    others = start(manager, list(range(40, 64)))  # all that is free
    assert manager.prefix_cache.published_hashes()[:2] == published
    twin = start(manager, list(range(8)))
    assert twin.block_table == sequence.block_table
    manager.host_pool.take_copies()
    manager.check_integrity([sequence, others, twin])


def test_published_hashes_are_parents_before_children() -> None:
    manager = BlockManager(8, 4)
    first = start(manager, list(range(16)))
    manager.free(first)
    second = start(manager, [*range(8), *range(20, 28)])
    assert manager.prefix_cache.published_hashes() == first.block_hashes + second.block_hashes[2:]
    manager.prefix_cache.reset()
    assert manager.prefix_cache.published_hashes() == []
