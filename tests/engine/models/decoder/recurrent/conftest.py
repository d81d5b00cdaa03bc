"""Tiny models with recurrent layers, saved once, and what transformers computes with them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cached_property

import pytest
import torch

from tests.engine.models.decoder.recurrent.recurrent_families import save_recurrent_model
from tests.engine.models.decoder.saved_models import Saved, SavedLong, saved_models

_PLAIN = {
    "torch_chunk_gated_delta_rule": "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention": "recurrent_kimi_delta_attention",
}


class SavedRecurrent(SavedLong):
    """One whose logits are computed by transformers' plain recurrences."""

    @cached_property
    def expected_logits(self) -> list[torch.Tensor]:
        """transformers' logits of the sequences, [length, vocab_size] each."""
        module = sys.modules[type(self.model).__module__]
        with pytest.MonkeyPatch.context() as patched:
            for chunked, plain in _PLAIN.items():
                if hasattr(module, plain):
                    patched.setattr(module, chunked, getattr(module, plain))
            return super().expected_logits


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """Return a function from a family's name to its model."""
    return saved_models(save_recurrent_model, tmp_path_factory, SavedRecurrent)
