"""The zoo: tiny checkpoints of the adapter's architectures, each made when a test first asks for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.models.adapter.decoder import TransformersDecoder
from engine.models.adapter.loader import load_transformers_decoder
from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.transformers_config import TransformersConfig
from engine.models.tensor_parallel import TensorParallel
from tests.engine.checkpoints import save_checkpoint
from tests.engine.models.adapter.packed_steps import make_sequences
from tests.engine.models.adapter.tiny_models import build_model

torch.set_num_threads(1)  # the models are tiny: more threads only wait for each other


@dataclass
class Inhabitant:
    """A model of transformers, the directory that it was saved to, and what the adapter loads from there."""

    model: PreTrainedModel
    path: str
    decoder: TransformersDecoder

    @cached_property
    def expected_logits(self) -> list[torch.Tensor]:
        """transformers' logits of the sequences of packed_steps.py, [length, vocab_size] each."""
        with torch.inference_mode():
            return [self.model(tokens[None]).logits[0] for tokens in make_sequences()]


Zoo = Callable[[str], Inhabitant]


def settle(architecture: str, path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Inhabitant:
    """Make a tiny model with further options, save it to a directory, and load it from there."""
    model = build_model(architecture, **options)
    saved = save_checkpoint(model, path)
    config = TransformersConfig.from_hf(load_hf_config(saved))
    decoder = load_transformers_decoder(
        saved, config, dtype=dtype, device=torch.device("cpu"), parallel=TensorParallel()
    )
    return Inhabitant(model, saved, decoder)


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """Return a function from an architecture to its model."""

    @cache
    def get(architecture: str) -> Inhabitant:
        return settle(architecture, tmp_path_factory.mktemp(architecture))

    return get


def load(path: str | Path, dtype: torch.dtype = torch.float32) -> TransformersDecoder:
    config = TransformersConfig.from_hf(load_hf_config(path))
    return load_transformers_decoder(path, config, dtype=dtype, device=torch.device("cpu"), parallel=TensorParallel())
