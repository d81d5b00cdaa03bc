"""StaticInputs: the memory from which the graph of one batch size reads a step, and the copy that fills it.

Every graph reads the beginning of the same slab. What no graph reads follows: it is used before or after the replay.

    slab   [ token_ids | positions | slot_mapping | table_rows | seq_lens | logit_indices | changes of block tables ]
             int64       int64       int64          int64        int32      of any length

With sliding windows that have pages of their own, each has its slot mapping after ``table_rows`` and its page map's
changes after those of the block tables. With recurrent layers, ``state_slots``, int32, follow ``seq_lens``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.kv.block_tables import BlockTables
from engine.kv.page_maps import PageMap
from engine.worker.step_plan import ModelInput, StepPlan
from kernels.attention_metadata import AttentionMetadata
from kernels.device_copy import host_words
from kernels.recurrent_metadata import RecurrentMetadata

__all__ = ["MAX_CHANGES", "StaticInputs", "make_slab"]

MAX_CHANGES = 64  # of block tables, and of each page map, in one step; in addition to one for each sequence

_PADDING = {"token_ids": 0, "positions": 0, "slot_mapping": -1, "table_rows": 0, "seq_lens": 0}  # of a graph's fields


def _layout(size: int, num_windows: int, has_states: bool) -> np.dtype[np.void]:
    """Return the fields that the graph of ``size`` sequences reads, in whole int64 words."""
    even = size + size % 2
    words = ["token_ids", "positions", "slot_mapping", "table_rows", *map(_window_field, range(num_windows))]
    halves = ["seq_lens", "state_slots"] if has_states else ["seq_lens"]
    return np.dtype([*((name, np.int64, (size,)) for name in words), *((name, np.int32, (even,)) for name in halves)])


def _window_field(index: int) -> str:
    return f"slot_mapping_of_window_{index}"


def _fields(plan: StepPlan) -> Iterator[tuple[str, npt.NDArray[Any], int]]:
    """Return the fields of ``_layout`` with their values, and what padding sequences have there."""
    for name, padding in _PADDING.items():
        yield name, getattr(plan, name), padding
    for index, window in enumerate(plan.windows):
        yield _window_field(index), window.slot_mapping, -1
    if plan.recurrent is not None:
        yield "state_slots", plan.recurrent.slots, -1


def make_slab(
    max_num_seqs: int, device: torch.device, *, num_windows: int = 0, has_states: bool = False
) -> torch.Tensor:
    """Return the slab for batches of up to ``max_num_seqs`` sequences, int64 words.

    Args:
        num_windows: sliding windows that have pages of their own.
        has_states: whether the model has recurrent layers.
    """
    fields = _layout(max_num_seqs, num_windows, has_states).itemsize // 8
    changes = (1 + num_windows) * 2 * (max_num_seqs + MAX_CHANGES)
    return torch.zeros(fields + max_num_seqs + changes, dtype=torch.int64, device=device)  # with the logit_indices


class StaticInputs:
    """The inputs of one graph.

    Args:
        size: sequences of the graph, padding included.
        slab: shared by the graphs of all sizes.
        block_tables: the rank's block tables, whose rows the graph reads.
        block_size: tokens per block.
        page_maps: the rank's, of each sliding window that has pages of its own.
        has_states: whether the model has recurrent layers.

    Attributes:
        token_ids: int64 [size]; may be overwritten between ``load`` and the replay.
        recurrent: the batch as recurrent layers see it, or None without them; its slots may be overwritten too.
    """

    def __init__(
        self,
        size: int,
        slab: torch.Tensor,
        block_tables: BlockTables,
        block_size: int,
        page_maps: Sequence[PageMap] = (),
        *,
        has_states: bool = False,
    ) -> None:
        self.size = size
        self._slab = slab
        self._block_tables, self._page_maps = block_tables, page_maps
        self._writes = [block_tables.write, *(page_map.write for page_map in page_maps)]
        self._max_seq_len = block_tables.shape[1] * block_size
        self._layout = _layout(size, len(page_maps), has_states)
        self._num_words = self._layout.itemsize // 8
        slab[: self._num_words].zero_()  # a capture computes padding alone
        num_rows = 4 + len(page_maps)
        rows = slab[: num_rows * size].view(num_rows, size)
        self.token_ids, self._positions, self._slot_mapping, self._table_rows = rows[:4]
        self._window_slots = [rows[4 + index] for index in range(len(page_maps))]
        self._seq_lens, *state_slots = (
            field[:size] for field in slab[num_rows * size : self._num_words].view(torch.int32).view(1 + has_states, -1)
        )
        for slots in (self._slot_mapping, *self._window_slots, *state_slots):
            slots.fill_(-1)
        self._cu_seqlens_q = torch.arange(size + 1, dtype=torch.int32, device=slab.device)  # every sequence decodes
        self.recurrent = self._recurrent_metadata(*state_slots) if has_states else None

    def _recurrent_metadata(self, slots: torch.Tensor) -> RecurrentMetadata:
        """Return the batch as recurrent layers see it: decodes start no sequence and save no state."""
        none = slots.new_empty(0)
        return RecurrentMetadata(self._cu_seqlens_q, slots, torch.zeros_like(slots), none, none, self.size)

    def load(self, plan: StepPlan) -> torch.Tensor:
        """Copy a step of at most ``size`` decodes to the device; write its changes of block tables and page maps there.

        Returns:
            The plan's ``logit_indices``, on the device until the next ``load``.
        """
        changes = [plan.table_changes, *((window.changed_blocks, window.changed_pages) for window in plan.windows)]
        first_change = self._num_words + len(plan.logit_indices)
        num_words = first_change + sum(len(entries) + -(-len(ids) // 2) for entries, ids in changes)
        on_host = host_words(num_words, self._slab.device)
        words = on_host.numpy()
        fields = words[: self._num_words].view(self._layout)[0]
        for name, array, padding in _fields(plan):
            fields[name][: len(array)] = array
            fields[name][len(array) :] = padding
        words[self._num_words : first_change] = plan.logit_indices
        start = first_change
        for entries, ids in changes:
            middle, end = start + len(entries), start + len(entries) + -(-len(ids) // 2)
            words[start:middle] = entries
            words[middle:end].view(np.int32)[: len(ids)] = ids
            start = end
        self._slab[:num_words].copy_(on_host, non_blocking=True)
        self._write_changes(first_change, [len(entries) for entries, _ in changes])
        return self._slab[self._num_words : first_change]

    def _write_changes(self, start: int, counts: list[int]) -> None:
        """Write the loaded changes of the block tables and of each page map, which begin at ``start`` in the slab."""
        for write, count in zip(self._writes, counts, strict=True):
            if count:
                middle, end = start + count, start + count + -(-count // 2)
                write(self._slab[start:middle], self._slab[middle:end].view(torch.int32)[:count])
                start = end

    def model_input(self) -> ModelInput:
        """Return the batch as the model sees it. Call it inside a capture: it copies rows of the block tables.

        It has no logit indices: logits are computed outside the graph.
        """
        metadata = AttentionMetadata(
            slot_mapping=self._slot_mapping,
            cu_seqlens_q=self._cu_seqlens_q,
            seq_lens=self._seq_lens,
            block_tables=self._block_tables.select(self._table_rows, self._block_tables.shape[1]),
            num_decodes=self.size,
            max_query_len=1,
            max_seq_len=self._max_seq_len,
        )
        return ModelInput(
            token_ids=self.token_ids,
            positions=self._positions,
            metadata=metadata,
            logit_indices=self._slab[:0],
            prompt_logit_indices=self._slab[:0],
            windows=tuple(
                replace(metadata, slot_mapping=slots, block_tables=page_map.look_up(metadata.block_tables))
                for slots, page_map in zip(self._window_slots, self._page_maps, strict=True)
            ),
            recurrent=self.recurrent,
        )
