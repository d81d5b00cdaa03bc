"""The random load detects planted bugs of recurrent layers' states, of their snapshots, and of sliding windows."""

from __future__ import annotations

import pytest

from engine.kv import block_manager, swapping
from engine.kv.attachments.attached_pages import AttachedPages
from engine.kv.attachments.state_slots import Snapshots, StateSlots
from engine.kv.attachments.window_pages import PageChanges, WindowPages
from engine.kv.block_manager import BlockManager
from engine.kv.block_pool import Block
from engine.kv.host.host_pool import HostPool
from engine.kv.prefix_cache import PrefixMatch
from engine.scheduling import preemption
from engine.scheduling.drafting.drafter import Drafter
from engine.sequence import Sequence
from kernels.attention.window import Chunk, Window, first_key, most_keys
from tests.engine.scheduling.planted_bugs import Plant, assert_found

FOREIGN = "continues a foreign state|reads foreign KV|published with foreign content"
OPTIONS = {"num_slots": 12, "num_host_blocks": 0}


def test_a_snapshot_that_is_taken_one_token_late_is_detected() -> None:
    save = StateSlots.save

    def save_late(states: StateSlots, sequence: Sequence, num_tokens: int, block: Block, *, is_likely: bool) -> None:
        late = min(num_tokens + 1, sequence.num_tokens)
        save(states, sequence, late, block, is_likely=is_likely)

    assert_found(lambda patch: patch.setattr(StateSlots, "save", save_late), FOREIGN + "|outside the step", **OPTIONS)


def test_a_state_that_is_not_copied_on_a_fork_is_detected() -> None:
    def share(states: StateSlots, parent: Sequence, child: Sequence) -> None:
        states._num_used += 1
        child.state_slot = states.snapshots.take().block_id

    assert_found(lambda patch: patch.setattr(StateSlots, "fork", share), FOREIGN, **OPTIONS)


def test_a_hit_beyond_the_last_snapshot_is_detected() -> None:
    def resume(match: PrefixMatch, *_: object) -> PrefixMatch:
        return match

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(block_manager, "resumable", resume)
        patch.setattr(StateSlots, "hold", lambda states, match, num_blocks: None)
        patch.setattr(StateSlots, "start", lambda states, sequence, match, _: start(states, sequence, match, 0))

    start = StateSlots.start
    assert_found(plant, FOREIGN + "|never computed|computes nothing", enable_prefix_caching=True, **OPTIONS)


def test_a_snapshot_of_an_answer_that_is_kept_too_late_is_detected() -> None:
    keep = StateSlots.keep

    def keep_next(states: StateSlots, sequence: Sequence, block: Block) -> None:
        if len(sequence.block_table) > (index := sequence.block_table.index(block.block_id)) + 1:
            keep(states, sequence, Block(sequence.block_table[index + 1]))

    assert_found(
        lambda patch: patch.setattr(StateSlots, "keep", keep_next),
        FOREIGN + "|hangs on a block that holds nothing",
        enable_prefix_caching=True,
        **OPTIONS,
    )


def test_a_snapshot_that_outlives_its_block_is_detected() -> None:
    def stay(snapshots: AttachedPages, block_id: int) -> None:
        pass

    assert_found(
        lambda patch: patch.setattr(AttachedPages, "detach", stay),
        FOREIGN + "|hangs on a block|no block is free|KeyError",
        enable_prefix_caching=True,
        **OPTIONS,
    )


def plant_no_restore(patch: pytest.MonkeyPatch) -> None:
    def go_on(drafter: Drafter, sequence: Sequence, num_accepted: int, num_drafted: int) -> None:
        assert drafter._blocks.states is not None
        drafter._blocks.states.drop_backup(sequence)

    patch.setattr(Drafter, "_settle_state", go_on)


def plant_a_late_restore(patch: pytest.MonkeyPatch) -> None:
    def restore(states: StateSlots, sequence: Sequence) -> None:
        states.drop_backup(sequence)
        states.snapshots.copy((sequence.state_slot + 1) % 12, sequence.state_slot)

    patch.setattr(StateSlots, "restore", restore)


@pytest.mark.parametrize("plant", [plant_no_restore, plant_a_late_restore])
def test_a_state_that_has_seen_a_rejected_draft_is_detected(plant: Plant) -> None:
    assert_found(plant, FOREIGN + "|never computed", num_draft_tokens=4, **OPTIONS)


WINDOWS = {"windows": ((5, 60), (8, 60)), "num_host_blocks": 0, "twins_share": False}
FOREIGN_PAGE = "of a window|page|KeyError"


@pytest.mark.parametrize("windows", [((5, 60), (8, 60)), ((Chunk(5), 60), (Chunk(16), 60))], ids=str)
def test_a_page_that_is_freed_one_block_early_is_detected(windows: tuple[tuple[Window, int], ...]) -> None:
    first_block = WindowPages.first_block

    def one_later(window: WindowPages, position: int) -> int:
        return first_block(window, position) + (position >= most_keys(window.window))

    options = WINDOWS | {"windows": windows}
    assert_found(lambda patch: patch.setattr(WindowPages, "first_block", one_later), FOREIGN_PAGE, **options)


@pytest.mark.long
@pytest.mark.parametrize("change", [-1, 1])
def test_chunks_that_begin_elsewhere_are_detected(change: int) -> None:
    def elsewhere(window: WindowPages, position: int) -> int:
        return first_key(Chunk(most_keys(window.window) + change), position) // window._block_size

    options = WINDOWS | {"windows": ((Chunk(8), 60),)}
    assert_found(lambda patch: patch.setattr(WindowPages, "first_block", elsewhere), FOREIGN_PAGE, **options)


def test_a_match_without_the_pages_within_reach_is_detected() -> None:
    def all_blocks(window: WindowPages, match: PrefixMatch, num_blocks: int, last_position: int) -> int:
        return num_blocks

    assert_found(
        lambda patch: patch.setattr(WindowPages, "num_resumable", all_blocks),
        FOREIGN_PAGE,
        **(WINDOWS | {"enable_prefix_caching": True, "windows": ((5, 12),)}),
    )


def test_a_page_that_is_not_copied_on_write_is_detected() -> None:
    def share(window: WindowPages, shared_id: int, own_id: int) -> None:
        window.attached.hang(own_id, window.attached.by_block[shared_id])

    assert_found(lambda patch: patch.setattr(WindowPages, "copy", share), FOREIGN_PAGE + "|written", **WINDOWS)


def test_a_change_that_no_rank_learns_of_is_detected() -> None:
    take_changes = WindowPages.take_changes

    def take_most(window: WindowPages) -> PageChanges:
        window._changed -= {block_id for block_id in window._changed if block_id % 7 == 3}
        return take_changes(window)

    assert_found(lambda patch: patch.setattr(WindowPages, "take_changes", take_most), FOREIGN_PAGE, **WINDOWS)


def test_a_page_that_is_freed_while_a_fork_reads_it_is_detected() -> None:
    def hold_nothing(window: WindowPages, child: Sequence) -> None:
        pass

    assert_found(
        lambda patch: patch.setattr(WindowPages, "fork", hold_nothing), FOREIGN_PAGE + "|tables list it", **WINDOWS
    )


# --- in host memory -------------------------------------------------------------------------------------------------

ON_HOST = {"num_slots": 12, "num_host_slots": 12, "num_host_blocks": 24, "twins_share": False}
WINDOWS_ON_HOST = {
    "windows": ((5, 12), (8, 30)),
    "num_host_window_pages": (24, 24),
    "num_host_blocks": 24,
    "block_size": 2,
    "num_blocks": 30,
    "enable_prefix_caching": True,
    "twins_share": False,
}


def test_a_page_of_a_window_that_comes_back_to_the_wrong_block_is_detected() -> None:
    swap_in = WindowPages.swap_in

    def reversed_pages(window: WindowPages, sequence: Sequence, host_ids: list[int]) -> None:
        swap_in(window, sequence, host_ids[::-1])

    assert_found(lambda patch: patch.setattr(WindowPages, "swap_in", reversed_pages), FOREIGN_PAGE, **WINDOWS_ON_HOST)


def test_a_page_of_a_window_that_is_loaded_for_another_block_is_detected() -> None:
    stored = AttachedPages.stored

    def of_the_block_before(attached: AttachedPages, match: PrefixMatch, index: int) -> Block | None:
        return stored(attached, match, index) and stored(attached, match, max(index - 1, 0))

    assert_found(
        lambda patch: patch.setattr(AttachedPages, "stored", of_the_block_before), FOREIGN_PAGE, **WINDOWS_ON_HOST
    )


def test_a_page_that_is_stored_under_the_name_of_another_block_is_detected() -> None:
    keep = HostPool.keep

    def keep_next(pool: HostPool, block: Block | None, page_id: int) -> Block:
        return keep(pool, block, page_id if pool._expires_loaded else (page_id + 1) % 12)

    assert_found(lambda patch: patch.setattr(HostPool, "keep", keep_next), FOREIGN + "|never computed", **ON_HOST)


def test_a_swapped_state_of_another_sequence_is_detected() -> None:
    swap_out = swapping.swap_out

    def rotate(manager: BlockManager, sequences: list[Sequence]) -> None:
        swap_out(manager, sequences)
        slots = [sequence.host_slot for sequence in sequences]
        for sequence, host_slot in zip(sequences, slots[1:] + slots[:1], strict=True):
            sequence.host_slot = host_slot

    assert_found(lambda patch: patch.setattr(preemption, "swap_out", rotate), FOREIGN, **ON_HOST)


def test_a_state_that_is_swapped_before_it_is_restored_is_detected() -> None:
    def swap_out_as_it_is(states: StateSlots, sequence: Sequence) -> int:
        return states.snapshots.store.keep(None, sequence.state_slot).block_id

    assert_found(lambda patch: patch.setattr(StateSlots, "swap_out", swap_out_as_it_is), FOREIGN, **ON_HOST)


def test_a_hit_beyond_the_last_snapshot_on_the_host_is_detected() -> None:
    """The last block of a match on the host counts as one with a snapshot; the last snapshot before it is used."""

    def has_any(snapshots: Snapshots, match: PrefixMatch, index: int) -> bool:
        return any(has_snapshot(snapshots, match, before) for before in range(index + 1))

    def stored_before(attached: AttachedPages, match: PrefixMatch, index: int) -> Block | None:
        found = (stored(attached, match, before) for before in range(index, -1, -1))
        return next((page for page in found if page is not None), None)

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Snapshots, "has", has_any)
        patch.setattr(AttachedPages, "stored", stored_before)

    has_snapshot, stored = Snapshots.has, AttachedPages.stored
    assert_found(plant, FOREIGN + "|page that is lost", enable_prefix_caching=True, **ON_HOST)


def test_a_stored_page_that_outlives_its_block_is_detected() -> None:
    def stay(attached: AttachedPages, block_hash: int) -> None:
        pass

    options = ON_HOST | {"num_host_blocks": 8, "enable_prefix_caching": True}
    assert_found(lambda patch: patch.setattr(AttachedPages, "lose", stay), "of a block that is lost", **options)


def test_a_snapshot_that_is_evicted_before_it_is_made_is_detected() -> None:
    """A step copies to the host first. What it makes of a state that it loads is not there yet."""

    def save_at_once(attached: AttachedPages, block: Block) -> None:
        page = attached.by_block[block.block_id]
        if block.block_hash is not None:
            attached.store.store(block, attached.copies.get(page.block_id, page.block_id))

    options = ON_HOST | {"num_slots": 6, "block_size": 1, "num_host_slots": 40}
    assert_found(lambda patch: patch.setattr(AttachedPages, "_save", save_at_once), FOREIGN, **options)
