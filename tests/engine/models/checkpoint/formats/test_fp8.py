"""FP8 checkpoints of all kinds: the values of every weight, bit for bit, and the tokens of the model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelLoadError
from engine.llm import LLM
from engine.models.checkpoint.checkpoint import open_checkpoint
from engine.models.checkpoint.sharding import Shard
from engine.sampling_params import SamplingParams
from tests.engine.conftest import SavedModel
from tests.engine.models.checkpoint.formats.quantised import (
    Encoded,
    Quantised,
    check_tokens,
    check_values,
    save_quantised,
    tiny_model,
)
from tests.engine.worker.test_tensor_parallel import ThreadRanks

E4M3 = torch.float8_e4m3fn


def value_of(code: int) -> float:
    """Return what a byte means in E4M3: sign, 4 bits of exponent, 3 of mantissa; no infinities, and two NaNs."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


VALUES = torch.tensor([value_of(code) for code in range(256)])


def encode(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of a weight, and their values: each element with the scale of its own block."""
    rows, columns = (torch.arange(size) // part for size, part in zip(weight.shape[-2:], block, strict=True))
    own = scales[..., rows[:, None], columns[None]]
    codes = (weight / own).clamp(-448, 448).to(E4M3)
    return codes, VALUES[codes.view(torch.uint8).long()] * own


def block_maxima(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return a scale for each block, the last ones of which may be partial."""
    bands = [torch.stack([part.abs().amax() for part in band.split(block[1], -1)]) for band in weight.split(block[0])]
    return torch.stack(bands).clamp(min=1e-3) / 448


def fp8_block(_: str, weight: torch.Tensor) -> Encoded:
    scales = block_maxima(weight, (128, 128))
    codes, values = encode(weight, scales, (128, 128))
    return Encoded({"weight": codes, "weight_scale_inv": scales}, values)


def fp8_block_of_another_size(_: str, weight: torch.Tensor) -> Encoded:
    scales = block_maxima(weight, (64, 96)).bfloat16()
    codes, values = encode(weight, scales.float(), (64, 96))
    return Encoded({"weight": codes, "weight_scale_inv": scales}, values)


def fp8_mistral(_: str, weight: torch.Tensor) -> Encoded:
    scale = (weight.abs().amax() / 448).bfloat16()
    codes, values = encode(weight, scale.float().view(1, 1), (10**6, 10**6))
    return Encoded({"weight": codes, "weight_scale_inv": scale, "activation_scale": torch.tensor(0.5)}, values)


def fp8_channel(_: str, weight: torch.Tensor) -> Encoded:
    scales = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    codes, values = encode(weight, scales.float(), (1, 10**6))
    return Encoded({"weight": codes, "weight_scale": scales}, values)


def fp8_tensor(_: str, weight: torch.Tensor) -> Encoded:
    scale = (weight.abs().amax() / 448).view(1)
    codes, values = encode(weight, scale.view(1, 1), (10**6, 10**6))
    return Encoded({"weight": codes, "weight_scale": scale, "input_scale": torch.ones(1)}, values)


def fp8_modelopt(name: str, weight: torch.Tensor) -> Encoded:
    scale = weight.abs().amax() / 448
    codes, values = encode(weight, scale.view(1, 1), (10**6, 10**6))
    tensors = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.25)}
    if name.endswith(("k_proj", "v_proj")):
        tensors |= {f"{name[-6]}_scale": torch.tensor(1.5)}
    return Encoded(tensors, values)


def fp8_modelopt_blocks(_: str, weight: torch.Tensor) -> Encoded:
    scales = block_maxima(weight, (128, 128))
    codes, values = encode(weight, scales, (128, 128))
    return Encoded({"weight": codes, "weight_scale": scales[:, None, :, None]}, values)


def exponents(scales: torch.Tensor) -> torch.Tensor:
    return (scales.log2().ceil() + 127).to(torch.uint8)


def fp8_deepseek(_: str, weight: torch.Tensor) -> Encoded:
    stored = exponents(block_maxima(weight, (128, 128)))
    codes, values = encode(weight, 2.0 ** (stored.float() - 127), (128, 128))
    return Encoded({"weight": codes, "scale": stored.view(torch.float8_e8m0fnu)}, values)


def mxfp8(_: str, weight: torch.Tensor) -> Encoded:
    stored = exponents(block_maxima(weight, (1, 32)))
    codes, values = encode(weight, 2.0 ** (stored.float() - 127), (1, 32))
    return Encoded({"weight": codes, "weight_scale": stored}, values)


def mxfp8_as_e8m0(name: str, weight: torch.Tensor) -> Encoded:
    encoded = mxfp8(name, weight)
    scale = encoded.tensors["weight_scale"].view(torch.float8_e8m0fnu)
    return Encoded(encoded.tensors | {"weight_scale": scale}, encoded.values)


def compressed(**weights: Any) -> dict[str, Any]:
    group = {"weights": {"num_bits": 8, "type": "float", "symmetric": True} | weights, "targets": ["Linear"]}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    return {"quantization_config": config | {"ignore": ["lm_head"], "quantization_status": "compressed"}}


def fp8(**fields: Any) -> dict[str, Any]:
    config = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    return {"quantization_config": config | fields}


MODELOPT = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
MODELOPT_IN_CONFIG = {"quantization_config": MODELOPT | {"producer": {"name": "modelopt", "version": "0.31.0"}}}

# Encoder, fields of config.json, further files
Kind = tuple[Callable[[str, torch.Tensor], Encoded], dict[str, Any], dict[str, Any]]
KINDS: dict[str, Kind] = {
    "block": (fp8_block, fp8(modules_to_not_convert=["lm_head"]), {}),
    "block 64x96": (fp8_block_of_another_size, fp8(weight_block_size=[64, 96]), {}),
    "mistral": (fp8_mistral, fp8(weight_block_size=None, activation_scheme="static"), {}),
    "channel": (fp8_channel, compressed(strategy="channel"), {}),
    "tensor": (fp8_tensor, {"compression_config": compressed()["quantization_config"]}, {}),
    "modelopt": (fp8_modelopt, {}, {"hf_quant_config.json": {"quantization": MODELOPT}}),
    "modelopt in config.json": (fp8_modelopt, MODELOPT_IN_CONFIG, {"hf_quant_config.json": {"quantization": MODELOPT}}),
    "modelopt blocks": (fp8_modelopt_blocks, {"quantization_config": MODELOPT | {"quant_algo": "FP8_PB_WO"}}, {}),
    "deepseek": (fp8_deepseek, fp8(scale_fmt="ue8m0"), {}),
    "mxfp8": (mxfp8, compressed(strategy="group", group_size=32), {}),
    "mxfp8 as e8m0": (mxfp8_as_e8m0, compressed(strategy="group", group_size=32), {}),
}


def save(kind: str, path: Path, family: str = "qwen3", **options: Any) -> Quantised:
    encoder, config, files = KINDS[kind]
    return save_quantised(tiny_model(family, **options), path, encoder, config, files=files)


IN_MAKE_TEST = ("block", "mistral", "channel", "modelopt", "modelopt blocks", "mxfp8")


@pytest.mark.parametrize(
    "kind", [kind if kind in IN_MAKE_TEST else pytest.param(kind, marks=pytest.mark.long) for kind in KINDS]
)
def test_every_kind_of_scales_gives_the_values_and_tokens(kind: str, tmp_path: Path) -> None:
    quantised = save(kind, tmp_path)
    check_values(quantised)
    check_tokens(quantised)


@pytest.mark.parametrize("kind", ["block", "modelopt"])
def test_transformers_modules_get_the_same_values(kind: str, tmp_path: Path) -> None:
    check_tokens(save(kind, tmp_path), model_impl="transformers")


@pytest.mark.parametrize("model_impl", ["pagoda", "transformers"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts(family: str, model_impl: str, tmp_path: Path) -> None:
    quantised = save("block", tmp_path, family, num_hidden_layers=2)
    assert any(".experts.3." in name for name in quantised.values)
    check_values(quantised)
    check_tokens(quantised, model_impl=model_impl)


@pytest.mark.parametrize("kind", ["block", "channel", "mxfp8"])
def test_a_part_of_a_weight_is_read_with_its_own_scales(kind: str, tmp_path: Path) -> None:
    quantised = save(kind, tmp_path, num_hidden_layers=1)
    with open_checkpoint(quantised.path) as checkpoint:
        for name, values in quantised.values.items():
            for dim in (0, 1):
                full = values.shape[dim]
                for start, stop in ((0, full // 2), (full // 2, full), (full // 3, full - 1), (3, 3)):
                    part = checkpoint.read(name, Shard(dim, full, start, stop))
                    assert torch.equal(part, values.narrow(dim, start, stop - start)), (name, dim, start)


@pytest.mark.parametrize("model_impl", ["pagoda", "transformers"])
def test_tensor_parallel_ranks_give_the_same_tokens(
    model_impl: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.worker.worker_pool.RemoteRanks", ThreadRanks)
    check_tokens(save("block", tmp_path), tensor_parallel_size=2, model_impl=model_impl)


def test_weights_quantised_again_as_int8(tmp_path: Path) -> None:
    quantised = save("block", tmp_path)
    options: dict[str, Any] = {"skip_tokenizer_init": True, "num_blocks": 16, "use_tqdm_on_load": False}
    tokens = []
    for path in (quantised.path, quantised.path.parent / "plain"):
        llm = LLM(str(path), quantization="int8", dtype="float32", device="cpu", **options)
        (output,) = llm.generate([{"prompt_token_ids": [5, 9, 17]}], SamplingParams(temperature=0.0, max_tokens=5))
        tokens.append(output.outputs[0].token_ids)
        llm.engine.close()
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("model_impl", ["pagoda", "transformers"])
def test_scales_of_a_kv_cache_beside_plain_weights(qwen3: SavedModel, model_impl: str, tmp_path: Path) -> None:
    path = Path(shutil.copytree(qwen3.path, tmp_path / "copy"))
    tensors = load_file(path / "model.safetensors")
    for layer in range(2):
        tensors |= {f"model.layers.{layer}.self_attn.{name}_scale": torch.tensor(0.5) for name in "kvq"}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    check_tokens(Quantised(path, qwen3.model, {}), model_impl=model_impl)


def test_zero_points_of_a_format_without_them_must_be_zero(tmp_path: Path) -> None:
    quantised = save("channel", tmp_path, num_hidden_layers=1)
    file, name = quantised.path / "model.safetensors", "model.layers.0.mlp.up_proj.weight_zero_point"
    tensors = load_file(file) | {name: torch.zeros(200, 1).to(E4M3)}
    save_file(tensors, file, {"format": "pt"})
    check_values(quantised)
    check_tokens(quantised)
    tensors[name][7] = 1.0
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=f"'{name}' of '{file}' is not zero"), open_checkpoint(quantised.path):
        pass


@pytest.mark.parametrize("model_impl", ["pagoda", "transformers"])
def test_the_log_says_what_the_weights_take(model_impl: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quantised = save("block", tmp_path)
    caplog.set_level("INFO")
    check_tokens(quantised, model_impl=model_impl)
    (line,) = [line for line in caplog.messages if "dequantised" in line]
    numel = sum(values.numel() for values in quantised.values.values())
    why = ", because quantization says so" if model_impl == "pagoda" else ""
    start = f"{len(quantised.values)} weights (FP8) are dequantised to float32{why}: 0.00 GB in the files, "
    assert line.startswith(start)
    assert line.endswith(f"{4 * numel / 1e9:.2f} GB in memory")


@pytest.mark.parametrize("model_impl", ["pagoda", "transformers"])
def test_stacked_experts(model_impl: str, tmp_path: Path) -> None:
    """As transformers itself saves them: all experts of a layer in one tensor, and so their scales."""
    options = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "mlp_only_layers": []}
    quantised = save("block", tmp_path, "qwen3_moe", num_hidden_layers=2, **options)
    file = quantised.path / "model.safetensors"
    tensors = load_file(file)
    for layer in range(2):
        block = f"model.layers.{layer}.mlp.experts"
        for matrix, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            for end, new_end in ((".weight", ""), (".weight_scale_inv", "_scale_inv")):
                members = [[tensors.pop(f"{block}.{expert}.{part}{end}") for part in parts] for expert in range(4)]
                octets = [torch.cat([part.view(torch.uint8) for part in member]) for member in members]
                tensors[f"{block}.{matrix}{new_end}"] = torch.stack(octets).view(members[0][0].dtype)
    save_file(tensors, file, {"format": "pt"})
    check_tokens(quantised, model_impl=model_impl)
