"""Models that are loaded as if their configs said something else, and how far their logits are from expected ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.model_config import ModelConfig
from engine.models.decoder import loader
from engine.models.tensor_parallel import TensorParallel

__all__ = ["TOLERANCE", "Change", "largest_difference", "load"]

TOLERANCE = 1e-5  # of the largest logit of a sequence
Change = Callable[[ModelConfig], ModelConfig]


def load(path: str, change: Change | None = None, hf_config: Any = None, **options: Any) -> Any:
    """Load a model in float32 on the CPU; with ``change``, as if its config said something else.

    Args:
        path: of its checkpoint.
        change: of the config that the decoder reads.
        hf_config: of transformers, in place of the checkpoint's own.
        options: of ``load_decoder``, in place of the usual ones.
    """
    from_hf = ModelConfig.from_hf
    usual = {"dtype": torch.float32, "device": torch.device("cpu"), "max_model_len": 256, "parallel": TensorParallel()}
    with pytest.MonkeyPatch.context() as patched:
        if change is not None:
            patched.setattr(ModelConfig, "from_hf", lambda config: change(from_hf(config)))
        return loader.load_decoder(path, hf_config or load_hf_config(path), **(usual | options))


def largest_difference(computed: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest difference of a logit, relative to the largest logit of its sequence."""
    return max(float((got - want).abs().max() / want.abs().max()) for got, want in zip(computed, expected, strict=True))
