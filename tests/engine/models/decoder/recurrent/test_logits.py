"""Families with recurrent layers against transformers: logits of every token, in packed steps of chunks and decodes.

Sequences are longer than the chunks in which transformers computes its recurrences.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.models.config.model_config import ModelConfig, load_hf_config
from engine.models.decoder import loader
from engine.models.tensor_parallel import TensorParallel
from tests.engine.models.adapter.packed_steps import Chunk, packed_logits
from tests.engine.models.decoder.recurrent.recurrent_families import RECURRENT_FAMILIES, save_recurrent_model

TOLERANCE = 1e-5  # of the largest logit of a sequence
CPU = torch.device("cpu")
LENGTHS = (150, 21)
STEPS: list[list[Chunk]] = [
    [(0, 0, 70)],
    [(1, 0, 3), (0, 70, 71)],
    [(0, 71, 140), (1, 3, 4)],
    [(1, 4, 20), (0, 140, 149)],
    [(0, 149, 150), (1, 20, 21)],
]
Change = Callable[[ModelConfig], ModelConfig]


def make_sequences() -> list[torch.Tensor]:
    """Return the token ids of the sequences that STEPS computes."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 385, (length,), generator=generator) for length in LENGTHS]


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
            if plain := getattr(module, "torch_recurrent_gated_delta_rule", None):
                patched.setattr(module, "torch_chunk_gated_delta_rule", plain)
            return [self.model(tokens[None], use_cache=False).logits[0] for tokens in make_sequences()]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """Return a function from a family's name to its model."""
    return cache(lambda name: Saved(*save_recurrent_model(name, tmp_path_factory.mktemp(name))))


def load(path: str, change: Change | None = None, *, dtype: torch.dtype = torch.float32) -> Any:
    """Load a model; with ``change``, as if its config said something else."""
    from_hf = ModelConfig.from_hf
    with pytest.MonkeyPatch.context() as patched:
        if change is not None:
            patched.setattr(ModelConfig, "from_hf", lambda config: change(from_hf(config)))
        return loader.load_decoder(
            path, load_hf_config(path), dtype=dtype, device=CPU, max_model_len=256, parallel=TensorParallel()
        )


def largest_error(decoder: Any, saved: Saved) -> float:
    """Return the largest difference of a logit, relative to the largest logit of its sequence."""
    computed = packed_logits(decoder, make_sequences(), steps=STEPS)
    return max(
        float((got - want).abs().max() / want.abs().max())
        for got, want in zip(computed, saved.expected_logits, strict=True)
    )


@pytest.mark.parametrize("name", RECURRENT_FAMILIES)
def test_logits_equal_those_of_transformers(saved: Callable[[str], Saved], name: str) -> None:
    assert largest_error(load(saved(name).path), saved(name)) < TOLERANCE
