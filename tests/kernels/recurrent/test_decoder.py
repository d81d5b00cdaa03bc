"""Whole models whose recurrent layers run in the Triton kernels, against the same models on the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.config.files.hf_config import load_hf_config
from engine.models.decoder import loader
from engine.models.decoder.decoder import Decoder
from engine.models.tensor_parallel import TensorParallel
from kernels.recurrent.base import RecurrentOps
from kernels.recurrent.reference import ReferenceOps
from tests.engine.models.adapter.packed_steps import Chunk, packed_logits
from tests.engine.models.decoder.recurrent.recurrent_families import save_recurrent_model

STEPS: list[list[Chunk]] = [[(0, 0, 5)], [(1, 0, 1), (0, 5, 7)], [(0, 7, 8), (1, 1, 3)]]


def load(path: str, ops: RecurrentOps, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    monkeypatch.setattr(loader, "cpu_kernels_can_run", lambda *_: False)
    monkeypatch.setattr(loader, "select_recurrent_ops", lambda *_, **__: ops)
    options: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "parallel": TensorParallel()}
    model = loader.load_decoder(path, load_hf_config(path), max_model_len=64, **options)
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize(
    "family", ["lfm2-biases", "qwen3-next", pytest.param("kimi-linear", marks=pytest.mark.long), "falcon-h1-norm"]
)
def test_models_compute_the_same_with_the_triton_kernels(
    family: str, kernel_device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel_device.type != "cpu":
        pytest.skip("the model is computed on a CPU here, by interpreted kernels")
    from kernels.recurrent.triton.ops import TritonOps

    _, path = save_recurrent_model(family, tmp_path)
    sequences = [torch.arange(3, 11), torch.arange(40, 43)]
    expected = packed_logits(load(path, ReferenceOps(), monkeypatch), sequences, steps=STEPS)
    computed = packed_logits(load(path, TritonOps(), monkeypatch), sequences, steps=STEPS)
    for actual, logits in zip(computed, expected, strict=True):
        torch.testing.assert_close(actual, logits, atol=1e-4, rtol=1e-4)
