"""Family: how an architecture differs from the others that our own decoder computes, and the table of them.

It says what a config.json of that architecture means and what its checkpoint calls things. model_config.py reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["ARCHITECTURES", "Family", "NormPlacement", "QKNorm"]

NormPlacement = Literal["before", "after", "around"]  # of attention and feed-forward
QKNorm = Literal["none", "head", "projection"]  # of queries and keys: none, over each head, over all heads together

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_POST_ATTENTION, _POST_MLP = "attention_output_norm", "mlp_output_norm"  # in decoder.py
_OLMO_NORMS = {_POST_ATTENTION: "post_attention_layernorm", _POST_MLP: "post_feedforward_layernorm"}
_GEMMA_NORMS = {
    _POST_ATTENTION: "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    _POST_MLP: "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class Family:
    """How one architecture differs from Mistral.

    Attributes:
        qk_norm: the RMSNorm of queries and keys.
        qkv_bias, output_bias: of the attention's linear layers; None: config.json's attention_bias decides.
        norms: where a layer's RMSNorms are.
        stored_norms: the checkpoint's names of norms that have other names in decoder.py.
        norms_add_one: norms multiply by 1 + their weight.
        scales_embedding: embeddings are multiplied by sqrt(hidden_size), rounded to their dtype.
        has_multipliers: the config has Granite's four multipliers.
        has_query_scalar: the scale of attention is query_pre_attn_scalar ** -0.5.
        caps_attention, caps_logits: the config's attn_logit_softcapping and final_logit_softcapping have an effect.
        activation_field: the config's field for the feed-forward's activation.
        fused: projections that the checkpoint stores in one tensor, by their names in decoder.py.
        rotates_partially: the RoPE parameters may have a partial_rotary_factor.
        rotates_neighbours: RoPE rotates elements 2i and 2i + 1 of a head together, not i and i + half.
        has_unrotated_layers: the config's no_rope_layers says which layers have RoPE.
        has_rope_by_layer_type: the RoPE parameters are one set for each type of layer.
        rope_types: the kinds of RoPE that transformers computes as our tables have it.
        has_experts: feed-forwards may be mixtures of experts.
        has_expert_options: the config says which layers have experts, how large they are, and whether their weights
            are normalised. Without it all layers have experts, of intermediate_size, and the weights are normalised.
    """

    qk_norm: QKNorm = "none"
    qkv_bias: bool | None = False
    output_bias: bool | None = False
    norms: NormPlacement = "before"
    stored_norms: Mapping[str, str] = field(default_factory=dict)
    norms_add_one: bool = False
    scales_embedding: bool = False
    has_multipliers: bool = False
    has_query_scalar: bool = False
    caps_attention: bool = False
    caps_logits: bool = False
    activation_field: str = "hidden_act"
    fused: frozenset[str] = frozenset()
    rotates_partially: bool = False
    rotates_neighbours: bool = False
    has_unrotated_layers: bool = False
    has_rope_by_layer_type: bool = False
    rope_types: tuple[str, ...] = _ROPE_TYPES
    has_experts: bool = False
    has_expert_options: bool = True


ARCHITECTURES = {
    "Qwen3ForCausalLM": Family(qk_norm="head", qkv_bias=None, output_bias=None),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "LlamaForCausalLM": Family(qkv_bias=None, output_bias=None),
    "MistralForCausalLM": Family(),
    "Qwen3MoeForCausalLM": Family(qk_norm="head", qkv_bias=None, output_bias=None, has_experts=True),
    "Qwen2MoeForCausalLM": Family(qkv_bias=True, has_experts=True),
    "MixtralForCausalLM": Family(has_experts=True, has_expert_options=False),
    "SmolLM3ForCausalLM": Family(qkv_bias=None, output_bias=None, has_unrotated_layers=True),
    "Phi3ForCausalLM": Family(
        fused=frozenset({"qkv_proj", "gate_up_proj"}), rotates_partially=True, rope_types=("default", "longrope")
    ),
    "GraniteForCausalLM": Family(qkv_bias=None, output_bias=None, has_multipliers=True),
    "Olmo2ForCausalLM": Family(
        qk_norm="projection", qkv_bias=None, output_bias=None, norms="after", stored_norms=_OLMO_NORMS
    ),
    "Olmo3ForCausalLM": Family(
        qk_norm="projection",
        qkv_bias=None,
        output_bias=None,
        norms="after",
        stored_norms=_OLMO_NORMS,
        has_rope_by_layer_type=True,
    ),
    "GlmForCausalLM": Family(
        qkv_bias=None,
        fused=frozenset({"gate_up_proj"}),
        rotates_partially=True,
        rotates_neighbours=True,
        rope_types=("default",),
    ),
    "Glm4ForCausalLM": Family(
        qkv_bias=None,
        norms="around",
        stored_norms={_POST_ATTENTION: "post_self_attn_layernorm", _POST_MLP: "post_mlp_layernorm"},
        fused=frozenset({"gate_up_proj"}),
        rotates_partially=True,
        rotates_neighbours=True,
        rope_types=("default",),
    ),
    "GemmaForCausalLM": Family(qkv_bias=None, output_bias=None, norms_add_one=True, scales_embedding=True),
    "Gemma2ForCausalLM": Family(
        qkv_bias=None,
        output_bias=None,
        norms="around",
        stored_norms=_GEMMA_NORMS,
        norms_add_one=True,
        scales_embedding=True,
        has_query_scalar=True,
        caps_attention=True,
        caps_logits=True,
        activation_field="hidden_activation",
    ),
    "Gemma3ForCausalLM": Family(
        qk_norm="head",
        qkv_bias=None,
        output_bias=None,
        norms="around",
        stored_norms=_GEMMA_NORMS,
        norms_add_one=True,
        scales_embedding=True,
        has_query_scalar=True,
        caps_logits=True,
        activation_field="hidden_activation",
        has_rope_by_layer_type=True,
    ),
}
