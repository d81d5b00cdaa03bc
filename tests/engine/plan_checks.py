"""PlanChecks: each step's plan, as a rank gets it, against the same batch packed anew from the sequences' lists."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

from engine.engine import Engine
from engine.kv.block_tables import BlockTables
from engine.kv.page_maps import HostPageMap, PageMap
from engine.scheduling.scheduler_output import SchedulerOutput
from engine.sequence import Sequence
from engine.worker.step_plan import ModelInput
from engine.worker.step_planner import StepPlanner
from kernels.recurrent_metadata import RecurrentMetadata
from tests.engine.shadow import ShadowRunner

__all__ = ["PlanChecks", "packed"]


class PlanChecks:
    """Plans every step of one engine, and keeps the block tables of a rank that gets only the plans."""

    def __init__(self, engine: Engine, runner: ShadowRunner) -> None:
        info = engine.info
        self._runner = runner
        max_blocks = min(-(-info.max_model_len // info.block_size), info.num_blocks)
        shape = (engine.scheduler.max_num_running, max_blocks)
        self._block_size = info.block_size
        self._windows = engine.block_manager.windows
        self._planner = StepPlanner(
            info.block_size,
            *shape,
            page_maps=[HostPageMap(info.num_blocks) for _ in self._windows],
            has_states=info.num_slots > 0,
        )
        self._page_maps = [PageMap(info.num_blocks, torch.device("cpu")) for _ in self._windows]
        self._tables = BlockTables(*shape, torch.device("cpu"))

    def check(self, output: SchedulerOutput) -> None:
        """Compare what a rank computes with what was scheduled."""
        plan = self._planner.plan(output)
        assert plan.copies == output.copies
        if output.sequences:
            step = plan.to_device(self._tables, self._block_size, self._page_maps)
            assert plan.num_pending == int((plan.token_ids < 0).sum())
            plan.take_sampled(step.token_ids, torch.tensor(self._runner.sampled_ids, dtype=torch.int64), step.recurrent)
            expected = packed(output, self._block_size, self._runner.tokens)
            for name, values in expected.items():
                assert _values(step, name) == values, f"{name} of the plan is wrong"
            self._check_windows(output, step)
            if step.recurrent is not None:
                self._check_states(output, step, step.recurrent)

    def _check_windows(self, output: SchedulerOutput, step: ModelInput) -> None:
        """Compare each window's slots, and the pages within reach of the step's tokens, with the block manager's."""
        size = self._block_size
        for window, metadata in zip(self._windows, step.windows, strict=True):
            pages = {block_id: page.block_id for block_id, page in window.attached.by_block.items()}
            slots = step.metadata.slot_mapping.tolist()
            expected = [-1 if slot < 0 else pages[slot // size] * size + slot % size for slot in slots]
            assert metadata.slot_mapping.tolist() == expected, "slots of a window are wrong"
            order = sorted(range(len(output.sequences)), key=lambda index: not _is_decode(output, index))
            for row, index in zip(metadata.block_tables.tolist(), order, strict=True):
                sequence = output.sequences[index]
                first = window.first_block(sequence.num_computed_tokens)
                held = [pages[block_id] for block_id in sequence.block_table[first:]]
                assert row[first:][: len(held)] == held[: len(row) - first], "pages of a window are wrong"

    def _check_states(self, output: SchedulerOutput, step: ModelInput, states: RecurrentMetadata) -> None:
        """Compare where the states are, and after which tokens they are saved, with what was scheduled."""
        order = sorted(range(len(output.sequences)), key=lambda index: not _is_decode(output, index))
        sequences = [output.sequences[index] for index in order]
        slots = [-1 if self._runner.skips_state(sequence) else sequence.state_slot for sequence in sequences]
        assert states.slots.tolist() == slots, "a state is changed by what is not a token, or not by what is one"
        assert states.starts.tolist() == [sequence.num_computed_tokens == 0 for sequence in sequences]
        assert states.num_decodes == step.metadata.num_decodes
        starts = step.metadata.cu_seqlens_q.tolist()
        expected = [
            (start + num_tokens - sequence.num_computed_tokens - 1, slot)
            for start, sequence in zip(starts, sequences, strict=False)
            for num_tokens, slot in output.state_saves.get(sequence, ())
        ]
        saves = list(zip(states.save_tokens.tolist(), states.save_slots.tolist(), strict=True))
        assert saves == sorted(expected), "a state is saved after another token"


def packed(
    output: SchedulerOutput, block_size: int, tokens: Callable[[Sequence], list[int]] = attrgetter("token_ids")
) -> dict[str, Any]:
    """Return a batch's ModelInput and AttentionMetadata as lists, packed sequence by sequence.

    Args:
        output: the batch.
        block_size: tokens per block.
        tokens: returns the tokens of a sequence, a pending one included.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    cu_seqlens = [0]
    seq_lens: list[int] = []
    prompt_logit_indices: list[int] = []
    draft_indices: list[int] = []
    # Decodes first, otherwise in the scheduler's order.
    order = sorted(range(len(output.sequences)), key=lambda index: not _is_decode(output, index))
    bounds: dict[int, tuple[int, int]] = {}  # of each index of the output: its tokens, drafts excepted
    for index in order:
        sequence, count = output.sequences[index], output.num_new_tokens[index]
        start, table, draft = sequence.num_computed_tokens, sequence.block_table, output.drafts.get(sequence, [])
        first, end = len(token_ids), start + count
        token_ids += (tokens(sequence) + draft)[start:end]
        positions += range(start, end)
        slots += [
            table[i // block_size] * block_size + i % block_size if i >= sequence.num_matched_tokens else -1
            for i in range(start, end)
        ]
        cu_seqlens.append(len(token_ids))
        seq_lens.append(end)
        bounds[index] = first, len(token_ids) - len(draft)
    for index, sequence in enumerate(output.sequences):  # logits are in the scheduler's order
        (first, last), start = bounds[index], sequence.num_computed_tokens
        known = sequence.group.prompt_logprob_positions(start, start + output.num_new_tokens[index])
        prompt_logit_indices += [first + i - start for i in known]
        draft_indices += range(last, last + len(output.drafts.get(sequence, [])))
    width = -(-max(seq_lens) // block_size)
    return {
        "token_ids": token_ids,
        "positions": positions,
        "slot_mapping": slots,
        "cu_seqlens_q": cu_seqlens,
        "seq_lens": seq_lens,
        "block_tables": [(output.sequences[index].block_table + [-1] * width)[:width] for index in order],
        "logit_indices": [bounds[index][1] - 1 for index in output.logit_indices] + draft_indices,
        "prompt_logit_indices": prompt_logit_indices,
        "num_decodes": sum(_is_decode(output, index) for index in order),
        "max_query_len": max(output.num_new_tokens),
        "max_seq_len": max(seq_lens),
    }


def _is_decode(output: SchedulerOutput, index: int) -> bool:
    """Whether a sequence computes one token only, which it has generated."""
    sequence = output.sequences[index]
    return output.num_new_tokens[index] == 1 and sequence.num_computed_tokens >= sequence.num_prompt_tokens


def _values(step: ModelInput, name: str) -> Any:
    value = getattr(step if hasattr(step, name) else step.metadata, name)
    return value.tolist() if isinstance(value, torch.Tensor) else value
