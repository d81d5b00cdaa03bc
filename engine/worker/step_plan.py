"""One step's batch: StepPlan holds it as arrays on the host, for every rank; ModelInput as tensors on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.kv.block_tables import BlockTables, TableChanges
from engine.kv.page_copies import PageCopies
from engine.kv.page_maps import PageMap
from kernels.attention_metadata import AttentionMetadata
from kernels.cache.pending_tokens import take_pending_tokens
from kernels.device_copy import to_device_together
from kernels.recurrent_metadata import RecurrentMetadata

__all__ = ["ModelInput", "RecurrentPlan", "StepPlan", "WindowPlan"]


@dataclass(frozen=True)
class ModelInput:
    """What the model computes in one step."""

    token_ids: torch.Tensor  # int64 [num_tokens]
    positions: torch.Tensor  # int64 [num_tokens]
    metadata: AttentionMetadata
    logit_indices: torch.Tensor  # int64 [num_sampled + num_draft_tokens]: tokens whose logits the sampler needs
    prompt_logit_indices: torch.Tensor  # int64 [n]: prompt tokens whose logits give the next one's log-probability
    windows: tuple[AttentionMetadata, ...] = ()  # as ``metadata``, of the pages of each window
    recurrent: RecurrentMetadata | None = None  # for layers with states


class WindowPlan(NamedTuple):
    """What a step does with the pages of one window."""

    slot_mapping: npt.NDArray[np.int64]  # as the step's, of pages
    changed_blocks: npt.NDArray[np.int64]  # have another page now; see PageMap
    changed_pages: npt.NDArray[np.int32]


class RecurrentPlan(NamedTuple):
    """What a step does with states; see RecurrentMetadata."""

    slots: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]
    save_tokens: npt.NDArray[np.int32]
    save_slots: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step as every rank computes it. Arrays, because lists would pickle slower.

    Block tables are not part of it: the ranks have them, and receive only the changes.
    """

    # Negative for a decode whose token only the device knows: ~i is the token at index i of those that the last step
    # sampled.
    token_ids: npt.NDArray[np.int64]
    num_pending: int  # how many of them are negative
    positions: npt.NDArray[np.int64]
    slot_mapping: npt.NDArray[np.int64]
    cu_seqlens_q: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    table_rows: npt.NDArray[np.int64]  # of each sequence: the row of BlockTables with its block table
    table_changes: TableChanges
    logit_indices: npt.NDArray[np.int64]  # into token_ids: of the sequences that sample, then of the draft tokens
    prompt_logit_indices: npt.NDArray[np.int64]  # into token_ids: see ModelInput; in the scheduler's order
    num_decodes: int  # the first sequences compute one token each, none of them a prompt's
    max_query_len: int
    max_seq_len: int
    copies: list[PageCopies]  # of each pool of the KV cache, in the order of KVCache.pools
    windows: list[WindowPlan]  # of each window, as ``windows_of`` orders them
    recurrent: RecurrentPlan | None  # None: the model has no states

    def to_device(self, block_tables: BlockTables, block_size: int, page_maps: Sequence[PageMap] = ()) -> ModelInput:
        """Copy the arrays to the device of the rank's block tables, and write the changes of these and of the maps."""
        arrays = (
            self.token_ids,
            self.positions,
            self.slot_mapping,
            self.cu_seqlens_q,
            self.seq_lens,
            self.table_rows,
            *self.table_changes,
            self.logit_indices,
            self.prompt_logit_indices,
        )
        (
            token_ids,
            positions,
            slot_mapping,
            cu_seqlens_q,
            seq_lens,
            table_rows,
            changed_entries,
            changed_block_ids,
            logit_indices,
            prompt_logit_indices,
        ) = to_device_together(arrays, block_tables.device)
        block_tables.write(changed_entries, changed_block_ids)
        metadata = AttentionMetadata(
            slot_mapping=slot_mapping,
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=seq_lens,
            block_tables=block_tables.select(table_rows, -(-self.max_seq_len // block_size)),
            num_decodes=self.num_decodes,
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
            host_lens=self._lengths_of_chunks(),
        )
        return ModelInput(
            token_ids=token_ids,
            positions=positions,
            metadata=metadata,
            windows=tuple(
                _window_metadata(metadata, plan, page_map)
                for plan, page_map in zip(self.windows, page_maps, strict=True)
            ),
            logit_indices=logit_indices,
            prompt_logit_indices=prompt_logit_indices,
            recurrent=None if self.recurrent is None else self._recurrent_metadata(self.recurrent, cu_seqlens_q),
        )

    def _lengths_of_chunks(self) -> tuple[tuple[int, int], ...]:
        query_lens = np.diff(self.cu_seqlens_q[self.num_decodes :])
        return tuple(zip(query_lens.tolist(), self.seq_lens[self.num_decodes :].tolist(), strict=True))

    def _recurrent_metadata(self, plan: RecurrentPlan, cu_seqlens: torch.Tensor) -> RecurrentMetadata:
        slots, starts, save_tokens, save_slots = to_device_together(plan, cu_seqlens.device)
        return RecurrentMetadata(cu_seqlens, slots, starts, save_tokens, save_slots, self.num_decodes)

    def take_sampled(
        self, token_ids: torch.Tensor, sampled: torch.Tensor | None, recurrent: RecurrentMetadata | None
    ) -> None:
        """Replace the placeholders in the plan's ``token_ids`` on the device by the tokens that the last step sampled.

        Args:
            token_ids: int64 [num_tokens], or more.
            sampled: int64 [n]: what the last step sampled, negative where there is no token; None if it sampled
                nothing.
            recurrent: the step as recurrent layers see it. They leave the states of sequences without a token as they
                are.
        """
        if self.num_pending:
            assert sampled is not None, "the plan takes tokens of a last step that has sampled none"
            state_slots = None if recurrent is None else recurrent.slots[: self.num_decodes]
            take_pending_tokens(token_ids[: self.num_decodes], sampled, state_slots)


def _window_metadata(metadata: AttentionMetadata, plan: WindowPlan, page_map: PageMap) -> AttentionMetadata:
    """Return a step's metadata for the layers of one window."""
    slot_mapping, blocks, pages = to_device_together(plan, metadata.seq_lens.device)
    page_map.write(blocks, pages)
    return replace(metadata, slot_mapping=slot_mapping, block_tables=page_map.look_up(metadata.block_tables))
