"""The random load detects planted bugs of recurrent layers' states, of their snapshots, and of sliding windows."""

from __future__ import annotations

import pytest

from engine.kv import block_manager
from engine.kv.block_pool import Block
from engine.kv.prefix_cache import PrefixMatch
from engine.kv.state_slots import StateSlots
from engine.kv.window_pages import WindowPages
from engine.scheduling.drafter import Drafter
from engine.sequence import Sequence
from tests.engine.scheduling.planted_bugs import Plant, assert_found

FOREIGN = "continues a foreign state|reads foreign KV"
OPTIONS = {"num_slots": 12, "num_host_blocks": 0}


def test_a_snapshot_that_is_taken_one_token_late_is_detected() -> None:
    save = StateSlots.save

    def save_late(states: StateSlots, sequence: Sequence, num_tokens: int, block: Block) -> None:
        late = min(num_tokens + 1, sequence.num_tokens)
        save(states, sequence, late, block)

    assert_found(lambda patch: patch.setattr(StateSlots, "save", save_late), FOREIGN + "|outside the step", **OPTIONS)


def test_a_state_that_is_not_copied_on_a_fork_is_detected() -> None:
    def share(states: StateSlots, parent: Sequence, child: Sequence) -> None:
        states._num_used += 1
        child.state_slot = states._take().block_id

    assert_found(lambda patch: patch.setattr(StateSlots, "fork", share), FOREIGN, **OPTIONS)


def test_a_hit_beyond_the_last_snapshot_is_detected() -> None:
    def resume(match: PrefixMatch, *_: object) -> PrefixMatch:
        return match

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(block_manager, "resumable", resume)
        patch.setattr(StateSlots, "start", lambda states, sequence, block=None: start(states, sequence))

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
    def stay(states: StateSlots, block_id: int) -> None:
        pass

    assert_found(
        lambda patch: patch.setattr(StateSlots, "detach", stay),
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
        states._copy((sequence.state_slot + 1) % 12, sequence.state_slot)

    patch.setattr(StateSlots, "restore", restore)


@pytest.mark.parametrize("plant", [plant_no_restore, plant_a_late_restore])
def test_a_state_that_has_seen_a_rejected_draft_is_detected(plant: Plant) -> None:
    assert_found(plant, FOREIGN + "|never computed", num_draft_tokens=4, **OPTIONS)


WINDOWS = {"windows": ((5, 60), (8, 60)), "num_host_blocks": 0, "twins_share": False}
FOREIGN_PAGE = "of a window|page|KeyError"


def test_a_page_that_is_freed_one_block_early_is_detected() -> None:
    first_block = WindowPages.first_block

    def one_later(window: WindowPages, position: int) -> int:
        return first_block(window, position) + (position >= window.window)

    assert_found(lambda patch: patch.setattr(WindowPages, "first_block", one_later), FOREIGN_PAGE, **WINDOWS)


def test_a_match_without_the_pages_within_reach_is_detected() -> None:
    def all_blocks(window: WindowPages, blocks: list[Block], num_blocks: int, last_position: int) -> int:
        return num_blocks

    assert_found(
        lambda patch: patch.setattr(WindowPages, "num_resumable", all_blocks),
        FOREIGN_PAGE,
        **(WINDOWS | {"enable_prefix_caching": True, "windows": ((5, 12),)}),
    )


def test_a_page_that_is_not_copied_on_write_is_detected() -> None:
    def share(window: WindowPages, shared_id: int, own_id: int) -> None:
        page = window._page_of[shared_id]
        window._hang(own_id, page)

    assert_found(lambda patch: patch.setattr(WindowPages, "copy", share), FOREIGN_PAGE + "|written", **WINDOWS)


def test_a_change_that_no_rank_learns_of_is_detected() -> None:
    hang = WindowPages._hang

    def hang_silently(window: WindowPages, block_id: int, page: Block) -> None:
        hang(window, block_id, page)
        if block_id % 7 == 3:
            window._changed.discard(block_id)

    assert_found(lambda patch: patch.setattr(WindowPages, "_hang", hang_silently), FOREIGN_PAGE, **WINDOWS)


def test_a_page_that_is_freed_while_a_fork_reads_it_is_detected() -> None:
    def hold_nothing(window: WindowPages, child: Sequence) -> None:
        pass

    assert_found(
        lambda patch: patch.setattr(WindowPages, "fork", hold_nothing), FOREIGN_PAGE + "|tables list it", **WINDOWS
    )
