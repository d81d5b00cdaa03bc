"""CpuDraftModel: samples drafts from a smaller model, with the parameters and the noise of each sequence.

The noise of a token is a function of seed, position and token (sampling/noise.py), so both models add the same one to
their logits. At a total variation distance d of their distributions they choose the same token with a probability of at
least (1 - d) / (1 + d), and no way for two models to draw without seeing the other's distribution guarantees more
(Daliri et al., 2024, arXiv 2408.07978). Without noise, at temperature 0, they agree where the most likely token is the
same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch

from engine.kv.kv_cache import KVCache
from engine.sampling.sampler import Sampler
from engine.scheduling.drafting.continuations import continuations_of
from engine.scheduling.drafting.draft_model import ModelDrafts
from engine.sequence import Sequence
from engine.structured_outputs.bitmask import fill_bitmask
from engine.worker.drafting.chunked_draft_model import Chunk, ChunkedDraftModel
from engine.worker.drafting.draft_decoder import DraftDecoder
from engine.worker.drafting.hidden_state_decoder import HiddenStateDecoder
from engine.worker.drafting.prefix_marks import PrefixMarks
from kernels.attention_metadata import AttentionMetadata, leading_decodes

__all__ = ["CpuDraftModel"]


class CpuDraftModel(ChunkedDraftModel):
    """A draft model on a CPU, whose tokens are known after each pass.

    Args:
        decoder: the model, loaded.
        cache: of both models, as ``joined_with`` of the decoder declares it.
        weight_bytes: of the large model.
        max_pass_tokens: tokens of one forward pass, at most.
    """

    def __init__(
        self, decoder: DraftDecoder | HiddenStateDecoder, cache: KVCache, *, weight_bytes: int, max_pass_tokens: int
    ) -> None:
        marks = PrefixMarks(cache.layers[-1][0], include_next=isinstance(decoder, HiddenStateDecoder))
        sizes = {"weight_bytes": weight_bytes, "max_pass_tokens": max_pass_tokens}
        super().__init__(decoder, marks, cache.block_size, **sizes)
        self._cache = decoder.part_of(cache)
        self._sampler = Sampler(decoder.shape.vocab_size, torch.device("cpu"))

    def _fill(self, chunks: list[Chunk]) -> list[tuple[int, float]]:
        started = perf_counter()
        self._compute(chunks, sampling=())
        return [(sum(chunk.num_tokens for chunk in chunks), perf_counter() - started)]

    def draft(self, lengths: Mapping[Sequence, int]) -> ModelDrafts:
        """Compute the tokens that it lacks, and draft up to these numbers of tokens, for which there are blocks."""
        drafts = ModelDrafts({sequence: [] for sequence in lengths})
        growing = [_Growing(sequence, length, sequence) for sequence, length in lengths.items() if length > 0]
        growing = growing[: self._max_pass_tokens]  # each of them has a token in the first pass
        drafts.passes += self._catch_up([draft.sequence for draft in growing])
        chunks = [self._last_chunk(draft.sequence) for draft in growing]
        while growing:
            started = perf_counter()
            logits = self._compute(chunks, sampling=range(len(chunks)))
            assert logits is not None
            tokens = self._sample(logits, [draft.last for draft in growing])
            growing = [draft for draft, token_id in zip(growing, tokens, strict=True) if draft.add(token_id)]
            drafts.passes.append((sum(chunk.num_tokens for chunk in chunks), perf_counter() - started))
            for draft in growing:
                drafts.token_ids[draft.sequence] = draft.token_ids
            growing = [draft for draft in growing if len(draft.token_ids) < draft.length]
            chunks = [
                self._chunk(draft.sequence, draft.token_ids, last := len(draft.last.token_ids) - 1, last + 1)
                for draft in growing
            ]
        return drafts

    def _sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[int | None]:
        """Sample as the large model's tokens are sampled; None where no token can be."""
        constrained = [index for index, sequence in enumerate(sequences) if sequence.grammar is not None]
        grammars = [grammar for sequence in sequences if (grammar := sequence.grammar) is not None]
        masks = (constrained, fill_bitmask(grammars)) if grammars else None
        sampled = self._sampler.sample(logits, sequences, masks)
        return [None if index in sampled.failed else token_id for index, token_id in enumerate(sampled.token_ids)]

    def _compute(self, chunks: list[Chunk], sampling: Iterable[int]) -> torch.Tensor | None:
        """Compute chunks; return the logits after those of the indices in ``sampling``, in their order."""
        order = sorted(range(len(chunks)), key=lambda index: chunks[index].num_tokens > 1)  # decodes come first
        packed = [chunks[index] for index in order]
        ends = np.cumsum([chunk.num_tokens for chunk in packed])
        last = np.empty(len(chunks), dtype=np.int64)
        last[order] = ends - 1
        token_ids = torch.tensor([token_id for chunk in packed for token_id in chunk.token_ids])
        positions = torch.from_numpy(np.concatenate([chunk.positions for chunk in packed]))
        logit_indices = torch.from_numpy(last[list(sampling)])
        return self._compute_packed(packed, token_ids, positions, self._metadata(packed, ends), logit_indices)

    def _compute_packed(
        self,
        packed: list[Chunk],
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        logit_indices: torch.Tensor,
    ) -> torch.Tensor | None:
        """Compute chunks in this order; return the logits after the tokens of ``logit_indices``."""
        assert isinstance(self._decoder, DraftDecoder)
        return self._decoder.compute(token_ids, positions, metadata, self._cache, logit_indices)

    def _metadata(self, chunks: list[Chunk], ends: npt.NDArray[np.int64]) -> AttentionMetadata:
        lengths, seq_lens = [chunk.num_tokens for chunk in chunks], [chunk.seq_len for chunk in chunks]
        width = -(-max(seq_lens) // self._cache.block_size)
        tables = np.full((len(chunks), width), -1, dtype=np.int32)
        for row, chunk in zip(tables, chunks, strict=True):
            held = chunk.block_table[:width]
            row[: len(held)] = held
        return AttentionMetadata(
            slot_mapping=torch.from_numpy(np.concatenate([chunk.slots for chunk in chunks])),
            cu_seqlens_q=torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32)),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_tables=torch.from_numpy(tables),
            num_decodes=leading_decodes(lengths),
            max_query_len=max(lengths),
            max_seq_len=max(seq_lens),
        )


@dataclass(slots=True)
class _Growing:
    """The draft of one sequence while it grows.

    Attributes:
        length: tokens that it is to have.
        last: the sequence with the draft so far, from which the next token is sampled.
    """

    sequence: Sequence
    length: int
    last: Sequence
    token_ids: list[int] = field(default_factory=list)

    def add(self, token_id: int | None) -> bool:
        """Append a token; False if the draft ends before it."""
        if token_id is None or not (continued := continuations_of(self.last, [token_id])):
            return False
        self.token_ids.append(token_id)
        (self.last,) = continued
        return True
