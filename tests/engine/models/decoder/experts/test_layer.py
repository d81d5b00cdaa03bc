"""SparseMoeBlock: two ranks' shares make up the whole, with one sum over the ranks."""

from __future__ import annotations

import pytest
import torch

from engine.models.config.model_config import ModelConfig
from engine.models.decoder.experts import SparseMoeBlock
from engine.models.decoder.feed_forward import feed_forward
from engine.models.tensor_parallel import TensorParallel
from kernels.layer_ops.torch import TorchOps
from tests.engine.checkpoints import build_model


class Addends(TensorParallel):
    """A rank of two that keeps what it would sum over the ranks."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = rank, 2
        self.addends: list[torch.Tensor] = []

    def all_reduce(self, addend: torch.Tensor) -> torch.Tensor:
        self.addends.append(addend)
        return addend


def block_of(config: ModelConfig, parallel: TensorParallel) -> SparseMoeBlock:
    block = feed_forward(config.shard(parallel.size), 1, parallel, TorchOps())
    assert isinstance(block, SparseMoeBlock)
    return block


def part(weight: torch.Tensor, name: str, rank: int) -> torch.Tensor:
    """Return a rank's half of a weight: of the outputs of gate and up, each, or of the inputs of down."""
    if "gate_up_proj" in name:
        gate, up = weight.chunk(2, dim=-2)
        return torch.cat((gate.chunk(2, dim=-2)[rank], up.chunk(2, dim=-2)[rank]), dim=-2)
    return weight.chunk(2, dim=-1)[rank] if "down_proj" in name else weight


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
@torch.inference_mode()
def test_a_rank_sums_once(family: str) -> None:
    config = ModelConfig.from_hf(build_model(family, mlp_only_layers=[]).config)
    torch.manual_seed(0)
    whole = block_of(config, TensorParallel())
    for parameter in whole.parameters():
        parameter.normal_(0.0, 0.2)
    hidden = torch.randn(5, config.hidden_size)
    addends = []
    for rank in range(2):
        parallel = Addends(rank)
        block = block_of(config, parallel)
        for name, parameter in block.named_parameters():
            parameter.copy_(part(whole.get_parameter(name), name, rank))
        block(hidden)
        (addend,) = parallel.addends
        addends.append(addend)
    torch.testing.assert_close(addends[0] + addends[1], whole(hidden), rtol=1e-4, atol=1e-5)
