"""Experts that ModelOpt stacks in one tensor for each layer, in NVFP4, MXFP4 or FP8, with one, some or all scales."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from engine.errors import ModelLoadError
from engine.models.checkpoint.checkpoint import open_checkpoint
from engine.models.checkpoint.sharding import Shard
from tests.engine.models.adapter import tiny_models
from tests.engine.models.checkpoint.formats.quantised import FILE, Quantised, Tensors, check_tokens
from tests.engine.models.checkpoint.formats.test_fp4 import VALUES as FP4
from tests.engine.models.checkpoint.formats.test_fp4 import mxfp4, nearest_codes
from tests.engine.models.checkpoint.formats.test_fp8 import VALUES as FP8
from tests.engine.models.checkpoint.formats.test_fp8 import encode
from tests.engine.models.checkpoint.formats.test_layouts import Stored, rewrite, write
from tests.engine.models.decoder.gemma.gemma_families import build_gemma_model
from tests.engine.models.decoder.llama4.llama4_models import build_llama4_model
from tests.engine.worker.test_tensor_parallel import ThreadRanks

Store = Callable[[str, torch.Tensor], Stored]
MODELOPT = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}}
STACKS = (".experts.gate_up_proj", ".experts.down_proj")


def stacks(pack: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]], *, inputs_first: bool) -> Store:
    """Return a function that stores experts by ``pack``, which gets and returns [experts, outputs, inputs]."""

    def store(name: str, tensor: torch.Tensor) -> Stored:
        if not name.endswith(STACKS):
            return None
        tensors, values = pack(tensor.mT if inputs_first else tensor)
        turned = {end: part.mT if inputs_first and part.dim() == 3 else part for end, part in tensors.items()}
        named = {f"{name}{end}": part for end, part in turned.items()}
        return named | {f"{name}_input_scale": torch.tensor(0.5)}, values.mT if inputs_first else values

    return store


def pairs(codes: torch.Tensor) -> torch.Tensor:
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)


def nvfp4(factors: str) -> Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]:
    """Return a function that encodes stacks, with a second scale for ``all``, ``each``, or each ``half`` of one."""

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        maxima = weight.unflatten(2, (-1, 16)).abs().amax(3)
        if factors == "all":
            stored = maxima.amax() / 6 / 448
            factor = stored.view(1, 1, 1)
        elif factors == "each" or weight.shape[1] != 2 * 64:
            stored = maxima.amax((1, 2)) / 6 / 448
            factor = stored[:, None, None]
        else:
            stored = maxima.unflatten(1, (2, -1)).amax((2, 3)) / 6 / 448
            factor = stored.repeat_interleave(64, 1)[:, :, None]
        scales = (maxima / 6 / factor).to(torch.float8_e4m3fn)
        own = (FP8[scales.view(torch.uint8).long()] * factor).repeat_interleave(16, 2)
        codes = nearest_codes(weight / own.clamp(min=1e-9))
        return {"": pairs(codes), "_weight_scale": scales, "_weight_scale_2": stored}, FP4[codes] * own

    return pack


def mx(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    encoded = [mxfp4(expert) for expert in weight]
    codes, scales = (torch.stack([one.tensors[end] for one in encoded]) for end in ("weight_packed", "weight_scale"))
    return {"": codes, "_weight_scale": scales}, torch.stack([one.values for one in encoded])


def fp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Encode stacks with one scale for all experts, as ModelOpt's Llama 4 has."""
    scale = weight.abs().amax() / 448
    codes, values = encode(weight, scale.view(1, 1, 1), (10**6, 10**6))
    return {"": codes, "_weight_scale": scale}, values


def llama4() -> PreTrainedModel:
    return build_llama4_model("llama-4-scout", intermediate_size=64)


def gpt_oss() -> PreTrainedModel:
    return tiny_models.build_model("GptOssForCausalLM", hidden_size=64, intermediate_size=64)


def gemma4() -> PreTrainedModel:
    return build_gemma_model("gemma-4-26b-a4b", moe_intermediate_size=64)


# The model, how its experts are encoded, and whether they are stored as [experts, inputs, outputs]
CASES = {
    "Llama-4-Scout-17B-16E-Instruct-FP4": (llama4, nvfp4("all"), True),
    "Llama-4-Scout-17B-16E-Instruct-FP8": (llama4, fp8, True),
    "gpt-oss-120b-nvfp4": (gpt_oss, nvfp4("all"), True),
    "Gemma 4, a scale for each expert": (gemma4, nvfp4("each"), False),
    "Gemma 4, a scale for gates and one for ups": (gemma4, nvfp4("half"), False),
    "GPT-OSS in MXFP4 without blocks": (gpt_oss, mx, True),
    "Gemma 4 in MXFP4": (gemma4, mx, False),
}


def save(name: str, path: Path) -> Quantised:
    build, pack, inputs_first = CASES[name]
    return rewrite(build(), path, stacks(pack, inputs_first=inputs_first), MODELOPT)


def check_stacks(name: str, quantised: Quantised) -> None:
    """Assert that the stacks, and parts of them, are read as the very values."""
    plain = load_file(quantised.path.parent / "plain" / FILE)
    with open_checkpoint(quantised.path) as checkpoint:
        stacked = [weight for weight in checkpoint.names if weight.endswith(STACKS)]
        assert stacked
        for weight in stacked:
            expected = plain[weight].mT if name.startswith("Llama") else plain[weight]
            assert torch.equal(checkpoint.read(weight), expected), weight
            (count, rows, columns) = expected.shape
            for shard in (Shard(0, rows, 3, rows - 5, count, 1), Shard(1, columns, 7, columns, count, 2)):
                own = expected[shard.index].narrow(shard.dim, shard.start, shard.stop - shard.start)
                assert torch.equal(checkpoint.read(weight, shard), own), weight


@pytest.mark.parametrize("name", CASES)
def test_values_and_tokens(name: str, tmp_path: Path) -> None:
    quantised = save(name, tmp_path)
    check_stacks(name, quantised)
    check_tokens(quantised)


@pytest.mark.parametrize("name", ["gpt-oss-120b-nvfp4", "Gemma 4, a scale for gates and one for ups"])
def test_ranks_give_the_same_tokens(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.worker.worker_pool.RemoteRanks", ThreadRanks)
    check_tokens(save(name, tmp_path), tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("end", "tensor", "message"),
    [
        ("_weight_scale_2", torch.ones(7), r"is F32 \[7\], and not one number for each matrix"),
        ("_weight_scale", torch.ones(6, 64, 5).to(torch.float8_e4m3fn), r"is \[6, 64, 5\], which does not fit codes"),
    ],
)
def test_what_does_not_fit_is_named(end: str, tensor: torch.Tensor, message: str, tmp_path: Path) -> None:
    path = save("Gemma 4, a scale for each expert", tmp_path).path
    name = f"model.layers.0.experts.down_proj{end}"
    write(path, load_file(path / FILE) | {name: tensor})
    with pytest.raises(ModelLoadError, match=f"'{name}' of '{path / FILE}' {message}"), open_checkpoint(path):
        pass
