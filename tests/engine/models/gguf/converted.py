"""Tiny models of transformers, written as GGUF files as llama.cpp's converter does: names, layouts and metadata.

The names come from the package `gguf`, whose tables the converter uses. The weights are random blocks of every type,
and the model gets the values that they decode to.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.engine.models.gguf import further, gemma4, recurrent
from tests.engine.models.gguf.blocks import random_weight

__all__ = ["ARCHITECTURES", "LLAMA3", "build_model", "write_gguf"]

_SHAPE: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
_GPT_OSS_ROPE = _YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_MINISTRAL = _YARN | {
    "original_max_position_embeddings": 8,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.25,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 512,
    "short_factor": [1.0 + i / 8 for i in range(24)],
    "long_factor": [2.0 + i for i in range(24)],
}
_BY_LAYER_TYPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_SLIDING = {"sliding_window": 9, "num_hidden_layers": 3}

# llama.cpp's architecture, transformers' model_type, and options that make the model what it is
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-biases": ("llama", "llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "mixtral": ("llama", "mixtral", _EXPERTS),
    "ministral3": ("mistral3", "ministral3", {"rope_parameters": _MINISTRAL}),
    "mistral3": ("mistral3", "mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", "qwen2", {"rope_parameters": _YARN}),
    "qwen3": ("qwen3", "qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    "qwen3moe": ("qwen3moe", "qwen3_moe", _EXPERTS | {"norm_topk_prob": True}),
    "qwen2vl": ("qwen2vl", "qwen2", {}),
    "qwen3vl": ("qwen3vl", "qwen3", {"head_dim": 32}),
    "qwen3vlmoe": ("qwen3vlmoe", "qwen3_moe", _EXPERTS | {"norm_topk_prob": True}),
    "gemma": ("gemma", "gemma", {}),
    "gemma2": ("gemma2", "gemma2", _SLIDING | {"query_pre_attn_scalar": 64}),
    "gemma3": (
        "gemma3",
        "gemma3_text",
        _SLIDING | {"query_pre_attn_scalar": 64, "num_hidden_layers": 7, "rope_parameters": _BY_LAYER_TYPE},
    ),
    "phi3": ("phi3", "phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 512}),
    "phi3-window": ("phi3", "phi3", {"sliding_window": 9, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                                            "partial_rotary_factor": 1.0}}),
    "gpt-oss": ("gpt-oss", "gpt_oss", _EXPERTS | _SLIDING | {"rope_parameters": _GPT_OSS_ROPE}),
    **gemma4.ARCHITECTURES,
    **further.ARCHITECTURES,
    **recurrent.ARCHITECTURES,
}  # fmt: skip

_ALL_TYPES = [
    Type.Q4_K, Type.Q6_K, Type.Q8_0, Type.Q5_K, Type.F16, Type.Q4_0, Type.IQ4_XS, Type.Q3_K, Type.BF16, Type.Q5_0,
    Type.IQ4_NL, Type.Q2_K, Type.Q4_1, Type.F32, Type.Q5_1, Type.MXFP4,
]  # fmt: skip
_SPREAD = 0.08


def build_model(name: str, **overrides: Any) -> PreTrainedModel:
    """Return a float32 model of transformers, with norms and biases that matter."""
    _, model_type, options = ARCHITECTURES[name]
    torch.manual_seed(0)
    fields = _SHAPE | options | overrides
    if model_type == "nemotron_h":
        del fields["num_hidden_layers"]  # its layers' types say it
    config = AutoConfig.for_model(model_type, **fields)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    model.config.architectures = [type(model).__name__]
    return model


def write_gguf(model: PreTrainedModel, name: str, path: Path, *, add_tokenizer: Any = None) -> None:
    """Write a model, and give it the values that the file's weights decode to.

    Args:
        model: as ``build_model`` returns it.
        name: of ``ARCHITECTURES``.
        path: of the file.
        add_tokenizer: called with the writer.
    """
    architecture, _, _ = ARCHITECTURES[name]
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    _metadata_of(name)(writer, architecture, config)
    if name.startswith("glm4v"):
        writer.add_rope_dimension_sections([8, 12, 12, 0])
    if add_tokenizer is not None:
        add_tokenizer(writer)
    random, kinds = np.random.default_rng(0), itertools.cycle(_ALL_TYPES)
    names = gguf.get_tensor_name_map(_number_of(architecture), config.num_hidden_layers)
    with torch.no_grad():
        for tensor, shape, views in _all_tensors(model, name):
            stored_name = names.get_name(tensor, try_suffixes=(".weight", ".bias")) or tensor
            # The converter keeps vectors, routers and convolutions in float32.
            is_small = len(shape) == 1 or "router" in tensor or "norm" in tensor or tensor.endswith(".bias")
            is_small = is_small or any(part in stored_name for part in recurrent.FORCED_FLOAT32)
            kind = Type.F32 if is_small else next(k for k in kinds if shape[-1] % gguf.GGML_QUANT_SIZES[k][0] == 0)
            stored, values = random_weight(shape, kind, _SPREAD, random)
            special = recurrent.small_values(stored_name, shape, random)
            if architecture == "gemma4":
                special = gemma4.small_values(shape, random)
            if special is not None:
                stored = values = special
            writer.add_tensor(stored_name, stored, raw_dtype=kind)
            decoded = torch.from_numpy(values.copy())
            if name in recurrent.ARCHITECTURES:
                whole = views[0].shape if len(views) == 1 else decoded.shape
                decoded = recurrent.restored(decoded, tensor, whole, config, architecture)
            else:
                decoded = _undo(decoded, tensor, name, config)
            for view, value in zip(views, decoded if len(views) > 1 else [decoded], strict=True):
                view.copy_(value)
    for stored_name, factors in _factors(architecture, config):
        writer.add_tensor(stored_name, np.array(factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _metadata_of(name: str) -> Any:
    if name in recurrent.ARCHITECTURES:
        return recurrent.add_metadata
    return further.add_metadata if name in further.ARCHITECTURES else _add_metadata


def _all_tensors(model: PreTrainedModel, name: str) -> Iterator[tuple[str, tuple[int, ...], list[torch.Tensor]]]:
    """Yield the converter's tensors: the name that its tables know, their shape, and where the model has the values."""
    if name in recurrent.ARCHITECTURES:
        yield from recurrent.tensors(model, ARCHITECTURES[name][0])
        return
    if name in gemma4.ARCHITECTURES or name in further.ARCHITECTURES:
        yield from (gemma4 if name in gemma4.ARCHITECTURES else further).tensors(model)
        return
    for tensor, views in _tensors(model, ARCHITECTURES[name][0]):
        shape = tuple(views[0].shape)
        yield tensor, (len(views), *shape) if "experts" in tensor else shape, views


def _number_of(architecture: str) -> gguf.MODEL_ARCH:
    return next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)


def _undo(decoded: torch.Tensor, tensor: str, name: str, config: Any) -> torch.Tensor:
    """Return what transformers has where the converter has written ``decoded``."""
    architecture = ARCHITECTURES[name][0]
    if architecture in ("gemma", "gemma2", "gemma3") and tensor.endswith("norm.weight"):
        return decoded - 1
    if name == "glm4v" and (".q_proj." in tensor or ".k_proj." in tensor):
        return further.as_neighbours(decoded, config)
    if architecture in ("llama", "mistral3") and (".q_proj." in tensor or ".k_proj." in tensor):
        heads = config.num_attention_heads if ".q_proj." in tensor else config.num_key_value_heads
        split = decoded.reshape(heads, len(decoded) // heads // 2, 2, *decoded.shape[1:])
        return split.transpose(1, 2).reshape(decoded.shape)
    return decoded


def _tensors(model: PreTrainedModel, architecture: str) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield the converter's tensors: the name that its tables know, and where the model has the values.

    Of experts there is a view for each.
    """
    parameters = dict(model.named_parameters())  # without a tied head
    for name, parameter in parameters.items():
        block, _, matrix = name.partition(".mlp.experts.")
        if not matrix:
            suffix = ".weight" if name.endswith("sinks") else ""
            mixtral = model.config.model_type == "mixtral"
            yield (name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name) + suffix, [parameter.data]
            continue
        kind = "bias" if matrix.endswith("_bias") else "weight"
        for part, views in _expert_views(parameter.data, matrix.removesuffix("_bias"), architecture, kind):
            if model.config.model_type == "mixtral":
                part = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[part]
                yield f"{block.removeprefix('model.')}.feed_forward.experts.{part}.{kind}", views
            else:
                yield f"{block}.mlp.experts.{part}.{kind}", views


def _expert_views(
    stacked: torch.Tensor, matrix: str, architecture: str, kind: str
) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield the converter's stacked matrices of a layer's experts, as rows of outputs."""
    if architecture == "gpt-oss" and kind == "weight":
        stacked = stacked.transpose(1, 2)
    if matrix == "down_proj":
        yield matrix, list(stacked)
    elif architecture == "gpt-oss":
        yield "gate_proj", list(stacked[:, ::2])
        yield "up_proj", list(stacked[:, 1::2])
    else:
        gates, ups = stacked.chunk(2, dim=1)
        yield "gate_proj", list(gates)
        yield "up_proj", list(ups)


def _factors(architecture: str, config: Any) -> Iterator[tuple[str, list[float]]]:
    rope = getattr(config, "rope_parameters", None) or {}
    if architecture == "gemma4":
        yield "rope_freqs.weight", gemma4.rope_factors(config)
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_factors(rope, config.head_dim)
    if rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", rope["long_factor"]
        yield "rope_factors_short.weight", rope["short_factor"]


def _llama3_factors(rope: Mapping[str, Any], dim: int) -> list[float]:
    """Return the factors as the converter computes them."""
    original, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for frequency in 1.0 / (rope["rope_theta"] ** (np.arange(0, dim, 2, dtype=np.float32) / dim)):
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors


def _add_metadata(writer: Any, architecture: str, config: Any) -> None:
    if architecture == "gemma4":
        gemma4.add_metadata(writer, config)
        return
    rope = config.rope_parameters
    full = rope.get("full_attention", rope)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(full["rope_theta"])
    if architecture != "phi3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if full["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(full["rope_type"]))
        writer.add_rope_scaling_factor(full["factor"])
    if architecture.endswith(("vl", "vlmoe")):
        writer.add_rope_dimension_sections([8, 12, 12, 0])
    if architecture.startswith("qwen3vl"):
        writer.add_num_deepstack_layers(3)
    if full["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    if "llama_4_scaling_beta" in full:
        writer.add_rope_scaling_yarn_beta_fast(full["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(full["beta_slow"])
        writer.add_rope_scaling_yarn_log_mul(full["mscale_all_dim"])
        writer.add_attn_temperature_scale(full["llama_4_scaling_beta"])
    if architecture in ("llama", "mistral3"):
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(config.head_dim)
    if architecture == "phi3":
        writer.add_rope_dimension_count(int(config.head_dim * full.get("partial_rotary_factor", 1.0)))
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_sliding_window(config.sliding_window or 0)
    elif architecture in ("gemma2", "gemma3", "gpt-oss"):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    if (experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)) is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if architecture in ("qwen3moe", "qwen3vlmoe"):
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        elif architecture == "gpt-oss":
            writer.add_expert_feed_forward_length(config.intermediate_size)
