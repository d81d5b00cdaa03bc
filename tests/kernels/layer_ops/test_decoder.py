"""Whole models whose layers run in the Triton kernels, dense ones and one with latents, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.config.files.hf_config import load_hf_config
from engine.models.decoder import loader
from engine.models.decoder.decoder import Decoder
from engine.models.tensor_parallel import TensorParallel
from tests.engine.models.adapter.packed_steps import make_sequences, packed_logits
from tests.engine.models.decoder.dense_families import save_dense_model
from tests.engine.models.decoder.latent.latent_families import LATENT_FAMILIES, save_latent_model

TOLERANCE = 1e-5  # of the largest logit of a sequence


@pytest.mark.parametrize("name", ["smollm3", "phi3", "glm4", "olmo2", "olmo3", "gemma3", "deepseek-v3"])
def test_logits_equal_those_of_transformers(
    name: str, kernel_device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel_device.type != "cpu":
        pytest.skip("the model is computed on a CPU here, by interpreted kernels")
    from kernels.layer_ops.triton.ops import TritonOps

    model, path = (save_latent_model if name in LATENT_FAMILIES else save_dense_model)(name, tmp_path)
    monkeypatch.setattr(loader, "cpu_kernels_can_run", lambda *_: False)
    monkeypatch.setattr(loader, "select_layer_ops", lambda device: TritonOps())
    options: dict[str, Any] = {"dtype": torch.float32, "device": kernel_device, "parallel": TensorParallel()}
    decoder = loader.load_decoder(path, load_hf_config(path), max_model_len=64, **options)
    assert isinstance(decoder, Decoder)
    backend = None
    if name in LATENT_FAMILIES:  # attention too: its kernels differ
        from kernels.attention.triton.backend import TritonBackend

        backend = TritonBackend()
    logits = packed_logits(decoder, make_sequences(), backend=backend)
    for tokens, computed in zip(make_sequences(), logits, strict=True):
        with torch.inference_mode():
            expected = model(tokens[None]).logits[0]
        assert float((computed - expected).abs().max() / expected.abs().max()) < TOLERANCE
