"""gemma4_config: the fields of config.json that only Gemma 4 has, dense and with experts, from a GGUF file.

Its full-attention layers have heads of another number and size than its layers with a sliding window.
"""

from __future__ import annotations

from typing import Any

from engine.models.gguf.fields import Fields
from engine.models.gguf.file import GgufFile
from engine.models.gguf.sizes import num_layers

__all__ = ["gemma4_config"]

_ROTATED, _LEAST_UNROTATED = 1.0, 1e20  # what the file divides the frequencies of a head's elements by


def gemma4_config(gguf: GgufFile, fields: Fields) -> dict[str, Any]:
    """Return the fields.

    Raises:
        ModelLoadError: if numbers differ between layers in another way than in any published model.
    """
    slides = _slides(fields)
    full = slides.index(False)
    embedding = gguf.tensors.get("per_layer_token_embd.weight")
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "num_attention_heads": fields.integer("attention.head_count"),
        "layer_types": ["sliding_attention" if is_sliding else "full_attention" for is_sliding in slides],
        "sliding_window": fields.integer("attention.sliding_window"),
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in gguf.tensors,
        "final_logit_softcapping": (
            fields.number("final_logit_softcapping") if "final_logit_softcapping" in fields else None
        ),
        "hidden_size_per_layer_input": fields.integer("embedding_length_per_layer_input", 0, smallest=0),
        "vocab_size_per_layer_input": 1 if embedding is None else embedding.shape[0],
        **_kv_heads(fields, slides),
        **_feed_forward(fields),
        **_rope(fields),
    }


def _slides(fields: Fields) -> list[bool]:
    """Return which layers slide; the last one never does."""
    count, pattern = num_layers(fields), fields.raw("attention.sliding_window_pattern")
    is_list = isinstance(pattern, list) and len(pattern) == count and all(type(slides) is bool for slides in pattern)
    if not is_list or pattern[-1]:
        raise fields.error(
            f"gemma4.attention.sliding_window_pattern does not say of {count} layers which slide, the last one not; "
            "download the file again"
        )
    return list(pattern)


def _kv_heads(fields: Fields, slides: list[bool]) -> dict[str, Any]:
    counts = fields.integers("attention.head_count_kv", len(slides))
    of_sliding, of_full = (
        {count for count, is_sliding in zip(counts, slides, strict=True) if is_sliding == kind}
        for kind in (True, False)
    )
    if len(of_sliding) > 1 or len(of_full) > 1:
        raise fields.error(
            "gemma4.attention.head_count_kv differs between layers of a kind, which is not supported; give another "
            "model"
        )
    head_dims = {}
    for name, suffix in (("global_head_dim", ""), ("head_dim", "_swa")):
        head_dims[name] = fields.integer(f"attention.key_length{suffix}")
        for key in (f"attention.value_length{suffix}", f"rope.dimension_count{suffix}"):
            if fields.integer(key, head_dims[name]) != head_dims[name]:
                raise fields.error(
                    f"gemma4.{key} is not the head's {head_dims[name]} elements, which is not supported; give another "
                    "model"
                )
    return head_dims | {
        "num_key_value_heads": min(of_sliding or of_full),
        "num_global_key_value_heads": min(of_full),
        "num_kv_shared_layers": _num_shared(fields),
    }


def _num_shared(fields: Fields) -> int:
    """Return how many of the last layers read the keys and values of earlier ones."""
    count, shared = num_layers(fields), fields.integer("attention.shared_kv_layers", 0, smallest=0)
    if shared >= count:
        raise fields.error(
            f"gemma4.attention.shared_kv_layers={shared} leaves none of {count} layers with keys of its own; "
            "download the file again"
        )
    return shared


def _feed_forward(fields: Fields) -> dict[str, Any]:
    """Return the sizes of dense feed-forwards, which may be twice as wide in layers that share keys, and of experts."""
    count, shared = num_layers(fields), _num_shared(fields)
    widths = fields.integers("feed_forward_length", count)
    doubled = [widths[0] * (1 + (layer >= count - shared)) for layer in range(count)]
    if widths not in ([widths[0]] * count, doubled):
        raise fields.error(
            "gemma4.feed_forward_length differs between layers in a way that is not supported; give another model"
        )
    dense = {"intermediate_size": widths[0], "use_double_wide_mlp": shared > 0 and widths == doubled}
    if not fields.integer("expert_count", 0, smallest=0):
        return dense
    return dense | {
        "enable_moe_block": True,
        "num_experts": fields.integer("expert_count"),
        "top_k_experts": fields.integer("expert_used_count"),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
    }


def _rope(fields: Fields) -> dict[str, Any]:
    """Return the rotations of both kinds of layers; a tensor says which elements of full attention are rotated."""
    half = fields.integer("attention.key_length") // 2
    factors = fields.tensor("rope_freqs.weight", half) or []
    num_rotated = factors.count(_ROTATED)
    if not num_rotated or any(factor < _LEAST_UNROTATED for factor in factors[num_rotated:]):
        raise fields.error("its tensor 'rope_freqs.weight' does not say which elements are rotated; download it again")
    return {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": fields.positive("rope.freq_base"),
                "partial_rotary_factor": num_rotated / half,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": fields.positive("rope.freq_base_swa", 10000.0)},
        }
    }
