"""StaticInputs: the memory from which the graph of one batch size reads a step, and the copy that fills it.

Every graph reads the beginning of the same slab. What no graph reads follows: it is used before or after the replay.

    slab   [ token_ids | positions | slot_mapping | table_rows | seq_lens | logit_indices | changes of block tables ]
             int64       int64       int64          int64        int32      of any length
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.kv.block_tables import BlockTables
from engine.worker.step_plan import StepPlan
from kernels.attention_metadata import AttentionMetadata
from kernels.device_copy import host_words

__all__ = ["MAX_CHANGES", "StaticInputs", "make_slab"]

MAX_CHANGES = 64  # of block tables in one step, in addition to one for each sequence

_PADDING = {"token_ids": 0, "positions": 0, "slot_mapping": -1, "table_rows": 0, "seq_lens": 0}  # of a graph's fields


def _layout(size: int) -> np.dtype[np.void]:
    """Return the fields that the graph of ``size`` sequences reads, named as in StepPlan, in whole int64 words."""
    even = size + size % 2
    fields = [(name, np.int64, (size,)) for name in ("token_ids", "positions", "slot_mapping", "table_rows")]
    return np.dtype([*fields, ("seq_lens", np.int32, (even,))])


def make_slab(max_num_seqs: int, device: torch.device) -> torch.Tensor:
    """Return the slab for batches of up to ``max_num_seqs`` sequences, int64 words."""
    after_fields = max_num_seqs + 2 * (max_num_seqs + MAX_CHANGES)  # logit_indices, changes
    return torch.zeros(_layout(max_num_seqs).itemsize // 8 + after_fields, dtype=torch.int64, device=device)


class StaticInputs:
    """The inputs of one graph.

    Args:
        size: sequences of the graph, padding included.
        slab: shared by the graphs of all sizes.
        block_tables: the rank's block tables, whose rows the graph reads.
        block_size: tokens per block.

    Attributes:
        token_ids: int64 [size]; may be overwritten between ``load`` and the replay.
        positions: int64 [size].
    """

    def __init__(self, size: int, slab: torch.Tensor, block_tables: BlockTables, block_size: int) -> None:
        self.size = size
        self._slab = slab
        self._block_tables = block_tables
        self._max_seq_len = block_tables.shape[1] * block_size
        self._layout = _layout(size)
        self._num_words = self._layout.itemsize // 8
        self.token_ids, self.positions, self._slot_mapping, self._table_rows = slab[: 4 * size].view(4, size)
        self._seq_lens = slab[4 * size : self._num_words].view(torch.int32)[:size]
        self._cu_seqlens_q = torch.arange(size + 1, dtype=torch.int32, device=slab.device)  # every sequence decodes
        slab[: self._num_words].zero_()  # a capture computes padding alone
        self._slot_mapping.fill_(_PADDING["slot_mapping"])

    def load(self, plan: StepPlan) -> torch.Tensor:
        """Copy a step of at most ``size`` decodes to the device, and write its changes of the block tables.

        Returns:
            The plan's ``logit_indices``, on the device until the next ``load``.
        """
        entries, block_ids = plan.table_changes
        first_change = self._num_words + len(plan.logit_indices)
        first_id = first_change + len(entries)
        num_words = first_id + -(-len(block_ids) // 2)
        on_host = host_words(num_words, self._slab.device)
        words = on_host.numpy()
        fields = words[: self._num_words].view(self._layout)[0]
        for name, padding in _PADDING.items():
            array: npt.NDArray[Any] = getattr(plan, name)
            fields[name][: len(array)] = array
            fields[name][len(array) :] = padding
        words[self._num_words : first_change] = plan.logit_indices
        words[first_change:first_id] = entries
        words[first_id:].view(np.int32)[: len(block_ids)] = block_ids
        self._slab[:num_words].copy_(on_host, non_blocking=True)
        if len(entries):
            ids = self._slab[first_id:num_words].view(torch.int32)[: len(block_ids)]
            self._block_tables.write(self._slab[first_change:first_id], ids)
        return self._slab[self._num_words : first_change]

    def metadata(self) -> AttentionMetadata:
        """Return the batch as attention sees it. Call it inside a capture: it copies rows of the block tables."""
        return AttentionMetadata(
            slot_mapping=self._slot_mapping,
            cu_seqlens_q=self._cu_seqlens_q,
            seq_lens=self._seq_lens,
            block_tables=self._block_tables.select(self._table_rows, self._block_tables.shape[1]),
            num_decodes=self.size,
            max_query_len=1,
            max_seq_len=self._max_seq_len,
        )
