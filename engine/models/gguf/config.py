"""gguf_config: the config.json that a GGUF file's metadata stands for.

A GGUF has no config.json. Its keys are llama.cpp's, and some of what a config.json says is known only from the tensors
(which biases there are, whether the head is tied), or is the same for all models of an architecture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from engine.errors import ModelLoadError
from engine.models.gguf.fields import Fields
from engine.models.gguf.file import GgufFile
from engine.models.gguf.further_config import FURTHER
from engine.models.gguf.gemma4_config import gemma4_config
from engine.models.gguf.recurrent_config import RECURRENT
from engine.models.gguf.rope import longrope_parameters, rope_parameters
from engine.models.gguf.sizes import has, head_dim_of, key_length, layer_types, num_layers, whole_rope
from engine.models.gguf.stop_tokens import stop_token_ids

__all__ = ["gguf_config", "gguf_generation_config"]

_DTYPES = {"F32": "float32", "F16": "float16"}  # quantised weights become bfloat16, as those of BF16
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62  # their attention has another scale, which no key says
_GEMMA3_PERIOD = 6
_TOWERS = "clip"  # of files called mmproj-...
_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
}


def gguf_config(gguf: GgufFile) -> dict[str, Any]:
    """Return the fields of a config.json.

    Raises:
        ModelLoadError: for an architecture that is not read, or metadata that is incomplete or contradictory.
    """
    fields = Fields(gguf)
    build = _BUILDERS.get(fields.architecture)
    if fields.architecture == _TOWERS:
        raise ModelLoadError(
            f"'{gguf.path}' has a model's towers for images or sound, not the model; give the GGUF file that is "
            "published beside it"
        )
    if build is None:
        raise ModelLoadError(
            f"'{gguf.path}' is of llama.cpp's architecture '{fields.architecture}', which is not read from GGUF; "
            f"supported: {', '.join(_BUILDERS)}; give a Hugging Face checkpoint's directory for others"
        )
    heads = {} if fields.architecture in {*RECURRENT, "gemma4", "deepseek2"} else _heads(fields)
    return _common(gguf, fields) | heads | build(gguf, fields)


def gguf_generation_config(gguf: GgufFile) -> dict[str, Any]:
    """Return the sampling defaults of the file, as a generation_config.json has them."""
    return {name: gguf.metadata[key] for key, name in _SAMPLING.items() if key in gguf.metadata}


def _common(gguf: GgufFile, fields: Fields) -> dict[str, Any]:
    """Return the fields that all architectures have."""
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise fields.error("it has no matrix 'token_embd.weight'; download the file again")
    stop_ids, has_layer_norms = stop_token_ids(gguf), "attention.layer_norm_epsilon" in fields
    epsilon = {} if has_layer_norms else {"rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon")}
    return epsilon | {
        "vocab_size": embedding.shape[0],
        "hidden_size": fields.integer("embedding_length"),
        "num_hidden_layers": num_layers(fields),
        "max_position_embeddings": fields.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "bos_token_id": gguf.metadata.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": gguf.metadata.get("tokenizer.ggml.padding_token_id"),
        "eos_token_id": stop_ids[0] if len(stop_ids) == 1 else stop_ids or None,
        "dtype": _dtype(gguf, fields.architecture),
    }


def _heads(fields: Fields) -> dict[str, Any]:
    """Return the fields of attention that is the same in all layers."""
    heads = fields.integer("attention.head_count")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": key_length(fields),
    }


def _dtype(gguf: GgufFile, architecture: str) -> str:
    """Return the dtype to compute in: that of most of the bytes. Gemma's hidden states are too large for float16."""
    num_bytes: Counter[str] = Counter()
    for tensor in gguf.tensors.values():
        num_bytes[tensor.type.name] += tensor.stop - tensor.start
    dtype = _DTYPES.get(max(num_bytes, key=num_bytes.__getitem__), "bfloat16")
    return "bfloat16" if dtype == "float16" and architecture.startswith("gemma") else dtype


# --- architectures ------------------------------------------------------------------------------------------------


def _llama(gguf: GgufFile, fields: Fields) -> dict[str, Any]:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "intermediate_size": fields.integer("feed_forward_length"),
        "attention_bias": has(gguf, "attn_q.bias"),
        "mlp_bias": has(gguf, "ffn_down.bias"),
        "rope_parameters": whole_rope(fields),
    }
    if fields.integer("expert_count", 0, smallest=0):
        del config["attention_bias"], config["mlp_bias"]
        config |= {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": fields.integer("expert_count"),
            "num_experts_per_tok": fields.integer("expert_used_count"),
            "sliding_window": None,
        }
    return config


def _mistral3(gguf: GgufFile, fields: Fields) -> dict[str, Any]:
    """Read Ministral 3, which scales queries by their position; other models of this architecture do not."""
    config = _llama(gguf, fields) | {"sliding_window": None}
    del config["attention_bias"], config["mlp_bias"]
    rope = config["rope_parameters"]
    if (scale := fields.number("rope.scaling.yarn_log_multiplier", 0.0)) and rope["rope_type"] == "yarn":
        rope |= {"mscale": scale, "mscale_all_dim": scale}
    if "attention.temperature_scale" not in fields:
        return config | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    rope["llama_4_scaling_beta"] = fields.number("attention.temperature_scale")
    return config | {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}


def _qwen2(gguf: GgufFile, fields: Fields) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "intermediate_size": fields.integer("feed_forward_length"),
        "use_sliding_window": False,
        "rope_parameters": whole_rope(fields),
    }


def _qwen3(gguf: GgufFile, fields: Fields) -> dict[str, Any]:
    return _qwen2(gguf, fields) | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": has(gguf, "attn_q.bias"),
    }


def _qwen3_moe(gguf: GgufFile, fields: Fields) -> dict[str, Any]:
    expert = fields.integer("expert_feed_forward_length")
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "intermediate_size": fields.integer("feed_forward_length", expert),
        "moe_intermediate_size": expert,
        "num_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "norm_topk_prob": fields.boolean("expert_weights_norm", True),  # llama.cpp takes it for granted
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "attention_bias": has(gguf, "attn_q.bias"),
        "rope_parameters": whole_rope(fields),
    }


def _gemma(gguf: GgufFile, fields: Fields) -> dict[str, Any]:
    return {
        "architectures": ["GemmaForCausalLM"],
        "model_type": "gemma",
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": fields.integer("feed_forward_length"),
        "rope_parameters": whole_rope(fields),
    }


def _gemma_scalar(fields: Fields, unlike_others: int) -> int:
    """Return ``query_pre_attn_scalar``, which no key says: the largest model's is that of evenly divided heads."""
    if fields.integer("block_count") == unlike_others:
        return fields.integer("embedding_length") // fields.integer("attention.head_count")
    return head_dim_of(fields)


def _gemma2(gguf: GgufFile, fields: Fields) -> dict[str, Any]:
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": fields.integer("feed_forward_length"),
        "query_pre_attn_scalar": _gemma_scalar(fields, _GEMMA2_27B_LAYERS),
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
        "sliding_window": fields.integer("attention.sliding_window", 4096),
        "rope_parameters": whole_rope(fields),
    }


def _gemma3(gguf: GgufFile, fields: Fields) -> dict[str, Any]:
    softcap = fields.number("final_logit_softcapping") if "final_logit_softcapping" in fields else None
    local = {"rope_type": "default", "rope_theta": fields.positive("rope.freq_base_swa", 10000.0)}
    slides = "attention.sliding_window" in fields
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": fields.integer("feed_forward_length"),
        "query_pre_attn_scalar": _gemma_scalar(fields, _GEMMA3_27B_LAYERS),
        "final_logit_softcapping": softcap,
        "attn_logit_softcapping": None,
        "sliding_window": fields.integer("attention.sliding_window") if slides else None,
        "layer_types": (layer_types(fields, _GEMMA3_PERIOD) if slides else ["full_attention"] * num_layers(fields)),
        "rope_parameters": {"full_attention": whole_rope(fields), "sliding_attention": local},
    }


def _phi3(gguf: GgufFile, fields: Fields) -> dict[str, Any]:
    head_dim = head_dim_of(fields)
    rotary_dim = fields.integer("rope.dimension_count", head_dim)
    rope = longrope_parameters(fields, rotary_dim) or rope_parameters(fields, rotary_dim)
    return {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_act": "silu",
        "intermediate_size": fields.integer("feed_forward_length"),
        "original_max_position_embeddings": fields.integer(
            "rope.scaling.original_context_length", fields.integer("context_length")
        ),
        "sliding_window": fields.integer("attention.sliding_window", 0, smallest=0) or None,
        "rope_parameters": rope | {"partial_rotary_factor": rotary_dim / head_dim},
    }


def _gpt_oss(gguf: GgufFile, fields: Fields) -> dict[str, Any]:
    rope = whole_rope(fields)
    if rope["rope_type"] == "yarn":  # no key says this; all published models have it
        rope = {"beta_fast": 32.0, "beta_slow": 1.0} | rope | {"truncate": False}
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_act": "silu",
        "intermediate_size": fields.integer("expert_feed_forward_length"),
        "num_local_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "attention_bias": has(gguf, "attn_q.bias"),
        "sliding_window": fields.integer("attention.sliding_window"),
        "layer_types": layer_types(fields, 2),
        "rope_parameters": rope,
    }


_BUILDERS: dict[str, Callable[[GgufFile, Fields], dict[str, Any]]] = {
    "llama": _llama,
    "mistral3": _mistral3,
    "qwen2": _qwen2,
    "qwen2vl": _qwen2,  # for text, the three positions of a token are the same
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "qwen3vl": _qwen3,
    "qwen3vlmoe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": gemma4_config,
    "phi3": _phi3,
    "gpt-oss": _gpt_oss,
    **FURTHER,
    **RECURRENT,
}
