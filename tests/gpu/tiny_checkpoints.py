"""Tiny random checkpoints of each family that a GPU's kernels compute, and of some that transformers' modules do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.engine.checkpoints import EXPERT_FAMILIES, FAMILIES, build_model, save_checkpoint
from tests.engine.models.adapter import tiny_models
from tests.engine.models.decoder.gemma.gemma_families import GEMMA_FAMILIES, save_gemma_model
from tests.engine.models.decoder.latent.latent_families import LATENT_FAMILIES, save_latent_model
from tests.engine.models.decoder.llama4.llama4_models import LLAMA4_MODELS, save_llama4_model
from tests.engine.models.decoder.recurrent.recurrent_families import (
    RECURRENT_FAMILIES,
    build_recurrent_model,
    save_as_published,
)
from tests.gpu_rehearsal.scenarios import VOCAB_SIZE

__all__ = ["ADAPTER", "CHECKPOINTS"]

ADAPTER = ("GptOssForCausalLM", "Gemma2ForCausalLM", "CohereForCausalLM", "StableLmForCausalLM")
SIZES = {"vocab_size": VOCAB_SIZE}


def _save_adapter(architecture: str, path: Path) -> str:
    return save_checkpoint(tiny_models.build_model(architecture, **SIZES, max_position_embeddings=1024), path)


def _save_own(family: str, path: Path) -> str:
    return save_checkpoint(build_model(family, **SIZES), path)


def _save_recurrent(name: str, path: Path) -> str:
    return save_as_published(build_recurrent_model(name, **SIZES), path)


def _save_latent(name: str, path: Path) -> str:
    return save_latent_model(name, path, **SIZES)[1]


def _save_gemma(name: str, path: Path) -> str:
    return save_gemma_model(name, path, **SIZES, vocab_size_per_layer_input=VOCAB_SIZE)[1]


def _save_llama4(name: str, path: Path) -> str:
    return save_llama4_model(name, path, **SIZES)[1]


CHECKPOINTS: dict[str, Callable[[Path], str]] = {
    name: partial(save, name)
    for save, names in (
        (_save_own, (*FAMILIES, *EXPERT_FAMILIES)),
        (_save_recurrent, RECURRENT_FAMILIES),
        (_save_latent, LATENT_FAMILIES),
        (_save_gemma, GEMMA_FAMILIES),
        (_save_llama4, LLAMA4_MODELS),
        (_save_adapter, ADAPTER),
    )
    for name in names
}
"""By the name of a family; each saves a model under a path, and returns its directory."""
