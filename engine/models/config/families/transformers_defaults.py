"""PlainFamily: which fields a config.json of each family has, and what transformers takes where one is absent.

Only what without_transformers.py needs to read such a file. table.py says what the fields mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.models.config.families.table import ARCHITECTURES, Family

__all__ = ["FAMILIES", "KNOWN", "WITHOUT_EFFECT", "PlainFamily", "Types"]

Types = tuple[type, ...]
Windows = Literal["never", "switched", "everywhere", "by_layer_type"]

_NUMBER: Types = (int, float)
_COMMON: dict[str, Types] = {
    "architectures": (list,),
    "hidden_size": (int,),
    "intermediate_size": (int,),
    "max_position_embeddings": (int,),
    "model_type": (str,),
    "num_attention_heads": (int,),
    "num_hidden_layers": (int,),
    "num_key_value_heads": (int,),
    "rms_norm_eps": (float,),
    "vocab_size": (int,),
    "eos_token_id": (int, list, type(None)),
}
_MULTIPLIERS: dict[str, Types] = dict.fromkeys(
    ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"), _NUMBER
)
_QWEN_EXPERTS: dict[str, Types] = {
    "decoder_sparse_step": (int,),
    "moe_intermediate_size": (int,),
    "norm_topk_prob": (bool,),
}
_OPTIONAL: dict[str, Types] = {
    "attention_bias": (bool,),
    "attn_logit_softcapping": (float, type(None)),
    "dtype": (str,),
    "head_dim": (int, type(None)),
    "hidden_act": (str,),
    "layer_types": (list,),
    "mlp_bias": (bool,),
    "mlp_only_layers": (list, type(None)),
    "no_rope_layer_interval": (int,),
    "no_rope_layers": (list,),
    "num_experts": (int,),
    "num_local_experts": (int,),
    "partial_rotary_factor": _NUMBER,
    "rope_local_base_freq": _NUMBER,
    "rope_parameters": (dict,),
    "rope_scaling": (type(None),),
    "rope_theta": _NUMBER,
    "sliding_window": (int, type(None)),
    "sliding_window_pattern": (int,),
    "tie_word_embeddings": (bool,),
    "torch_dtype": (str,),
    "use_bidirectional_attention": (bool, type(None)),
    "use_sliding_window": (bool,),
}
WITHOUT_EFFECT: dict[str, Types] = {  # on what the decoder computes
    "_sliding_window_pattern": (int,),  # unlike the field without the underscore
    "attention_dropout": _NUMBER,
    "bos_token_id": (int, type(None)),
    "cache_implementation": (str,),
    "embd_pdrop": _NUMBER,
    "initializer_range": (float,),
    "max_window_layers": (int,),
    "original_max_position_embeddings": (int,),  # of scaled RoPE
    "output_router_logits": (bool,),
    "pad_token_id": (int, type(None)),
    "pretraining_tp": (int,),
    "qkv_bias": (bool,),  # the loader finds out whether there are biases
    "resid_pdrop": _NUMBER,
    "router_aux_loss_coef": (float,),
    "router_jitter_noise": (float,),
    "transformers_version": (str,),
    "use_cache": (bool,),
}


@dataclass(frozen=True)
class PlainFamily:
    """How transformers reads the config.json of one model_type.

    Attributes:
        architecture: the one that is plain with this model_type.
        windows: which layers slide: never any, none without ``use_sliding_window``, all if the config has a window, or
            those that ``layer_types`` names.
        full_attention_every: the period of layers with full attention if ``layer_types`` is absent; the others slide.
        required: fields whose absence or null transformers replaces with a number of its own.
        defaults: what it takes where these are absent.
        rotated_part: the share of a head's elements that is rotated where the config does not say.
        local_rope_theta: the base of sliding layers' RoPE where the config does not say.
    """

    architecture: str
    windows: Windows = "never"
    full_attention_every: int = 0
    required: dict[str, Types] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rotated_part: float = 1.0
    local_rope_theta: float = 0.0

    @property
    def family(self) -> Family:
        """What the fields mean."""
        return ARCHITECTURES[self.architecture]

    @property
    def required_fields(self) -> dict[str, Types]:
        """The types of the fields that must be there."""
        family = self.family
        fields = _COMMON | {family.activation_field: (str,)}
        if family.has_multipliers:
            fields |= _MULTIPLIERS
        if family.has_query_scalar:
            fields |= {"query_pre_attn_scalar": (int,)}
        if family.has_experts:
            fields |= {"num_experts_per_tok": (int,)}
        for name, has_effect in (
            ("attn_logit_softcapping", family.caps_attention),
            ("final_logit_softcapping", family.caps_logits),
        ):
            if has_effect:
                fields |= {name: (float, type(None))}
        return fields | self.required


_HEAD_DIM: dict[str, Types] = {"head_dim": (int,)}
_WINDOW: dict[str, Types] = {"sliding_window": (int, type(None))}
_GLM: dict[str, Any] = {
    "required": _HEAD_DIM | {"eos_token_id": (int, list)},
    "defaults": {"attention_bias": True},
    "rotated_part": 0.5,
}
_TIED = {"tie_word_embeddings": True}

FAMILIES = {
    "llama": PlainFamily("LlamaForCausalLM"),
    "mistral": PlainFamily("MistralForCausalLM", "everywhere", required=_WINDOW),
    "qwen2": PlainFamily("Qwen2ForCausalLM", "switched"),
    "qwen3": PlainFamily("Qwen3ForCausalLM", "switched", required=_HEAD_DIM),
    "qwen2_moe": PlainFamily(
        "Qwen2MoeForCausalLM",
        "switched",
        required=_QWEN_EXPERTS | {"num_experts": (int,), "shared_expert_intermediate_size": (int,)},
    ),
    "qwen3_moe": PlainFamily("Qwen3MoeForCausalLM", "switched", required=_QWEN_EXPERTS),
    "mixtral": PlainFamily("MixtralForCausalLM", "everywhere", required=_WINDOW),
    "smollm3": PlainFamily("SmolLM3ForCausalLM", "switched", defaults=_TIED),
    "phi3": PlainFamily("Phi3ForCausalLM", "everywhere", required=_WINDOW),
    "granite": PlainFamily("GraniteForCausalLM"),
    "olmo2": PlainFamily("Olmo2ForCausalLM"),
    "olmo3": PlainFamily("Olmo3ForCausalLM", "by_layer_type", 4, required=_WINDOW, local_rope_theta=500000.0),
    "glm": PlainFamily("GlmForCausalLM", **_GLM),
    "glm4": PlainFamily("Glm4ForCausalLM", **_GLM),
    "gemma": PlainFamily("GemmaForCausalLM", required=_HEAD_DIM, defaults=_TIED),
    "gemma2": PlainFamily("Gemma2ForCausalLM", "by_layer_type", 2, required=_HEAD_DIM | _WINDOW, defaults=_TIED),
    "gemma3_text": PlainFamily(
        "Gemma3ForCausalLM",
        "by_layer_type",
        6,
        required=_HEAD_DIM | _WINDOW,
        defaults=_TIED,
        local_rope_theta=10000.0,
    ),
}


def _known() -> Iterator[tuple[str, Types]]:
    yield from _OPTIONAL.items()
    yield from WITHOUT_EFFECT.items()
    for family in FAMILIES.values():
        yield from ((name, types) for name, types in family.required_fields.items() if name not in _OPTIONAL)


KNOWN = dict(_known())  # fields that a plain config of any family may have
