"""Tiny models with recurrent layers, saved once, and what transformers computes with them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import pytest
import torch
from transformers import PreTrainedModel

from tests.engine.models.adapter.packed_steps import Chunk
from tests.engine.models.decoder.recurrent.recurrent_families import save_recurrent_model

LENGTHS = (150, 21)
STEPS: list[list[Chunk]] = [
    [(0, 0, 70)],
    [(1, 0, 3), (0, 70, 71)],
    [(0, 71, 140), (1, 3, 4)],
    [(1, 4, 20), (0, 140, 149)],
    [(0, 149, 150), (1, 20, 21)],
]


def make_sequences() -> list[torch.Tensor]:
    """Return the token ids of the sequences that STEPS computes."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 385, (length,), generator=generator) for length in LENGTHS]


_PLAIN = {
    "torch_chunk_gated_delta_rule": "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention": "recurrent_kimi_delta_attention",
}


@dataclass
class Saved:
    """A model of transformers, and the directory that it was saved to."""

    model: PreTrainedModel
    path: str

    @cached_property
    def expected_logits(self) -> list[torch.Tensor]:
        """transformers' logits of the sequences by its plain recurrences, [length, vocab_size] each."""
        module = sys.modules[type(self.model).__module__]
        with torch.inference_mode(), pytest.MonkeyPatch.context() as patched:
            for chunked, plain in _PLAIN.items():
                if hasattr(module, plain):
                    patched.setattr(module, chunked, getattr(module, plain))
            return [self.model(tokens[None], use_cache=False).logits[0] for tokens in make_sequences()]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """Return a function from a family's name to its model."""
    return cache(lambda name: Saved(*save_recurrent_model(name, tmp_path_factory.mktemp(name))))
