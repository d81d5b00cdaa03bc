"""Tiny models that are saved once, and what transformers computes with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.engine.models.adapter import packed_steps
from tests.engine.models.adapter.packed_steps import Chunk

LONG_LENGTHS = (150, 21)
LONG_STEPS: list[list[Chunk]] = [
    [(0, 0, 70)],
    [(1, 0, 3), (0, 70, 71)],
    [(0, 71, 140), (1, 3, 4)],
    [(1, 4, 20), (0, 140, 149)],
    [(0, 149, 150), (1, 20, 21)],
]


def make_long_sequences() -> list[torch.Tensor]:
    """Return the token ids of the sequences that LONG_STEPS computes."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 385, (length,), generator=generator) for length in LONG_LENGTHS]


@dataclass
class Saved:
    """A model of transformers, and the directory that it was saved to."""

    model: PreTrainedModel
    path: str

    def sequences(self) -> list[torch.Tensor]:
        """Return the token ids that ``expected_logits`` is computed for."""
        return packed_steps.make_sequences()

    @cached_property
    def expected_logits(self) -> list[torch.Tensor]:
        """transformers' logits of the sequences, [length, vocab_size] each."""
        with torch.inference_mode():
            return [self.model(tokens[None], use_cache=False).logits[0] for tokens in self.sequences()]


class SavedLong(Saved):
    """One whose logits are those of LONG_STEPS' sequences."""

    def sequences(self) -> list[torch.Tensor]:
        """Return the token ids that ``expected_logits`` is computed for."""
        return make_long_sequences()


def saved_models(
    save: Callable[[str, Path], tuple[PreTrainedModel, str]],
    tmp_path_factory: pytest.TempPathFactory,
    kind: type[Saved] = Saved,
) -> Callable[[str], Saved]:
    """Return a function from a name to its model, which ``save`` makes once."""
    return cache(lambda name: kind(*save(name, tmp_path_factory.mktemp(name.replace(" ", "-")))))
