"""DraftSampler: samples one token after another for the same sequences, which only the device knows."""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence

import torch

from engine.sampling.batch import SamplingBatch
from engine.sampling.sampler import NUM_CANDIDATES, choose_tokens
from engine.sequence import Sequence

__all__ = ["DraftSampler"]


class DraftSampler:
    """Samples the drafts of one step, with the parameters, the noise and the history of each sequence.

    Args:
        sequences: as they are before their drafts; none is a beam.
        vocab_size: width of the logits.
        device: of the logits, a GPU.
    """

    def __init__(self, sequences: GenericSequence[Sequence], vocab_size: int, device: torch.device) -> None:
        self._batch = SamplingBatch(sequences, vocab_size, device, NUM_CANDIDATES)
        self._last: torch.Tensor | None = None

    def choose(self, logits: torch.Tensor, grammar: tuple[list[int], torch.Tensor] | None) -> torch.Tensor:
        """Choose the next token of each sequence. Does not wait for the device.

        Args:
            logits: float32 [num_seqs, vocab_size]; overwritten.
            grammar: as of ``Sampler.start``.

        Returns:
            int64 [num_seqs], negative where no token can be chosen.
        """
        if self._last is not None:
            self._batch.advance_on_device(self._last)
        self._last = choose_tokens(self._batch, logits, grammar)
        return self._last
