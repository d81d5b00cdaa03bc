"""Which layers of transformers' modules the C kernels compute."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.config import EngineConfig
from engine.models.adapter.decoder import TransformersDecoder
from engine.models.adapter.linears import pack_linears
from engine.worker.model_worker import ModelWorker
from kernels.attention.cpu_backend import CpuBackend
from kernels.cpu.library import library
from kernels.linear import packed as packed_linears
from kernels.linear.packed import CpuLinear
from tests.engine.models.adapter.conftest import Zoo

needs_kernels = pytest.mark.skipif(library() is None, reason="no C compiler")


class Scaled(nn.Linear):
    """A linear layer that computes something else."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def _layer(dtype: torch.dtype) -> nn.Linear:
    return nn.Linear(70, 37).to(dtype).requires_grad_(False)


@needs_kernels
def test_only_linear_layers_that_the_kernels_compute_are_replaced() -> None:
    model = nn.Sequential(nn.Sequential(_layer(torch.bfloat16)), Scaled(4, 4), _layer(torch.float16))
    pack_linears(model)
    inner = model[0]
    assert isinstance(inner, nn.Sequential)
    packed = inner[0]
    assert isinstance(packed, CpuLinear)
    assert packed.weight.dtype is torch.bfloat16
    assert sum(weight.nbytes for weight in packed.parameters()) >= 37 * 70 * 2
    assert [type(layer) for layer in model] == [nn.Sequential, Scaled, nn.Linear]


def test_all_stay_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linears, "library", lambda: None)
    model = nn.Sequential(_layer(torch.float32))
    pack_linears(model)
    assert type(model[0]) is nn.Linear


@needs_kernels
@pytest.mark.parametrize("has_kernels", [True, False])
def test_the_attention_backend_says_whether_layers_are_packed(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, has_kernels: bool
) -> None:
    monkeypatch.setattr(CpuBackend, "uses_cpu_kernels", has_kernels)
    path = zoo("GraniteForCausalLM").path
    worker = ModelWorker(EngineConfig(model=path, device="cpu", dtype="bfloat16", model_impl="transformers"))
    worker.load("")
    decoder = worker.shard.model
    assert isinstance(decoder, TransformersDecoder)
    assert any(isinstance(layer, CpuLinear) for layer in decoder._model.modules()) == has_kernels
    assert {weight.dtype for weight in decoder._model.parameters() if weight.is_floating_point()} == {torch.bfloat16}
