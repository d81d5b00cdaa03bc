"""require_plausible: refuses a config.json whose values no model has, before anything computes or allocates with them.

Transformers checks the types of most fields, and the headers of the weights check sizes. With a billion layers neither
check is reached, and neither stops a NaN that makes every logit NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine.errors import ModelLoadError, UnsupportedModelError, shown
from engine.models.gguf.file import is_gguf

__all__ = [
    "read_count",
    "require_conv_width",
    "require_divisor",
    "require_integer",
    "require_number",
    "require_plausible",
    "require_silu",
]

_LARGEST = {  # several times those of the largest models
    "num_hidden_layers": 512,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 8192,
    "global_head_dim": 8192,
    "num_global_key_value_heads": 4096,
    "num_kv_shared_layers": 512,
    "hidden_size_per_layer_input": 2**16,
    "vocab_size_per_layer_input": 2**24,
    "top_k_experts": 4096,
    "altup_num_inputs": 16,  # as the C kernels have it
    "laurel_rank": 2**18,
    "hidden_size": 2**18,
    "intermediate_size": 2**20,
    "intermediate_size_mlp": 2**20,
    "vocab_size": 2**24,
    "max_position_embeddings": 2**30,
    "model_max_length": 2**30,
    "num_labels": 2**24,
    "num_experts": 4096,
    "num_local_experts": 4096,
    "n_routed_experts": 4096,
    "moe_num_experts": 4096,
    "num_experts_per_tok": 4096,
    "moe_topk": 4096,
    "moe_intermediate_size": 2**20,
    "shared_expert_intermediate_size": 2**20,
    "decoder_sparse_step": 2**20,
    "interleave_moe_layer_step": 2**20,
    "attention_chunk_size": 2**30,
    "floor_scale": 2**30,
    "n_group": 4096,
    "n_shared_experts": 4096,
    "num_shared_experts": 4096,
    "num_experts_per_token": 4096,
    "num_expert_group": 4096,
    "first_k_dense_replace": 512,
    "num_nextn_predict_layers": 512,
    "topk_group": 4096,
    "num_dense_layers": 512,
    "shared_intermediate_size": 2**20,
    "moe_shared_expert_intermediate_size": 2**20,
    "moe_latent_size": 2**18,
    # Of latent attention.
    "q_lora_rank": 2**18,
    "kv_lora_rank": 2**18,
    "qk_nope_head_dim": 8192,
    "qk_rope_head_dim": 8192,
    "v_head_dim": 8192,
    "index_n_heads": 4096,
    "index_head_dim": 8192,
    "index_topk": 2**30,
    # Of recurrent layers.
    "linear_num_value_heads": 4096,
    "linear_num_key_heads": 4096,
    "linear_value_head_dim": 8192,
    "linear_key_head_dim": 8192,
    "linear_conv_kernel_dim": 256,
    "linear_num_heads": 4096,
    "linear_head_dim": 8192,
    "mamba_n_heads": 4096,
    "mamba_n_groups": 4096,
    "mamba_d_state": 8192,
    "mamba_d_conv": 256,
    "mamba_num_heads": 4096,
    "mamba_head_dim": 8192,
    "num_heads": 4096,
    "n_groups": 4096,
    "ssm_state_size": 8192,
    "state_size": 8192,
    "conv_kernel": 256,
    "conv_L_cache": 256,
    # The names of the same fields in GPT-2, DBRX and similar models.
    "n_layer": 512,
    "n_layers": 512,
    "n_head": 4096,
    "n_heads": 4096,
    "n_embd": 2**18,
    "d_model": 2**18,
    "n_inner": 2**20,
    "ffn_dim": 2**20,
    "n_positions": 2**30,
    "max_seq_len": 2**30,
}
_MAY_BE_ZERO = {  # then there are none
    "first_k_dense_replace",
    "hidden_size_per_layer_input",
    "interleave_moe_layer_step",
    "n_shared_experts",
    "num_nextn_predict_layers",
    "num_dense_layers",
    "num_experts",
    "num_kv_shared_layers",
    "num_local_experts",
    "num_shared_experts",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
}
_FACTORS = (  # of embeddings, scores, logits and the residual stream
    "attention_in_multiplier",
    "attention_multiplier",
    "attention_out_multiplier",
    "attn_logit_softcapping",
    "dim_model_base",
    "embedding_multiplier",
    "final_logit_softcapping",
    "key_multiplier",
    "lm_head_multiplier",
    "logit_scale",
    "logits_scaling",
    "query_pre_attn_scalar",
    "residual_multiplier",
    "scale_depth",
    "scale_emb",
    "routed_scaling_factor",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
)
_SMALLEST_FACTOR, _LARGEST_FACTOR = 1e-6, 1e6
_FLAGS = ("attention_bias", "mlp_bias", "tie_word_embeddings")
_DTYPES = ("bfloat16", "float16", "float32", "float64", "half", "float", "double")  # names of torch
_ROPE = ("rope_parameters", "rope_scaling")
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
_LARGEST_NUMBER = 1e30
_MOST_TAPS = 16  # of a convolution: MAX_WIDTH in kernels/cpu/csrc/recurrent/causal_conv.c
_POSITIVE = ("rope_theta", "factor")


def require_plausible(raw: dict[str, Any], path: object) -> None:
    """Check the fields of a config.json, and of the ``text_config`` in it.

    Raises:
        ModelLoadError: with the field, its value, and what it should be.
    """
    text = raw.get("text_config")
    for fields in (raw, text if isinstance(text, dict) else {}):
        for name, value, expected in _problems(fields):
            where = "metadata" if is_gguf(str(path)) else "config.json"
            raise ModelLoadError(
                f"{where} of '{path}' could not be read: {name}={shown(value)} is not {expected}; correct it, or "
                "download it again"
            )


def require_integer(config: Any, name: str, smallest: int = 1, largest: int | None = None) -> int:
    """Return a field of a transformers config that the decoder computes with.

    Raises:
        ModelLoadError: if it is absent, null, or not an integer from ``smallest`` to ``largest``.
    """
    value, end = getattr(config, name, None), "" if largest is None else f" to {largest}"
    if type(value) is not int or value < smallest or (largest is not None and value > largest):
        raise ModelLoadError(f"{name}={shown(value)} is not an integer from {smallest}{end}; correct config.json")
    return value


def require_conv_width(config: Any, name: str) -> int:
    """Return the taps of the convolution of recurrent layers; raise ModelLoadError unless the kernels compute them."""
    return require_integer(config, name, smallest=2, largest=_MOST_TAPS)


def read_count(config: Any, name: str) -> int:
    """Return a field of a transformers config that counts something, 0 if it is absent or null; else ModelLoadError."""
    return 0 if getattr(config, name, None) is None else require_integer(config, name, smallest=0)


def require_number(config: Any, name: str) -> float:
    """Return a field of a transformers config that numbers are multiplied by; raise ModelLoadError unless finite."""
    value = getattr(config, name, None)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST_NUMBER:  # or NaN
        raise ModelLoadError(f"{name}={shown(value)} is not a finite number; correct config.json")
    return float(value)


def require_divisor(config: Any, name: str, of: str) -> int:
    """Return a field of a transformers config that divides the field ``of``; raise ModelLoadError unless it does."""
    divisor, count = require_integer(config, name), require_integer(config, of)
    if count % divisor:
        raise ModelLoadError(f"{name}={divisor} does not divide {of}={count}; correct config.json")
    return divisor


def require_silu(config: Any, name: str) -> None:
    """Raise UnsupportedModelError unless a field of a transformers config has the activation of recurrent layers."""
    if (activation := getattr(config, name)) != "silu":
        raise UnsupportedModelError(f"{name}={shown(activation)} is not supported by recurrent layers; supported: silu")


def _problems(raw: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield each wrong field with its value and what it should be. A field that is absent or null is right."""
    for name, largest in _LARGEST.items():
        value, smallest = raw.get(name), 0 if name in _MAY_BE_ZERO else 1  # or a list, a number for each layer
        numbers = [number for number in (value if isinstance(value, list) else [value]) if isinstance(number, int)]
        if isinstance(value, bool | str | float) or any(not smallest <= number <= largest for number in numbers):
            yield name, value, f"an integer from {smallest} to {largest}"
    for name in _FACTORS:
        value = raw.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and _SMALLEST_FACTOR <= value <= _LARGEST_FACTOR):  # or NaN
            yield name, value, f"a number from {_SMALLEST_FACTOR} to {_LARGEST_FACTOR}"
    yield from _wrong_heads(raw)
    for name in _FLAGS:
        if not isinstance(raw.get(name), bool | None):
            yield name, raw[name], "true or false"
    for name in ("dtype", "torch_dtype"):
        dtype = raw.get(name)
        if isinstance(dtype, str) and dtype not in _DTYPES:
            yield name, dtype, f"one of {', '.join(_DTYPES)}"
    names = raw.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        yield "architectures", names, "a list of names"
    window = raw.get("sliding_window")
    if isinstance(window, int) and not 0 <= window < 2**31:
        yield "sliding_window", window, "a number of tokens"
    for name in _EPSILONS:
        eps = raw.get(name)
        if isinstance(eps, int | float) and not 0 <= eps < 1:  # also if it is NaN
            yield name, eps, "a small number"
    for name, value in raw.items():
        if name in _ROPE or isinstance(value, float) or name == "rope_theta":
            yield from _wrong_numbers(name, value)


def _wrong_heads(raw: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    heads, kv_heads, head_dim = (raw.get(name) for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        yield "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads={heads}"
    if isinstance(head_dim, int) and head_dim % 2:
        yield "head_dim", head_dim, "even"


def _wrong_numbers(name: str, value: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield the numbers in ``value``, at any depth, that are not finite or should be positive and are not."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _wrong_numbers(f"{name}.{key}", inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _wrong_numbers(f"{name}[{index}]", inner)
    elif isinstance(value, int | float):
        must_be_positive = name.rpartition(".")[2] in _POSITIVE
        if not abs(value) <= _LARGEST_NUMBER:  # or NaN
            yield name, value, "a finite number"
        elif must_be_positive and value <= 0:
            yield name, value, "a positive number"
