"""Plans are small and right; the random load of tests/engine/scheduling checks the plan of each of its steps too."""

from __future__ import annotations

import pickle

import pytest

from engine.kv.block_manager import BlockManager
from engine.kv.page_copies import PageCopies
from engine.scheduling.scheduler_output import SchedulerOutput
from engine.sequence import Sequence
from engine.worker.step_planner import StepPlanner
from tests.engine.random_load import drive
from tests.engine.scheduling.steps import add
from tests.engine.shadow import make_engine

CONTEXT, BLOCK_SIZE = 4096, 16


def decode(sequences: list[Sequence]) -> SchedulerOutput:
    """Return a step in which each sequence computes one token."""
    count = len(sequences)
    return SchedulerOutput(sequences, [1] * count, sampling=sequences, logit_indices=range(count))


def _drive_seeds(seeds: range) -> None:
    for seed in seeds:
        drive(seed)


def test_a_rank_gets_a_small_plan_of_a_large_batch() -> None:
    """With whole block tables it had 273 kB at this size."""
    engine, _ = make_engine(num_blocks=64, block_size=4)
    blocks = BlockManager(64 * (CONTEXT // BLOCK_SIZE + 1), BLOCK_SIZE, enable_prefix_caching=False)
    for index in range(64):
        add(engine, str(index), 1)
    sequences = [group.sequences[0] for group in engine.scheduler.waiting]
    for sequence in sequences:
        sequence.token_ids = [1] * (CONTEXT + 1)
        sequence.num_computed_tokens = CONTEXT
        blocks.allocate(sequence, CONTEXT + 1)
    planner = StepPlanner(BLOCK_SIZE, 64, CONTEXT // BLOCK_SIZE + 1)
    whole = len(pickle.dumps(planner.plan(decode(sequences))))
    assert whole > 64 * CONTEXT / BLOCK_SIZE * 4
    assert len(pickle.dumps(planner.plan(decode(sequences)))) < 64 * 48 + 2000


def test_a_prompts_last_token_is_no_decode() -> None:
    """The kernel of a token would depend on where the prompt's chunks end, and so on the load."""
    engine, _ = make_engine(num_blocks=64, block_size=4)
    for index in range(4):
        add(engine, str(index), 8)
    sequences = [group.sequences[0] for group in engine.scheduler.waiting]
    blocks = BlockManager(64, 4, enable_prefix_caching=False)
    for sequence, num_computed in zip(sequences, (7, 8, 3, 9), strict=True):
        sequence.token_ids = [*range(10, 20)]
        sequence.num_computed_tokens = num_computed
        blocks.allocate(sequence, 10)
    plan = StepPlanner(4, 4, 4).plan(decode(sequences))
    assert plan.num_decodes == 2
    assert plan.positions.tolist() == [8, 9, 7, 3]
    assert plan.token_ids.tolist() == [18, 19, 17, 13]
    assert plan.logit_indices.tolist() == [2, 0, 3, 1]


def test_a_plan_that_only_copies_blocks_has_no_tokens() -> None:
    plan = StepPlanner(4, 2, 8).plan(SchedulerOutput(block_copies=PageCopies(swap_out=[(2, 1)])))
    assert plan.copies[0].swap_out == [(2, 1)]
    assert not len(plan.token_ids)
    assert not len(plan.logit_indices)


def test_the_random_load_notices_a_plan_with_a_wrong_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that was changed in its list would be sent no second time."""
    allocate = BlockManager.allocate

    def unshare_in_place(blocks: BlockManager, sequence: Sequence, num_tokens: int) -> object:
        table = sequence.block_table
        copy = allocate(blocks, sequence, num_tokens)
        table[:] = sequence.block_table
        sequence.block_table = table
        return copy

    monkeypatch.setattr(BlockManager, "allocate", unshare_in_place)
    with pytest.raises(AssertionError, match="block_tables of the plan is wrong|slot_mapping of the plan is wrong"):
        _drive_seeds(range(20))
