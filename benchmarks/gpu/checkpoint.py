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

from benchmarks.limits.model_shape import ModelShape

__all__ = ["write_checkpoint"]

THREADS = 8
Tensors = dict[str, tuple[int, ...]]  # shapes by name


def write_checkpoint(
    directory: Path,
    shape: ModelShape,
    device: torch.device,
    *,
    max_model_len: int,
    std: float = 0.02,
    seed: int = 0,
) -> int:
    """Write config.json and the weights; return the number of parameters. config.json comes last."""
    directory.mkdir(parents=True, exist_ok=True)
    files = dict(_files(shape))

    def write(index: int, name: str) -> None:
        _write_file(directory / name, files[name], device, std=std, seed=1000 * seed + index)

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(write, index, name) for index, name in enumerate(files)]:
            done.result()
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(_config(shape, max_model_len), indent=1))
    return sum(torch.Size(size).numel() for tensors in files.values() for size in tensors.values())


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


def _files(shape: ModelShape) -> Iterator[tuple[str, Tensors]]:
    hidden, inner, width = shape.hidden_size, shape.expert_size, shape.head_dim
    queries, keys = shape.num_heads * width, shape.num_kv_heads * width
    yield "embeddings.safetensors", {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    for layer in range(shape.num_layers):
        tensors: Tensors = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (width,),
            "self_attn.k_norm": (width,),
        }
        experts = [f"experts.{index}." for index in range(shape.num_experts)] if shape.num_experts > 1 else [""]
        for expert in experts:
            tensors |= {f"mlp.{expert}{name}_proj": (inner, hidden) for name in ("gate", "up")}
            tensors[f"mlp.{expert}down_proj"] = (hidden, inner)
        if shape.num_experts > 1:
            tensors["mlp.gate"] = (shape.num_experts, hidden)
        named = {f"model.layers.{layer}.{name}.weight": size for name, size in tensors.items()}
        yield f"layer-{layer}.safetensors", named
    yield "norm.safetensors", {"model.norm.weight": (hidden,)}


def _write_file(path: Path, tensors: Tensors, device: torch.device, *, std: float, seed: int) -> None:
    """Write one safetensors file: the header's length, the header, and the tensors one after the other."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in tensors.items():
        start, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    generator = torch.Generator(device).manual_seed(seed)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, shape in tensors.items():
            for part in torch.split(_random(name, shape, device, generator, std).view(torch.uint8).flatten(), 2**28):
                file.write(part.cpu().numpy().data)


def _random(
    name: str, shape: tuple[int, ...], device: torch.device, generator: torch.Generator, std: float
) -> torch.Tensor:
    """Return N(0, std) in bfloat16; a norm's factors are 1, and off it by a little, so that they are tested too."""
    mean, spread = (1.0, 0.1) if "norm" in name else (0.0, std)
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(mean, spread, generator=generator)
