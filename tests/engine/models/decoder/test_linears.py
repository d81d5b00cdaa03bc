"""The linear method of our own decoder: what is refused, and layers whose outputs the ranks sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from engine.errors import ConfigError
from engine.models.config.model_config import ModelConfig
from engine.models.decoder.linears import choose_linear_method, replace_linears
from engine.models.decoder.parallel_layers import RowParallelLinear
from engine.models.tensor_parallel import TensorParallel
from kernels.linear.torch import TorchLinears
from kernels.linear.torch_int8 import Int8Linear, TorchInt8Linears
from tests.engine.checkpoints import build_model


class TwoRanks(TensorParallel):
    """One of two ranks; the other's output is all ones."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, 2, object())

    def all_reduce(self, addend: torch.Tensor) -> torch.Tensor:
        return addend + 1


@pytest.mark.parametrize(
    ("device", "num_ranks", "message"),
    [
        ("cpu", 1, "batch_invariant=True needs the C kernels on a CPU"),
        ("cuda", 2, "with tensor_parallel_size=2 on GPUs"),
    ],
)
def test_what_cannot_be_invariant_is_refused(device: str, num_ranks: int, message: str) -> None:
    config = ModelConfig.from_hf(build_model("qwen3").config)
    options: dict[str, Any] = {"batch_invariant": True, "may_pack": False}
    with pytest.raises(ConfigError, match=message):
        choose_linear_method(config, torch.float32, torch.device(device), num_ranks, **options)


def test_every_linear_layer_is_replaced() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Embedding(4, 4)))
    replace_linears(model, TorchInt8Linears(torch.float32))
    assert [type(module) for module in model.modules()][1:] == [Int8Linear, nn.Sequential, Int8Linear, nn.Embedding]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("method", [TorchLinears, TorchInt8Linears])
def test_outputs_are_summed_once_over_the_ranks_and_the_first_adds_the_bias(rank: int, method: Any) -> None:
    linear = RowParallelLinear(4, 4, bias=True, parallel=TwoRanks(rank))
    nn.init.eye_(linear.weight)
    nn.init.constant_(linear.bias, 10.0)
    model = nn.Sequential(linear)
    replace_linears(model, method(torch.float32))
    bias = 10.0 if rank == 0 else 0.0
    torch.testing.assert_close(model(torch.full((1, 4), 127.0)), torch.full((1, 4), 127.0 + bias + 1))
