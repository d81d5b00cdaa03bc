"""GpuDraftModel: samples drafts on a GPU; each pass takes the tokens of the one before from the device.

    host    | plan, launch pass 1 | pass 2 | ... | pass k | wait | plan and launch the step that verifies the drafts ...
    device          | pass 1 and its sampling | pass 2 and its sampling | ... | pass k ... |

So a step with drafts waits twice: for its drafts, which the verifying step must know to prepare what it samples from,
and for what that step samples. A sequence with a grammar makes the host wait after each pass of its batch, because only
the host knows which tokens may come next.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import torch

from engine.kv.page_copies import PageCopies
from engine.sampling.draft_sampler import DraftSampler
from engine.scheduling.drafting.draft_model import ModelDrafts
from engine.sequence import Sequence
from engine.structured_outputs.bitmask import fill_bitmask
from engine.structured_outputs.grammar import Grammar
from engine.worker.drafting.chunked_draft_model import Chunk, ChunkedDraftModel, slots_of
from engine.worker.drafting.draft_decoder import DraftDecoder
from engine.worker.drafting.draft_passes import DraftPasses, PassTokens
from engine.worker.drafting.prefix_marks import HostPrefixMarks
from kernels.device_copy import start_to_host, timing_event, use_device, wait_for_device

__all__ = ["GpuDraftModel"]


class GpuDraftModel(ChunkedDraftModel):
    """A draft model on one GPU.

    Args:
        decoder: the model, loaded.
        passes: compute with it.
        marks: of the tokens that it has computed, on the host.
        block_size: tokens per block.
        device: the GPU.
        weight_bytes: of the large model.
        max_pass_tokens: tokens of one forward pass, at most.
    """

    def __init__(
        self,
        decoder: DraftDecoder,
        passes: DraftPasses,
        marks: HostPrefixMarks,
        block_size: int,
        device: torch.device,
        *,
        weight_bytes: int,
        max_pass_tokens: int,
    ) -> None:
        super().__init__(decoder, marks, block_size, weight_bytes=weight_bytes, max_pass_tokens=max_pass_tokens)
        self._passes, self._device = passes, device
        self._host_marks = marks

    def follow(self, copies: PageCopies) -> None:
        """Note the copies of blocks that a step makes, in the order of the steps."""
        self._host_marks.follow(copies)

    @torch.inference_mode()
    def _fill(self, chunks: list[Chunk]) -> list[tuple[int, float]]:
        """Queue a pass. The host does not wait for it, so its time is not known."""
        use_device(self._device)
        chunks = sorted(chunks, key=lambda chunk: chunk.num_tokens > 1)
        try:
            self._passes.begin([chunk.block_table for chunk in chunks], [len(chunk.block_table) for chunk in chunks])
            self._passes.compute(PassTokens.of(chunks), last=False)
        except BaseException:  # an interrupted offline engine may continue
            self._passes.forget()
            raise
        return []

    @torch.inference_mode()
    def draft(self, lengths: Mapping[Sequence, int]) -> ModelDrafts:
        """Compute the tokens that it lacks, and draft up to these numbers of tokens, for which there are blocks."""
        use_device(self._device)
        drafts = ModelDrafts({sequence: [] for sequence in lengths})
        wanted = [sequence for sequence, length in lengths.items() if length > 0][: self._max_pass_tokens]
        if not wanted:
            return drafts
        clock = _PassClock(self._device)
        try:
            self._catch_up(wanted)
            chunks = sorted(
                ((sequence, self._last_chunk(sequence)) for sequence in wanted), key=lambda item: item[1].num_tokens > 1
            )
            growing = [_Growing(sequence, lengths[sequence], self._block_size) for sequence, _ in chunks]
            self._grow(growing, [chunk for _, chunk in chunks], drafts, clock)
        except BaseException:  # an interrupted offline engine may continue
            self._passes.forget()
            raise
        return drafts

    def _grow(self, growing: list[_Growing], chunks: list[Chunk], drafts: ModelDrafts, clock: _PassClock) -> None:
        """Draft for sequences after these chunks of them."""
        sequences = [draft.sequence for draft in growing]
        self._passes.begin([sequence.block_table for sequence in sequences], [draft.num_kept for draft in growing])
        sampler = DraftSampler(sequences, self._decoder.shape.vocab_size, self._device)
        constraint = _Constraint(sequences)
        tokens: torch.Tensor | None = None
        sampled: list[torch.Tensor] = []
        batch = PassTokens.of(chunks)
        clock.first_pass()
        for index in range(max(draft.length for draft in growing)):
            if index:
                if constraint.is_active:
                    clock.wait()
                    constraint.accept(sampled[-1].tolist())
                batch = _next_tokens(growing, index)
            logits = self._passes.compute(batch, last=True, sampled=tokens)
            assert logits is not None
            tokens = sampler.choose(logits, constraint.masks())
            sampled.append(start_to_host(tokens))
            clock.pass_queued(len(batch.token_ids))
        clock.wait()
        drafts.passes += clock.passes()
        for draft, token_ids in zip(growing, zip(*(row.tolist() for row in sampled), strict=True), strict=True):
            self._mark(draft, token_ids)
            drafts.token_ids[draft.sequence] = _until_failure(token_ids[: draft.length])

    def _mark(self, draft: _Growing, token_ids: tuple[int, ...]) -> None:
        """Mark those tokens of a draft that passes have computed: all but the last."""
        if (num_computed := draft.length - 1) > 0:
            # A token that could not be sampled was computed as token 0.
            computed = [max(token_id, 0) for token_id in token_ids[:num_computed]]
            first = len(draft.sequence.token_ids)
            self._marks.write(draft.sequence, first, computed, draft.slots[:num_computed])


class _Growing:
    """The draft of one sequence, whose tokens only the device knows.

    Attributes:
        length: tokens that it is to have.
        slots: of the KV cache, of each of them, int64 [length].
        num_kept: leading blocks of the sequence that do not hold drafts alone.
    """

    def __init__(self, sequence: Sequence, length: int, block_size: int) -> None:
        self.sequence, self.length = sequence, length
        self.start = sequence.num_tokens
        self.slots = slots_of(sequence.block_table, np.arange(self.start, self.start + length), block_size)
        self.num_kept = -(-self.start // block_size)


def _next_tokens(growing: list[_Growing], index: int) -> PassTokens:
    """Return what pass ``index`` computes: the last sampled token of each draft.

    A draft that has all its tokens stays in the batch, so that this is the same in all passes; its results are dropped.
    """
    count = len(growing)
    places = [min(index, draft.length) - 1 for draft in growing]
    return PassTokens(
        np.arange(-1, -1 - count, -1),
        np.array([draft.start + place for draft, place in zip(growing, places, strict=True)], dtype=np.int64),
        np.array(
            [draft.slots[place] if index < draft.length else -1 for draft, place in zip(growing, places, strict=True)],
            dtype=np.int64,
        ),
        np.ones(count, dtype=np.int64),
    )


def _until_failure(token_ids: tuple[int, ...]) -> list[int]:
    """Return the tokens before the first one that could not be sampled, which is negative."""
    end = next((index for index, token_id in enumerate(token_ids) if token_id < 0), len(token_ids))
    return list(token_ids[:end])


class _Constraint:
    """The grammars of those sequences of a batch that have one, in the states after their drafts so far."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self._grammars: dict[int, Grammar] = {
            index: sequence.grammar.fork() for index, sequence in enumerate(sequences) if sequence.grammar is not None
        }

    @property
    def is_active(self) -> bool:
        """Whether any draft still follows a grammar."""
        return bool(self._grammars)

    def masks(self) -> tuple[list[int], torch.Tensor] | None:
        """Return the indices of the batch with a grammar and the bitmasks of their next tokens, in pinned memory."""
        if not self._grammars:
            return None
        return list(self._grammars), fill_bitmask(list(self._grammars.values()), pinned=True)

    def accept(self, token_ids: list[int]) -> None:
        """Advance by what was sampled. A draft that cannot go on is cut there when the step is made."""
        for index, grammar in list(self._grammars.items()):
            if not grammar.accept(token_ids[index]) or grammar.is_terminated:
                del self._grammars[index]


class _PassClock:
    """Measures passes on the device. What comes before the first one, since the construction, is shared among all."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started = self._event()
        self._ends: list[torch.cuda.Event] = []
        self._num_tokens: list[int] = []

    def _event(self) -> torch.cuda.Event:
        event = timing_event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def first_pass(self) -> None:
        """Note that the first pass begins."""
        self._ends.append(self._event())

    def pass_queued(self, num_tokens: int) -> None:
        """Note the end of a pass, its sampling and copies to the host included."""
        self._ends.append(self._event())
        self._num_tokens.append(num_tokens)

    def wait(self) -> None:
        """Wait for the end of the last pass."""
        wait_for_device(self._device, self._ends[-1])

    def passes(self) -> list[tuple[int, float]]:
        """Return the tokens and seconds of each pass; the device must be done with all of them."""
        share = self._started.elapsed_time(self._ends[0]) / len(self._num_tokens)
        seconds = [(share + start.elapsed_time(end)) / 1e3 for start, end in pairwise(self._ends)]
        return list(zip(self._num_tokens, seconds, strict=True))
