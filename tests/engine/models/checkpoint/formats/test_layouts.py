"""Layouts of other programs: MLX's and Unsloth's stacks and lists of experts, and MLX's other changes to weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.errors import ModelLoadError
from engine.models.checkpoint.checkpoint import open_checkpoint
from tests.engine.checkpoints import save_checkpoint
from tests.engine.models.adapter import tiny_models
from tests.engine.models.checkpoint.formats.quantised import FILE, Encoded, Quantised, Tensors, check_tokens, tiny_model
from tests.engine.models.checkpoint.formats.test_bitsandbytes import four_bits
from tests.engine.models.checkpoint.formats.test_fp4 import mxfp4
from tests.engine.models.checkpoint.formats.test_fp8 import compressed, fp8_channel
from tests.engine.models.checkpoint.formats.test_mlx import as_words
from tests.engine.models.checkpoint.formats.test_mlx import encode as affine
from tests.engine.models.decoder.latent.latent_families import build_latent_model
from tests.engine.models.decoder.recurrent.recurrent_families import build_recurrent_model
from tests.engine.models.decoder.recurrent.test_formats import parameters

# What another program stores for a tensor, and what that means; None: the tensor itself.
Stored: TypeAlias = tuple[Tensors, torch.Tensor] | None
RANKS = ((0, 1), (0, 2), (1, 2))


def rewrite(
    model: PreTrainedModel, path: Path, store: Callable[[str, torch.Tensor], Stored], config: dict[str, Any]
) -> Quantised:
    """Write a checkpoint in another layout, and one with the values that this has."""
    plain, other = path / "plain", path / "quantised"
    save_checkpoint(model, plain)
    tensors: Tensors = {}
    values: Tensors = {}
    for name, tensor in load_file(plain / FILE).items():
        stored, values[name] = store(name, tensor) or ({name: tensor}, tensor)
        tensors |= stored
    other.mkdir()
    for folder, content, extra in ((plain, values, {}), (other, tensors, config)):
        write(folder, content)
        fields = json.loads((plain / "config.json").read_text()) | extra
        (folder / "config.json").write_text(json.dumps(fields))
    return Quantised(other, AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval(), {})


def write(folder: Path, tensors: Tensors) -> None:
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / FILE)


def named(prefix: str, encoded: Encoded) -> Tensors:
    return {f"{prefix}.{end}": tensor for end, tensor in encoded.tensors.items()}


def stacked(members: list[Tensors]) -> Tensors:
    """Return the tensors of several weights as one of each kind."""
    kinds = {end: [member[end] for member in members] for end in members[0]}
    return {
        end: torch.stack([tensor.view(torch.uint8) for tensor in kind]).view(kind[0].dtype)
        for end, kind in kinds.items()
    }


# --- GPT-OSS --------------------------------------------------------------------------------------------------------


def in_mlx(name: str, tensor: torch.Tensor) -> Stored:
    """Store gates and ups apart, and experts in rows of outputs, as MXFP4."""
    block, _, matrix = name.rpartition(".")
    if ".experts" not in block:
        return None
    parts = {"gate_proj": 0, "up_proj": 1} if "gate_up" in matrix else {"down_proj": 0}
    if matrix.endswith("_bias"):
        return {f"{block}.{part}.bias": tensor[:, first :: len(parts)] for part, first in parts.items()}, tensor
    rows, values, coded = tensor.transpose(1, 2), torch.empty_like(tensor), {}
    for part, first in parts.items():
        encoded = [as_words(mxfp4(expert), "weight_packed") for expert in rows[:, first :: len(parts)].contiguous()]
        coded |= {f"{block}.{part}.{end}": both for end, both in stacked([each.tensors for each in encoded]).items()}
        values[:, :, first :: len(parts)] = torch.stack([each.values for each in encoded]).transpose(1, 2)
    return coded, values


def in_lists(encode: Callable[[torch.Tensor], Encoded]) -> Callable[[str, torch.Tensor], Stored]:
    """Store each expert in a module of a list, as Unsloth does."""

    def store(name: str, tensor: torch.Tensor) -> Stored:
        block, _, matrix = name.rpartition(".")
        if block.endswith("router"):
            return {f"{block}.linear.{matrix}": tensor}, tensor
        if ".experts" not in block:
            return None
        module = f"{block}.{matrix.removesuffix('_bias')}s"
        if matrix.endswith("_bias"):
            return {f"{module}.{expert}.bias": bias for expert, bias in enumerate(tensor)}, tensor
        rows = tensor.transpose(1, 2).contiguous()
        encoded = [Encoded({"weight": rows[0]}, rows[0]), *map(encode, rows[1:])]  # the first is left as it is
        coded = [named(f"{module}.{expert}", each) for expert, each in enumerate(encoded)]
        return merged(coded), torch.stack([each.values for each in encoded]).transpose(1, 2)

    return store


def by_number(name: str, tensor: torch.Tensor) -> Stored:
    """Store each expert's matrices by themselves, as llm-compressor does."""
    block, _, matrix = name.rpartition(".")
    if ".experts" not in block:
        return None
    parts = {"gate_proj": 0, "up_proj": 1} if "gate_up" in matrix else {"down_proj": 0}
    coded, values = {}, tensor.clone()
    for expert in range(len(tensor)):
        for part, first in parts.items():
            prefix = f"{block}.{expert}.{part}"
            if matrix.endswith("_bias"):
                coded[f"{prefix}.bias"] = tensor[expert, first :: len(parts)]
            else:
                encoded = fp8_channel("", tensor[expert].T[first :: len(parts)].contiguous())
                coded |= named(prefix, encoded)
                values[expert, :, first :: len(parts)] = encoded.values.T
    return coded, values


def merged(parts: list[Tensors]) -> Tensors:
    return {name: tensor for part in parts for name, tensor in part.items()}


GPT_OSS: dict[str, tuple[Callable[[str, torch.Tensor], Stored], dict[str, Any]]] = {
    "mlx": (in_mlx, {"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}),
    "unsloth": (
        in_lists(lambda weight: four_bits(weight, "nf4", is_nested=True)),
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    ),
    "llm-compressor": (by_number, compressed(strategy="channel")),
}


@pytest.mark.parametrize("layout", GPT_OSS)
def test_experts_of_gpt_oss(layout: str, tmp_path: Path) -> None:
    store, config = GPT_OSS[layout]
    model = tiny_models.build_model("GptOssForCausalLM", hidden_size=64, intermediate_size=96, head_dim=16)
    check_tokens(rewrite(model, tmp_path, store, config))


def test_an_expert_of_gpt_oss_that_is_missing_is_named(tmp_path: Path) -> None:
    model = tiny_models.build_model("GptOssForCausalLM")
    quantised = rewrite(model, tmp_path, by_number, compressed(strategy="channel"))
    tensors = load_file(quantised.path / FILE)
    write(quantised.path, {name: tensor for name, tensor in tensors.items() if ".experts.2.up_proj." not in name})
    with pytest.raises(ModelLoadError, match=r"mlp\.experts\.gate_up_proj' is missing"):
        check_tokens(quantised)


# --- bitsandbytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_impl", ["pagoda", "transformers"])
def test_experts_that_bitsandbytes_has_quantised_together(model_impl: str, tmp_path: Path) -> None:
    """Blocks of 64 go on from one expert to the next, and those of 256 scales do, too."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 44, "mlp_only_layers": []}
    model = tiny_model("qwen3_moe", num_hidden_layers=2, hidden_size=72, num_attention_heads=4, head_dim=16, **sizes)
    plain = rewrite(model, tmp_path, lambda name, tensor: None, {})
    tensors, values = load_file(plain.path / FILE), {}
    for layer in range(2):
        block = f"model.layers.{layer}.mlp.experts"
        for matrix, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            names = [[f"{block}.{expert}.{part}.weight" for part in parts] for expert in range(4)]
            whole = torch.stack([torch.cat([tensors.pop(name) for name in each]) for each in names])
            encoded = four_bits(whole, "nf4", is_nested=True)
            tensors |= {f"{block}.{end.replace('weight', matrix, 1)}": part for end, part in encoded.tensors.items()}
            for each, value in zip(names, encoded.values, strict=True):
                values |= dict(zip(each, value.chunk(len(parts)), strict=True))
    write(plain.path, tensors)
    config = json.loads((plain.path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes"}
    (plain.path / "config.json").write_text(json.dumps(config))
    write(tmp_path / "plain", load_file(tmp_path / "plain" / FILE) | values)
    dequantised = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    check_tokens(Quantised(plain.path, dequantised, {}), model_impl=model_impl)


# --- MLX ------------------------------------------------------------------------------------------------------------


def of_gated_delta(name: str, tensor: torch.Tensor) -> Stored:
    if name.endswith("conv1d.weight"):
        return {name: tensor.transpose(1, 2)}, tensor
    ends = ("input_layernorm.weight", "post_attention_layernorm.weight", "q_norm.weight", "k_norm.weight")
    if name.endswith(ends) or name == "model.norm.weight":
        return {name: tensor + 1.0}, tensor + 1.0 - 1.0
    return None


def of_granite(name: str, tensor: torch.Tensor) -> Stored:
    if name.endswith("conv1d.weight"):
        return {name: tensor.transpose(1, 2)}, tensor
    if "block_sparse_moe.input_linear" in name:
        return two(name.replace("input_linear", "switch_mlp.{}"), tensor, 1), tensor
    if "block_sparse_moe.output_linear" in name:
        return {name.replace("output_linear", "switch_mlp.down_proj"): tensor}, tensor
    return None


def of_dense_granite(name: str, tensor: torch.Tensor) -> Stored:
    if "shared_mlp.input_linear" in name:
        return two(name.replace("shared_mlp.input_linear", "mlp.{}"), tensor, 0), tensor
    if "shared_mlp.output_linear" in name:
        return {name.replace("shared_mlp.output_linear", "mlp.down_proj"): tensor}, tensor
    return of_granite(name, tensor)


def two(name: str, tensor: torch.Tensor, dim: int) -> Tensors:
    """Return gates and ups by themselves."""
    return dict(zip(map(name.format, ("gate_proj", "up_proj")), tensor.chunk(2, dim), strict=True))


def of_latents(name: str, tensor: torch.Tensor) -> Stored:
    """Store the keys' and the values' rows of each head apart, the keys' transposed, with 8 bits."""
    if "kv_b_proj" not in name:
        return None
    heads = tensor.view(4, -1, tensor.shape[1])
    nope = heads.shape[1] - 32
    coded: Tensors = {}
    values = []
    for module, half in (("embed_q", heads[:, :nope].transpose(1, 2)), ("unembed_out", heads[:, nope:])):
        encoded = [affine(head.contiguous(), 8, 32) for head in half]
        both = stacked([each.tensors for each in encoded])
        coded |= {name.replace("kv_b_proj.weight", f"{module}.{end}"): part for end, part in both.items()}
        values.append(torch.stack([each.values for each in encoded]))
    joined = torch.cat([values[0].transpose(1, 2), values[1]], 1).flatten(0, 1)
    return coded, joined


def of_numbered(renamed: dict[str, str]) -> Callable[[str, torch.Tensor], Stored]:
    """Stack experts, whose matrices have other names; the stack of a layer is complete with its last expert."""
    seen: dict[str, list[torch.Tensor]] = {}

    def store(name: str, tensor: torch.Tensor) -> Stored:
        block, separator, rest = name.partition(".experts.")
        if not separator:
            return ({name: tensor.transpose(1, 2)}, tensor) if name.endswith(("conv.weight", "conv1d.weight")) else None
        matrix = rest.split(".")[1]
        stack = seen.setdefault(f"{block}.switch_mlp.{renamed[matrix]}.weight", [])
        stack.append(tensor)
        return {f"{block}.switch_mlp.{renamed[matrix]}.weight": torch.stack(stack)}, tensor

    return store


LETTERS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
MLX: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[str, torch.Tensor], Stored]]] = {
    "qwen3-next": (lambda: build_recurrent_model("qwen3-next"), of_gated_delta),
    "qwen3.5": (lambda: build_recurrent_model("qwen3.5"), of_gated_delta),
    "lfm2": (lambda: build_recurrent_model("lfm2"), of_numbered({})),
    "lfm2-moe": (lambda: build_recurrent_model("lfm2-moe"), of_numbered(LETTERS)),
    "granite-4-h-moe": (lambda: build_recurrent_model("granite-4-h-moe", mamba_n_groups=2), of_granite),
    "granite-4": (lambda: build_recurrent_model("granite-4"), of_dense_granite),
    "nemotron-3-nano": (
        lambda: build_recurrent_model("nemotron-3-nano"),
        of_numbered({"up_proj": "fc1", "down_proj": "fc2"}),
    ),
    "deepseek-v3": (
        lambda: build_latent_model("deepseek-v3", kv_lora_rank=32, v_head_dim=32, qk_nope_head_dim=32),
        of_latents,
    ),
}


@pytest.mark.parametrize("name", MLX)
def test_parameters_are_those_of_the_original_layout(name: str, tmp_path: Path) -> None:
    build, store = MLX[name]
    other = rewrite(build(), tmp_path, store, {"quantization": {"group_size": 32, "bits": 8}})
    stored, plain = load_file(other.path / FILE), load_file(tmp_path / "plain" / FILE)
    assert stored.keys() != plain.keys() or any(tensor.shape != plain[name].shape for name, tensor in stored.items())
    for rank, size in RANKS:
        expected, computed = parameters(tmp_path / "plain", rank, size), parameters(other.path, rank, size)
        assert computed.keys() == expected.keys()
        for weight, value in expected.items():
            assert torch.equal(computed[weight], value), weight


def test_factors_of_falcon_h1_in_the_weights_are_refused(tmp_path: Path) -> None:
    other = rewrite(build_recurrent_model("falcon-h1"), tmp_path, of_numbered({}), {})
    with pytest.raises(ModelLoadError, match="factors of Falcon-H1 are in the weights"), open_checkpoint(other.path):
        pass
