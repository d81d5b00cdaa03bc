"""CpuHiddenStateModel: samples drafts from an MTP layer or an EAGLE-3 head, with the same noise.

To compute token t at position p, the layer reads the hidden state after the token before it, and its key and value are
those of position p - 1:

    position         0    1    2    3    4
    tokens           a    b    c    d
    hidden states    h0   h1   h2   (of d: the step that the draft is for)
    pass 1                b,h0 c,h1 d,h2 -> e       keys and values of positions 0, 1, 2; the output is h3'
    pass 2                               e,h3' -> f keys and values of position 3, for this draft only

What is computed with outputs of the layer has no marks, so it is computed again with the model's own hidden states if
the draft is right. The cache of hidden states is the model's alone to write: the blocks of a draft may still hold what
the step copies to the host before it computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from engine.kv.kv_cache import KVCache
from engine.scheduling.drafting.draft_model import ModelDrafts
from engine.sequence import Sequence
from engine.worker.drafting.chunked_draft_model import Chunk, slots_of
from engine.worker.drafting.cpu_draft_model import CpuDraftModel
from engine.worker.drafting.hidden_state_decoder import HiddenStateDecoder
from kernels.attention_metadata import AttentionMetadata

__all__ = ["CpuHiddenStateModel"]


class CpuHiddenStateModel(CpuDraftModel):
    """A layer that drafts from hidden states, on a CPU.

    Args:
        decoder: the layer, loaded.
        cache: of the model and the layer, as ``HiddenStateDecoder.joined_with`` declares it.
        weight_bytes: of the model.
        max_pass_tokens: tokens of one forward pass, at most.
    """

    def __init__(self, decoder: HiddenStateDecoder, cache: KVCache, *, weight_bytes: int, max_pass_tokens: int) -> None:
        super().__init__(decoder, cache, weight_bytes=weight_bytes, max_pass_tokens=max_pass_tokens)
        self._layer = decoder
        self._outputs: dict[int, torch.Tensor] = {}  # of the last pass of a draft, by the ids of block tables

    def num_computed(self, sequence: Sequence) -> int:
        """Return the leading tokens of a running sequence that it need not compute: the first one never."""
        return 1 + super().num_computed(sequence)

    def draft(self, lengths: Mapping[Sequence, int]) -> ModelDrafts:
        """See CpuDraftModel. A sequence of one token has no hidden state yet."""
        try:
            drafts = super().draft({sequence: count for sequence, count in lengths.items() if sequence.num_tokens > 1})
        finally:
            self._outputs.clear()
        return ModelDrafts({sequence: [] for sequence in lengths} | drafts.token_ids, drafts.passes)

    def _chunk(self, sequence: Sequence, draft: list[int], first: int, end: int) -> Chunk:
        """Return the tokens from index ``first`` to ``end`` of a sequence and a draft, at the positions before them."""
        positions = np.arange(first - 1, end - 1)
        slots = slots_of(sequence.block_table, positions, self._block_size)
        num_known = len(sequence.token_ids)
        if first < num_known:
            self._marks.write(sequence, first - 1, [], slots)
        else:
            self._marks.forget(slots)
        token_ids = [*sequence.token_ids[first:end], *draft[max(first - num_known, 0) : max(end - num_known, 0)]]
        return Chunk(token_ids, positions, slots, sequence.block_table)

    def _compute(self, chunks: list[Chunk], sampling: Iterable[int]) -> torch.Tensor | None:
        """See CpuDraftModel; keep the outputs after the sampled chunks for the next pass."""
        sampling = list(sampling)
        logits = super()._compute(chunks, sampling)
        if sampling:
            tables = [id(chunks[index].block_table) for index in sampling]
            self._outputs = dict(zip(tables, self._layer.last_hidden, strict=True))
        return logits

    def _compute_packed(
        self,
        packed: list[Chunk],
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        logit_indices: torch.Tensor,
    ) -> torch.Tensor | None:
        hidden_states = None
        if self._outputs:  # every later pass of a draft has one token of each sequence
            hidden_states = torch.stack([self._outputs[id(chunk.block_table)] for chunk in packed])
        return self._layer.compute(token_ids, positions, metadata, self._cache, logit_indices, hidden_states)
