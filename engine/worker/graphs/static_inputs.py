"""StaticInputs: the memory from which the graph of one shape reads a step, and the copy that fills it.

Every graph reads the beginning of the same slab. What no graph reads follows: it is used before or after the replay.

    slab   [ token_ids | positions | slot_mapping | table_rows | seq_lens | logit_indices | changes of block tables ]
             int64       int64       int64          int64        int32      of any length

With sliding windows that have pages of their own, each has its slot mapping after ``slot_mapping`` and its page map's
changes after those of the block tables. With chunks, ``cu_seqlens_q``, int32, follows ``seq_lens``. With recurrent
layers ``state_slots`` do, and with both, where states start and which of them are saved, all int32. A field holds the
values of decodes, padding, those of chunks, padding:

    room for 4 decodes and 8 tokens of chunks     token_ids      a b - -  c c c c c d d -
    a step with 2 decodes, chunks of 5 and 2      cu_seqlens_q   0 1 2 3  4 9 11 11 ... 12      the last is padding
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
from engine.worker.graphs.batch_shape import BatchShape
from engine.worker.step_plan import ModelInput, RecurrentPlan, StepPlan
from kernels.attention_metadata import AttentionMetadata
from kernels.device_copy import host_words
from kernels.recurrent_metadata import RecurrentMetadata

__all__ = ["MAX_CHANGES", "MAX_SAVES", "StaticInputs", "make_slab"]

MAX_CHANGES = 64  # of block tables, and of each page map, in one step; in addition to one for each sequence

MAX_SAVES = 64  # of states, in one step with chunks; others save none

_PADDING = {"token_ids": 0, "positions": 0, "slot_mapping": -1, "table_rows": 0, "seq_lens": 0}  # of a graph's fields


def _layout(shape: BatchShape, num_windows: int, has_states: bool) -> np.dtype[np.void]:
    """Return the fields that the graph of a shape reads, in whole int64 words."""
    of_tokens = ["token_ids", "positions", "slot_mapping", *map(_window_field, range(num_windows))]
    halves = {"seq_lens": shape.num_seqs}
    if shape.num_chunks:
        halves["cu_seqlens_q"] = shape.num_seqs + 1
    if has_states:
        halves["state_slots"] = shape.num_seqs
    if has_states and shape.num_chunks:
        halves |= {"state_starts": shape.num_seqs, "save_tokens": MAX_SAVES, "save_slots": MAX_SAVES}
    return np.dtype(
        [
            *((name, np.int64, (shape.num_tokens,)) for name in of_tokens),
            ("table_rows", np.int64, (shape.num_seqs,)),
            *((name, np.int32, (size + size % 2,)) for name, size in halves.items()),
        ]
    )


def _window_field(index: int) -> str:
    return f"slot_mapping_of_window_{index}"


def _fields(plan: StepPlan) -> Iterator[tuple[str, npt.NDArray[Any], int]]:
    """Return the fields of ``_layout`` that have a value for each token or sequence, and what padding has there."""
    for name, padding in _PADDING.items():
        yield name, getattr(plan, name), padding
    for index, window in enumerate(plan.windows):
        yield _window_field(index), window.slot_mapping, -1
    if plan.recurrent is not None:
        yield "state_slots", plan.recurrent.slots, -1
        if plan.num_decodes < len(plan.seq_lens):
            yield "state_starts", plan.recurrent.starts, 0


def make_slab(
    shapes: Sequence[BatchShape],
    max_num_seqs: int,
    device: torch.device,
    *,
    num_windows: int = 0,
    has_states: bool = False,
) -> torch.Tensor:
    """Return the slab for batches of any of the shapes, int64 words.

    Args:
        max_num_seqs: sequences of a step, at most.
        num_windows: sliding windows that have pages of their own.
        has_states: whether the model has recurrent layers.
    """
    fields = max(_layout(shape, num_windows, has_states).itemsize // 8 for shape in shapes)
    logits = max(max_num_seqs, *(shape.num_tokens for shape in shapes))
    changes = (1 + num_windows) * 2 * (max_num_seqs + MAX_CHANGES)
    return torch.zeros(fields + logits + changes, dtype=torch.int64, device=device)


class StaticInputs:
    """The inputs of one graph.

    Args:
        shape: of the graph's batch.
        slab: shared by the graphs of all shapes.
        block_tables: the rank's block tables, whose rows the graph reads.
        block_size: tokens per block.
        page_maps: the rank's, of each sliding window that has pages of its own.
        has_states: whether the model has recurrent layers.

    Attributes:
        token_ids: int64 [num_tokens]; may be overwritten between ``load`` and the replay.
        recurrent: the batch as recurrent layers see it, or None without them; its slots may be overwritten too.
    """

    def __init__(
        self,
        shape: BatchShape,
        slab: torch.Tensor,
        block_tables: BlockTables,
        block_size: int,
        page_maps: Sequence[PageMap] = (),
        *,
        has_states: bool = False,
    ) -> None:
        self.shape = shape
        self._slab = slab
        self._block_tables, self._page_maps = block_tables, page_maps
        self._writes = [block_tables.write, *(page_map.write for page_map in page_maps)]
        self._max_seq_len = block_tables.shape[1] * block_size
        self._layout = _layout(shape, len(page_maps), has_states)
        self._num_words = self._layout.itemsize // 8
        slab[: self._num_words].zero_()  # a capture computes padding alone
        self.token_ids, self._positions = self._field("token_ids"), self._field("positions")
        self._slot_mapping, self._table_rows = self._field("slot_mapping"), self._field("table_rows")
        self._window_slots = [self._field(_window_field(index)) for index in range(len(page_maps))]
        self._seq_lens = self._field("seq_lens")[: shape.num_seqs]
        for slots in (self._slot_mapping, *self._window_slots):
            slots.fill_(-1)
        decodes = torch.arange(shape.num_seqs + 1, dtype=torch.int32, device=slab.device)
        self._cu_seqlens_q = decodes  # of every step, where all sequences decode
        if shape.num_chunks:
            self._cu_seqlens_q = self._field("cu_seqlens_q")[: shape.num_seqs + 1]
            self._cu_seqlens_q.copy_(decodes.clamp(max=shape.num_decodes))
            self._cu_seqlens_q[-1] = shape.num_tokens
        self.recurrent = self._recurrent_metadata() if has_states else None

    def _field(self, name: str) -> torch.Tensor:
        """Return a field's part of the slab."""
        field, offset = self._layout.fields[name][:2]  # type: ignore[index]
        values = self._slab[offset // 8 : (offset + field.itemsize) // 8]
        return values if field.base == np.int64 else values.view(torch.int32)

    def _recurrent_metadata(self) -> RecurrentMetadata:
        """Return the batch as recurrent layers see it: decodes start no sequence, and alone they save no state."""
        slots = self._field("state_slots")[: self.shape.num_seqs].fill_(-1)
        starts, save_tokens, save_slots = torch.zeros_like(slots), slots.new_empty(0), slots.new_empty(0)
        if self.shape.num_chunks:
            starts = self._field("state_starts")[: self.shape.num_seqs]
            save_tokens, save_slots = self._field("save_tokens"), self._field("save_slots").fill_(-1)
            save_tokens.copy_(self._no_saves)
        return RecurrentMetadata(
            self._cu_seqlens_q, slots, starts, save_tokens, save_slots, num_decodes=self.shape.num_decodes
        )

    @property
    def _no_saves(self) -> torch.Tensor:
        """Tokens of saves that are padding: after the last, ascending."""
        return torch.arange(self.shape.num_tokens, self.shape.num_tokens + MAX_SAVES, dtype=torch.int32)

    def load(self, plan: StepPlan) -> torch.Tensor:
        """Copy a step that fits the shape to the device; write its changes of block tables and page maps there.

        Returns:
            The graph's tokens at the plan's ``logit_indices``, on the device until the next ``load``.
        """
        changes = [plan.table_changes, *((window.changed_blocks, window.changed_pages) for window in plan.windows)]
        first_change = self._num_words + len(plan.logit_indices)
        num_words = first_change + sum(len(entries) + -(-len(ids) // 2) for entries, ids in changes)
        on_host = host_words(num_words, self._slab.device)
        words = on_host.numpy()
        self._fill(words[: self._num_words].view(self._layout)[0], plan)
        words[self._num_words : first_change] = self._places(plan.logit_indices, plan)
        start = first_change
        for entries, ids in changes:
            middle, end = start + len(entries), start + len(entries) + -(-len(ids) // 2)
            words[start:middle] = entries
            words[middle:end].view(np.int32)[: len(ids)] = ids
            start = end
        self._slab[:num_words].copy_(on_host, non_blocking=True)
        self._write_changes(first_change, [len(entries) for entries, _ in changes])
        return self._slab[self._num_words : first_change]

    def _fill(self, fields: Any, plan: StepPlan) -> None:
        """Write a plan's values and their padding."""
        count, room = plan.num_decodes, self.shape.num_decodes
        for name, array, padding in _fields(plan):
            values, end = fields[name], room + len(array) - count
            values[:count] = array[:count]
            values[count:room] = padding
            values[room:end] = array[count:]
            values[end:] = padding
        if plan.recurrent is not None and self.shape.num_chunks:
            self._fill_saves(fields, plan, plan.recurrent)
        if self.shape.num_chunks:
            bounds, end = fields["cu_seqlens_q"], room + len(plan.seq_lens) - count
            bounds[:room] = np.arange(room)
            bounds[room : end + 1] = plan.cu_seqlens_q[count:] + (room - count)
            bounds[end + 1 : self.shape.num_seqs] = bounds[end]
            bounds[self.shape.num_seqs :] = self.shape.num_tokens

    def _fill_saves(self, fields: Any, plan: StepPlan, recurrent: RecurrentPlan) -> None:
        """Write which states are saved after which of the graph's tokens."""
        count = len(recurrent.save_tokens)
        fields["save_tokens"][:] = self._no_saves.numpy()
        fields["save_tokens"][:count] = self._places(recurrent.save_tokens, plan)
        fields["save_slots"][:count] = recurrent.save_slots
        fields["save_slots"][count:] = -1

    def _places(self, tokens: npt.NDArray[Any], plan: StepPlan) -> npt.NDArray[Any]:
        """Return where a plan's tokens are among the graph's: those of chunks follow the room for decodes."""
        if not self.shape.num_chunks:
            return tokens
        return np.where(tokens < plan.num_decodes, tokens, tokens + (self.shape.num_decodes - plan.num_decodes))

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
            num_decodes=self.shape.num_decodes,
            max_query_len=self.shape.chunk_tokens or 1,
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
