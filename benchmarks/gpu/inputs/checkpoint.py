"""Writes Qwen3 and Qwen3-MoE checkpoints with random bfloat16 weights fast: 8B parameters in well under a minute.

Weights are drawn on the device and written from a few threads, one safetensors file a layer, since the time goes into
filling new pages of memory. Speed does not depend on what the weights are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.inputs.weight_formats import BFLOAT16, StoredTensor, WeightFormat
from benchmarks.limits.model_shape import ModelShape

__all__ = ["write_checkpoint"]

THREADS = 8
Tensors = dict[str, StoredTensor]  # by name


def write_checkpoint(
    directory: Path,
    shape: ModelShape,
    device: torch.device,
    *,
    max_model_len: int,
    weight_format: WeightFormat = BFLOAT16,
    std: float = 0.02,
    seed: int = 0,
) -> int:
    """Write config.json and the weights; return the number of bytes. config.json comes last.

    Args:
        weight_format: of the linear layers' weights, without routers and embeddings.
    """
    directory.mkdir(parents=True, exist_ok=True)
    files = dict(_files(shape, weight_format))

    def write(index: int, name: str) -> None:
        _write_file(directory / name, files[name], device, std=std, seed=1000 * seed + index)

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(write, index, name) for index, name in enumerate(files)]:
            done.result()
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = _config(shape, max_model_len) | weight_format.config
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    return sum(_num_bytes(tensor) for tensors in files.values() for tensor in tensors.values())


def _config(shape: ModelShape, max_model_len: int) -> dict[str, Any]:
    experts = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.expert_size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": max_model_len,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_sliding_window": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    } | (experts if shape.num_experts > 1 else {})


def _files(shape: ModelShape, weight_format: WeightFormat) -> Iterator[tuple[str, Tensors]]:
    hidden, inner, width = shape.hidden_size, shape.expert_size, shape.head_dim
    queries, keys = shape.num_heads * width, shape.num_kv_heads * width
    embeddings = StoredTensor("BF16", (shape.vocab_size, hidden), "weight")
    yield "embeddings.safetensors", {"model.embed_tokens.weight": embeddings}
    linears = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
    }
    for expert in [f"experts.{index}." for index in range(shape.num_experts)] if shape.num_experts > 1 else [""]:
        linears |= {f"mlp.{expert}{name}_proj": (inner, hidden) for name in ("gate", "up")}
        linears[f"mlp.{expert}down_proj"] = (hidden, inner)
    for layer in range(shape.num_layers):
        tensors = {
            "input_layernorm.weight": _norm(hidden),
            "post_attention_layernorm.weight": _norm(hidden),
            "self_attn.q_norm.weight": _norm(width),
            "self_attn.k_norm.weight": _norm(width),
        }
        for name, size in linears.items():
            tensors |= {f"{name}.{end}": tensor for end, tensor in weight_format.split(*size).items()}
        if shape.num_experts > 1:
            tensors["mlp.gate.weight"] = StoredTensor("BF16", (shape.num_experts, hidden), "weight")
        yield f"layer-{layer}.safetensors", {f"model.layers.{layer}.{name}": size for name, size in tensors.items()}
    yield "norm.safetensors", {"model.norm.weight": _norm(hidden)}


def _norm(size: int) -> StoredTensor:
    return StoredTensor("BF16", (size,), "norm")


def _num_bytes(tensor: StoredTensor) -> int:
    bits = {"I64": 64, "I32": 32, "F32": 32, "BF16": 16, "F8_E4M3": 8}[tensor.dtype]
    return torch.Size(tensor.shape).numel() * bits // 8


def _write_file(path: Path, tensors: Tensors, device: torch.device, *, std: float, seed: int) -> None:
    """Write one safetensors file: the header's length, the header, and the tensors one after the other."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + _num_bytes(tensor)
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    generator = torch.Generator(device).manual_seed(seed)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            numbers = _numbers(tensor, device, generator, std)
            for part in torch.split(numbers.view(torch.uint8).flatten(), 2**28):
                file.write(part.cpu().numpy().data)


def _numbers(tensor: StoredTensor, device: torch.device, generator: torch.Generator, std: float) -> torch.Tensor:
    """Return N(0, std) of a weight; a norm's factors are 1, and off it by a little, so that they are tested too.

    Codes are uniform, those of FP8 finite. Scales make the weights about as large as plain ones.
    """
    if tensor.kind == "sizes":
        return torch.tensor(tensor.values, dtype=torch.int64)
    if tensor.kind == "codes":
        if tensor.dtype == "F8_E4M3":  # below 2: no code is NaN
            codes = torch.randint(0, 64, tensor.shape, dtype=torch.uint8, device=device, generator=generator)
            return codes | torch.randint_like(codes, 2) << 7
        bounds = (-(2**31), 2**31)
        return torch.randint(*bounds, tensor.shape, dtype=torch.int32, device=device, generator=generator)
    dtype = torch.float32 if tensor.dtype == "F32" else torch.bfloat16
    numbers = torch.empty(tensor.shape, dtype=dtype, device=device)
    if tensor.kind == "scale":
        return numbers.uniform_(0.1 * std, 0.3 * std, generator=generator)
    mean, spread = (1.0, 0.1) if tensor.kind == "norm" else (0.0, std)
    return numbers.normal_(mean, spread, generator=generator)
