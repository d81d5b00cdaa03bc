"""DraftPasses: the forward passes of a draft model on a GPU, those of few tokens as CUDA graphs.

A pass is planned like a step of the large model, and has block tables of its own. Its tokens may be those that the pass
before has sampled, which only the device knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from engine.kv.block_tables import BlockTables, TableChanges, TableTracker
from engine.kv.kv_cache import CachedLayers
from engine.worker.drafting.chunked_draft_model import Chunk
from engine.worker.drafting.draft_decoder import DraftDecoder
from engine.worker.graphs.batch_graphs import BatchGraphs
from engine.worker.graphs.device import CudaGraphDevice
from engine.worker.graphs.static_inputs import MAX_CHANGES
from engine.worker.step_plan import StepPlan
from kernels.device_copy import to_device_together

__all__ = ["MAX_CHUNK_TOKENS", "DraftPasses", "PassTokens"]

MAX_CHUNK_TOKENS = 128  # of a graph: after a step a sequence lacks two tokens, most often
_NO_CHANGES = TableChanges(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32))
_NONE = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class PassTokens:
    """The tokens of one pass, sequence after sequence, those with one token first.

    Attributes:
        token_ids: int64 [num_tokens]; ~i: the token at index i of those that the last pass sampled.
        positions: int64 [num_tokens].
        slots: of the KV cache, int64 [num_tokens]; -1: not written.
        counts: tokens of each sequence, int64 [num_seqs].
    """

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> PassTokens:
        """Return the tokens of chunks; chunks of one token come first."""
        return cls(
            np.array([token_id for chunk in chunks for token_id in chunk.token_ids], dtype=np.int64),
            np.concatenate([chunk.positions for chunk in chunks]),
            np.concatenate([chunk.slots for chunk in chunks]),
            np.array([chunk.num_tokens for chunk in chunks], dtype=np.int64),
        )


class DraftPasses:
    """Computes passes.

    Args:
        decoder: the model, loaded, on a GPU.
        cache: its part of the KV cache.
        block_tables: for its passes alone.
        uses_graphs: whether passes of few tokens are replayed.
    """

    def __init__(
        self, decoder: DraftDecoder, cache: CachedLayers, block_tables: BlockTables, *, uses_graphs: bool
    ) -> None:
        self._decoder, self._cache, self._block_tables = decoder, cache, block_tables
        self._tracker = TableTracker(*block_tables.shape)
        self._rows, self._changes = _NONE, _NO_CHANGES
        self._uses_graphs = uses_graphs
        self._graphs: BatchGraphs | None = None

    def measure(self) -> int:
        """Capture the graphs, if they are used, and drop them; return the bytes of the device that they take.

        Raises:
            ConfigError: if the device refuses.
        """
        return self._make_graphs().capture() if self._uses_graphs else 0

    def capture(self) -> int:
        """Do what ``measure`` does, and keep the graphs."""
        if not self._uses_graphs:
            return 0
        self._graphs = self._make_graphs()
        return self._graphs.capture()

    def _make_graphs(self) -> BatchGraphs:
        return BatchGraphs(
            CudaGraphDevice(self._block_tables.device),
            partial(self._decoder.forward, cache=self._cache),  # a method of this object would keep the graphs alive
            self._block_tables,
            self._cache.block_size,
            max_chunk_tokens=MAX_CHUNK_TOKENS if self._decoder.backend.captures_chunks else 0,
        )

    @property
    def num_graphs(self) -> int:
        """Graphs that ``capture`` has captured."""
        return 0 if self._graphs is None else len(self._graphs.shapes)

    def begin(self, block_tables: list[list[int]], num_kept: Sequence[int]) -> None:
        """Begin passes of the sequences with these block tables, in this order.

        Args:
            block_tables: as the BlockManager has them.
            num_kept: of each, the leading blocks that it does not lose after the passes: the others hold drafts only.
        """
        self._rows, self._changes = self._tracker.update(block_tables)
        for position, (table, kept) in enumerate(zip(block_tables, num_kept, strict=True)):
            if kept < len(table):
                self._tracker.expect_removal(position, kept)

    def forget(self) -> None:
        """Send every block table again, since the device may not have received the last changes."""
        self._tracker.forget()

    def compute(self, tokens: PassTokens, *, last: bool, sampled: torch.Tensor | None = None) -> torch.Tensor | None:
        """Queue a pass of the sequences of ``begin``.

        Args:
            tokens: what it computes.
            last: whether to compute logits, after the last token of each sequence.
            sampled: what the last pass sampled, int64 [num_seqs].

        Returns:
            The logits, float32 [num_seqs, vocab_size], valid until the next pass; None without them.
        """
        plan = self._plan(tokens, last=last)
        if (graph := None if self._graphs is None else self._graphs.find(plan)) is not None:
            logit_indices = graph.inputs.load(plan)
            plan.take_sampled(graph.inputs.token_ids, sampled, None)
            hidden = graph.replay()
        else:
            model_input = plan.to_device(self._block_tables, self._cache.block_size)
            plan.take_sampled(model_input.token_ids, sampled, None)
            hidden, logit_indices = self._decoder.forward(model_input, self._cache), model_input.logit_indices
        return self._decoder.model.compute_logits(hidden, logit_indices) if last else None

    def _plan(self, tokens: PassTokens, *, last: bool) -> StepPlan:
        cu_seqlens = np.concatenate(([0], np.cumsum(tokens.counts)))
        seq_lens = tokens.positions[cu_seqlens[1:] - 1] + 1
        plan = StepPlan(
            token_ids=tokens.token_ids,
            num_pending=int((tokens.token_ids < 0).sum()),
            positions=tokens.positions,
            slot_mapping=tokens.slots,
            cu_seqlens_q=cu_seqlens.astype(np.int32),
            seq_lens=seq_lens.astype(np.int32),
            table_rows=self._rows,
            table_changes=self._changes,
            logit_indices=cu_seqlens[1:] - 1 if last else _NONE,
            prompt_logit_indices=_NONE,
            num_decodes=int((tokens.counts == 1).sum()),
            max_query_len=int(tokens.counts.max()),
            max_seq_len=int(seq_lens.max()),
            copies=[],
            windows=[],
            recurrent=None,
        )
        if len(self._changes.entries) > self._block_tables.shape[0] + MAX_CHANGES:  # a graph has no room for them
            self._block_tables.write(*to_device_together(self._changes, self._block_tables.device))
            plan = replace(plan, table_changes=_NO_CHANGES)
        self._changes = _NO_CHANGES
        return plan
