"""Both layouts of a checkpoint give the same model, ranks read their parts of it, and what does not fit is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ConfigError, ModelLoadError
from engine.models.checkpoint.checkpoint import open_checkpoint
from engine.models.checkpoint.weights import read_weights, require_parameters
from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.model_config import ModelConfig
from engine.models.decoder.decoder import Decoder
from engine.models.decoder.experts import SparseMoeBlock
from engine.models.decoder.loader import load_decoder
from engine.models.tensor_parallel import TensorParallel
from kernels.layer_ops.torch import TorchOps
from tests.engine.checkpoints import build_model, save_checkpoint
from tests.engine.conftest import SavedModel

CPU = torch.device("cpu")


class Rank(TensorParallel):
    """A rank whose group is not there: nothing is summed."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def weights_of(path: str, rank: int = 0, size: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    config, parallel = ModelConfig.from_hf(load_hf_config(path)), Rank(rank, size)
    with torch.device("meta"):
        model = Decoder(config, torch.zeros(1), parallel, TorchOps())
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    with open_checkpoint(path) as checkpoint:
        return dict(read_weights(checkpoint, require_parameters(checkpoint, shapes, config, parallel, dtype), CPU))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_both_layouts_hold_the_same_weights(
    sparse_family: SavedModel, rank: int, size: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    stacked = save_checkpoint(sparse_family.model, tmp_path, save_original_format=False)
    names = load_file(tmp_path / "model.safetensors")
    assert any(name.endswith("experts.gate_up_proj") for name in names)
    by_expert, by_layer = (weights_of(path, rank, size, dtype) for path in (sparse_family.path, stacked))
    assert list(by_expert) == list(by_layer)
    for name, weight in by_expert.items():
        assert torch.equal(weight, by_layer[name]), name


def test_two_ranks_parts_make_up_every_expert(sparse_family: SavedModel) -> None:
    whole = weights_of(sparse_family.path)
    ranks = [weights_of(sparse_family.path, rank, 2) for rank in range(2)]
    num_experts = 0
    for name, weight in whole.items():
        if "expert" not in name or name.endswith("expert_gate.weight"):
            continue
        parts = [rank[name] for rank in ranks]
        if "gate_up_proj" in name:
            gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
            assert torch.equal(torch.cat((*gates, *ups)), weight), name
        else:
            assert torch.equal(torch.cat(parts, dim=1), weight), name
        num_experts += 1
    assert num_experts > 4


def test_experts_that_ranks_cannot_share_are_refused() -> None:
    config = ModelConfig.from_hf(build_model("qwen3_moe", moe_intermediate_size=33).config)
    with pytest.raises(ConfigError, match="size=2 does not divide the model's 33 features of .* expert"):
        config.shard(2)
    unused = ModelConfig.from_hf(build_model("qwen3_moe", intermediate_size=33, mlp_only_layers=[]).config)
    assert unused.shard(2).experts is not None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"activation": "gelu_tanh"}, "activation=gelu_tanh; only silu"),
        ({"norms": "around"}, "norms=around; only before"),
        ({"residual_multiplier": 0.5}, r"residual_multiplier=0\.5; only 1\.0"),
    ],
)
def test_what_experts_are_not_computed_with_is_refused(change: dict[str, Any], named: str) -> None:
    config = ModelConfig.from_hf(build_model("qwen3_moe").config)
    with pytest.raises(ModelLoadError, match=f"'Qwen3MoeForCausalLM' has experts and {named} is supported"):
        replace(config, **change)
    dense = replace(config, experts=None)
    assert replace(dense, **change) != dense


def test_a_config_of_experts_with_gelu_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="activation=gelu_tanh"):
        ModelConfig.from_hf(build_model("mixtral", hidden_act="gelu_pytorch_tanh").config)


def test_more_experts_per_token_than_there_are_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(build_model("mixtral"), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_experts_per_tok": 5}))
    with pytest.raises(ModelLoadError, match="num_experts_per_tok=5 is not between 1 and the 4 experts"):
        ModelConfig.from_hf(load_hf_config(path))


@pytest.mark.parametrize("original", [True, False])
def test_a_checkpoint_that_lacks_an_expert_is_refused(tmp_path: Path, original: bool) -> None:
    path = save_checkpoint(build_model("qwen3_moe"), tmp_path, save_original_format=original)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    last = max(name for name in weights if ".layers.2.mlp.experts." in name and "down" in name)
    if original:
        del weights[last]
    else:
        weights[last] = weights[last][:-1].contiguous()
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="lacks the tensor|has shape"):
        weights_of(path)


def test_a_router_of_another_size_is_refused_before_any_expert_is_listed(tmp_path: Path) -> None:
    path = save_checkpoint(build_model("qwen3_moe"), tmp_path)
    config, count = ModelConfig.from_hf(load_hf_config(path)), 10**15
    shapes = {"layers.0.mlp.gate.weight": [count, 96], "layers.0.mlp.experts.down_proj": [count, 96, 40]}
    with (
        open_checkpoint(path) as checkpoint,
        pytest.raises(ModelLoadError, match=r"'model\.layers\.0\.mlp\.gate\.weight' of .* has shape \[8, 96\]"),
    ):
        require_parameters(checkpoint, shapes, config, Rank(0, 1), torch.float32)


def test_the_torch_model_holds_each_expert_where_its_checkpoint_says(
    sparse_family: SavedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.models.decoder.loader.cpu_kernels_can_run", lambda *_: False)
    hf_config = load_hf_config(sparse_family.path)
    options = {"dtype": torch.float32, "device": CPU, "max_model_len": 64, "parallel": TensorParallel()}
    model = load_decoder(sparse_family.path, hf_config, **options)
    theirs = dict(sparse_family.model.named_parameters())
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, SparseMoeBlock)}
    assert len(blocks) == 2
    for name, block in blocks.items():
        for matrix in ("gate_up_proj", "down_proj"):
            assert torch.equal(getattr(block.experts, matrix), theirs[f"model.{name}.experts.{matrix}"])
    with pytest.raises(ConfigError, match=r"quantization='?int8'? is computed only by the C kernels"):
        load_decoder(sparse_family.path, hf_config, quantization="int8", **options)
