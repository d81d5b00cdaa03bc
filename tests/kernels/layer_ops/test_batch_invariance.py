"""Whole models in the Triton kernels: with ``batch_invariant`` a sequence's logits have the same bits in any batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.config.files.hf_config import load_hf_config
from engine.models.decoder import loader
from engine.models.decoder.decoder import Decoder
from engine.models.tensor_parallel import TensorParallel
from tests.engine.checkpoints import build_model, save_checkpoint
from tests.engine.models.adapter.packed_steps import STEPS, make_sequences, packed_logits

MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": {"num_experts": 3, "num_experts_per_tok": 2},
}


@pytest.fixture(params=["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.long)])
def decoder(
    request: pytest.FixtureRequest, kernel_device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Decoder:
    if kernel_device.type != "cpu":
        pytest.skip("the model is computed on a CPU here, by interpreted kernels")
    from kernels.experts.triton.experts import experts_triton
    from kernels.layer_ops.triton.ops import TritonOps
    from kernels.linear.triton import TritonLinears

    path = save_checkpoint(build_model(request.param, **MODELS[request.param], num_hidden_layers=1), tmp_path)
    monkeypatch.setattr("engine.models.decoder.experts.routed_experts", experts_triton)
    monkeypatch.setattr(loader, "cpu_kernels_can_run", lambda *_: False)
    monkeypatch.setattr(loader, "choose_linear_method", lambda _, dtype, *__, **___: TritonLinears(dtype))
    monkeypatch.setattr(loader, "select_layer_ops", lambda device: TritonOps())
    options: dict[str, Any] = {"dtype": torch.float32, "device": kernel_device, "parallel": TensorParallel()}
    model = loader.load_decoder(path, load_hf_config(path), max_model_len=64, batch_invariant=True, **options)
    assert isinstance(model, Decoder)
    return model


@pytest.mark.long
def test_logits_have_the_same_bits_in_any_batch(decoder: Decoder) -> None:
    from kernels.attention.triton.backend import TritonBackend
    from kernels.linear.triton import FixedOrderLinear

    assert isinstance(decoder.lm_head, FixedOrderLinear)
    sequences = make_sequences()
    steps = [sorted(step, key=lambda chunk: chunk[2] - chunk[1] > 1) for step in STEPS]  # decodes first
    together = packed_logits(decoder, sequences, steps=steps, backend=TritonBackend())
    for index, logits in enumerate(together):
        own = [[chunk] for step in steps for chunk in step if chunk[0] == index]
        alone = packed_logits(decoder, sequences, steps=own, backend=TritonBackend())
        assert torch.equal(alone[0], logits)
