"""Tiny models of Llama 4's kinds, saved once, and what transformers computes with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import pytest
import torch
from transformers import PreTrainedModel

from tests.engine.models.adapter.packed_steps import make_sequences
from tests.engine.models.decoder.llama4.llama4_models import save_llama4_model


@dataclass
class Saved:
    """A model of transformers, and the directory that it was saved to."""

    model: PreTrainedModel
    path: str

    @cached_property
    def expected_logits(self) -> list[torch.Tensor]:
        """transformers' logits of the sequences of packed_steps.py, [length, vocab_size] each."""
        with torch.inference_mode():
            return [self.model(tokens[None], use_cache=False).logits[0] for tokens in make_sequences()]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """Return a function from a kind's name to its model."""
    return cache(lambda name: Saved(*save_llama4_model(name, tmp_path_factory.mktemp(name.replace(" ", "-")))))
