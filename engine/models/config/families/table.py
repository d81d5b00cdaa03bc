"""Family: how an architecture differs from the others that our own decoder computes, and the table of them.

It says what a config.json of that architecture means and what its checkpoint calls things. model_config.py reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from engine.models.config.families.mtp_formats import DEEPSEEK_MTP, MIMO_MTP, QWEN_MTP, MtpFormat
from engine.models.config.families.stored_names import (
    BAMBA,
    DEEPSEEK,
    GEMMA,
    GEMMA3N,
    GEMMA4,
    GLM4,
    GRANITE_HYBRID,
    KIMI_LINEAR,
    LFM2,
    LLAMA4,
    MAMBA2,
    NEMOTRON_H,
    OLMO,
    OLMO_HYBRID,
    QWEN_GATED_DELTA,
)

__all__ = [
    "ARCHITECTURES",
    "ExpertsFormat",
    "Family",
    "HasRope",
    "IndexRotation",
    "NormPlacement",
    "QKNorm",
    "RecurrentKind",
]

NormPlacement = Literal["before", "after", "around"]  # of attention and feed-forward
# Of queries and keys: none, over each head, over all heads together; unit: over each head of the layers with RoPE,
# without weights, if the config's use_qk_norm says so.
QKNorm = Literal["none", "head", "projection", "unit"]

RecurrentKind = Literal["gated_delta", "kimi_delta", "mamba", "conv"]
ExpertsFormat = Literal[
    "qwen",
    "mixtral",
    "lfm2",
    "granite",
    "nemotron",
    "gemma4",
    "deepseek_v2",
    "deepseek_v3",
    "mistral4",
    "kimi",
    "llama4",
]
# optional: if the config's position_embedding_type says so; with_theta: if its RoPE parameters have a base
HasRope = Literal["always", "optional", "with_theta", "never"]
IndexRotation = Literal["halves", "neighbours"]  # elements of an index key that RoPE rotates together

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ATTENTION = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Family:
    """How one architecture differs from Mistral.

    Attributes:
        qk_norm: the RMSNorm of queries and keys.
        qkv_bias, output_bias: of the attention's linear layers; None: config.json's attention_bias decides.
        norms: where a layer's RMSNorms are.
        recurrent_norms: where they are in recurrent layers; None: where they are in others.
        stored_names: the checkpoint's names of modules that have other names in our decoder: see stored_names.py.
        prefixes: one of them is before the names of all weights but the head's.
        ignored: the beginning of the names of weights that are not needed.
        norms_add_one: norms multiply by 1 + their weight.
        scales_embedding: embeddings are multiplied by sqrt(hidden_size), rounded to their dtype.
        has_multipliers: the config has Granite's four multipliers.
        has_projection_multipliers: the config has Falcon-H1's multipliers of projections, embeddings and logits.
        has_depth_multipliers: the config has MiniCPM's scale_emb, scale_depth and dim_model_base.
        has_query_scalar: the scale of attention is query_pre_attn_scalar ** -0.5.
        attention_scale: of any model of the family; None: head_dim ** -0.5, or what the config says.
        has_layer_heads: full-attention layers have heads of their own, and the last layers may read the keys and values
            of earlier ones: see shapes/heads.py.
        normalizes_values: values are divided by the root mean square of their head.
        has_layer_scalars: each layer's output is multiplied by a stored number.
        has_altup: there are several residual streams, and a low-rank branch beside attention: see shapes/altup.py.
        caps_attention, caps_logits: the config's attn_logit_softcapping and final_logit_softcapping have an effect.
        activation_field: the config's field for the feed-forward's activation.
        fused: projections that the checkpoint stores in one tensor, by their names in decoder.py.
        rotates_partially: the RoPE parameters may have a partial_rotary_factor.
        rotates_neighbours: RoPE rotates elements 2i and 2i + 1 of a head together, not i and i + half; None: the
            config's rope_interleave decides.
        has_unrotated_layers: the config's no_rope_layers says which layers have RoPE.
        has_rope_by_layer_type: the RoPE parameters are one set for each type of layer.
        rope_types: the kinds of RoPE that transformers computes as our tables have it.
        has_rope: whether attention has RoPE.
        experts: how the config describes mixtures of experts; None: no layer has any.
        layer_types: what layers the config's layer_types may name.
        recurrent: what recurrent layers are; None: there are none.
        has_single_halves: a layer either mixes tokens or has a feed-forward, as its type says.
        has_latents: attention is latent: the cache keeps a vector for all heads.
        index_rotation: latent attention reads tokens that an indexer chooses, whose keys are rotated so; None: all.
        grows_queries: queries have a factor that grows with their position, if the RoPE parameters name one; of models
            without latents those of layers without RoPE, if the config's attn_temperature_tuning says so.
        has_mtp_layers: layers that predict further tokens may be stored after the last one; they are not needed.
        mtp: how layers that predict further tokens are stored; None: they are not computed, where there are any.
        gates_attention: attention's output is multiplied by the sigmoid of a gate, stored with each head's query.
        has_feed_forward_gate: feed-forwards multiply by a gate; without it they square what a ReLU leaves.
        eps_field: the config's field for the epsilon of norms.
    """

    qk_norm: QKNorm = "none"
    qkv_bias: bool | None = False
    output_bias: bool | None = False
    norms: NormPlacement = "before"
    recurrent_norms: NormPlacement | None = None
    stored_names: Mapping[str, str] = field(default_factory=dict)
    prefixes: tuple[str, ...] = ("model.",)
    ignored: str | None = None
    norms_add_one: bool = False
    scales_embedding: bool = False
    has_multipliers: bool = False
    has_projection_multipliers: bool = False
    has_depth_multipliers: bool = False
    has_query_scalar: bool = False
    attention_scale: float | None = None
    has_layer_heads: bool = False
    normalizes_values: bool = False
    has_layer_scalars: bool = False
    has_altup: bool = False
    caps_attention: bool = False
    caps_logits: bool = False
    activation_field: str = "hidden_act"
    fused: frozenset[str] = frozenset()
    rotates_partially: bool = False
    rotates_neighbours: bool | None = False
    has_unrotated_layers: bool = False
    has_rope_by_layer_type: bool = False
    rope_types: tuple[str, ...] = _ROPE_TYPES
    has_rope: HasRope = "always"
    experts: ExpertsFormat | None = None
    layer_types: tuple[str, ...] = _ATTENTION
    recurrent: RecurrentKind | None = None
    has_single_halves: bool = False
    has_latents: bool = False
    index_rotation: IndexRotation | None = None
    grows_queries: bool = False
    has_mtp_layers: bool = False
    mtp: MtpFormat | None = None
    gates_attention: bool = False
    has_feed_forward_gate: bool = True
    eps_field: str = "rms_norm_eps"

    @property
    def has_experts(self) -> bool:
        """Whether feed-forwards may be mixtures of experts."""
        return self.experts is not None

    @property
    def has_chunks(self) -> bool:
        """Whether layers may attend within chunks of the positions."""
        return "chunked_attention" in self.layer_types


_HYBRID = ("full_attention", "linear_attention")
_LFM2 = Family(
    qk_norm="head", layer_types=("full_attention", "conv"), recurrent="conv", eps_field="norm_eps", stored_names=LFM2
)
_QWEN_GATED_DELTA = Family(
    qk_norm="head",
    qkv_bias=None,
    output_bias=None,
    norms_add_one=True,
    stored_names=QWEN_GATED_DELTA,
    ignored="mtp.",
    mtp=QWEN_MTP,
    rotates_partially=True,
    rope_types=("default", "yarn"),
    layer_types=_HYBRID,
    recurrent="gated_delta",
    gates_attention=True,
)
_DEEPSEEK = Family(
    output_bias=None,
    stored_names=DEEPSEEK,
    rotates_neighbours=None,
    experts="deepseek_v3",
    has_latents=True,
    has_mtp_layers=True,
    mtp=DEEPSEEK_MTP,
)
_DEEPSEEK_ALONE = replace(_DEEPSEEK, has_mtp_layers=False, mtp=None)
_DEEPSEEK_SPARSE = replace(
    _DEEPSEEK, mtp=None, rotates_neighbours=True, layer_types=("indexed_attention",), index_rotation="halves"
)

_GEMMA4 = Family(
    qk_norm="head",
    qkv_bias=None,
    output_bias=None,
    norms="around",
    stored_names=GEMMA4,
    scales_embedding=True,
    attention_scale=1.0,
    has_layer_heads=True,
    normalizes_values=True,
    has_layer_scalars=True,
    caps_logits=True,
    activation_field="hidden_activation",
    has_rope_by_layer_type=True,
    rope_types=("default", "proportional"),
    experts="gemma4",
)

ARCHITECTURES = {
    "Qwen3ForCausalLM": Family(qk_norm="head", qkv_bias=None, output_bias=None),
    "Qwen2ForCausalLM": Family(qkv_bias=True, mtp=MIMO_MTP),  # MiMo is Qwen2 with such a layer
    "LlamaForCausalLM": Family(qkv_bias=None, output_bias=None),
    "MistralForCausalLM": Family(),
    "Qwen3MoeForCausalLM": Family(qk_norm="head", qkv_bias=None, output_bias=None, experts="qwen"),
    "Qwen2MoeForCausalLM": Family(qkv_bias=True, experts="qwen"),
    "MixtralForCausalLM": Family(experts="mixtral"),
    "SmolLM3ForCausalLM": Family(qkv_bias=None, output_bias=None, has_unrotated_layers=True),
    "Phi3ForCausalLM": Family(
        fused=frozenset({"qkv_proj", "gate_up_proj"}), rotates_partially=True, rope_types=("default", "longrope")
    ),
    "GraniteForCausalLM": Family(qkv_bias=None, output_bias=None, has_multipliers=True),
    "Olmo2ForCausalLM": Family(qk_norm="projection", qkv_bias=None, output_bias=None, norms="after", stored_names=OLMO),
    "Olmo3ForCausalLM": Family(
        qk_norm="projection",
        qkv_bias=None,
        output_bias=None,
        norms="after",
        stored_names=OLMO,
        has_rope_by_layer_type=True,
    ),
    "OlmoHybridForCausalLM": Family(
        qk_norm="projection",
        qkv_bias=None,
        output_bias=None,
        norms="after",
        recurrent_norms="before",
        stored_names=OLMO_HYBRID,
        has_rope="with_theta",
        layer_types=_HYBRID,
        recurrent="gated_delta",
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
        stored_names=GLM4,
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
        stored_names=GEMMA,
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
        stored_names=GEMMA,
        norms_add_one=True,
        scales_embedding=True,
        has_query_scalar=True,
        caps_logits=True,
        activation_field="hidden_activation",
        has_rope_by_layer_type=True,
    ),
    "Gemma3nForCausalLM": replace(
        _GEMMA4,
        stored_names=GEMMA3N,
        has_layer_scalars=False,
        has_altup=True,
        rope_types=_ROPE_TYPES,
        experts=None,
    ),
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4UnifiedForCausalLM": replace(_GEMMA4, experts=None),
    "DeepseekV2ForCausalLM": replace(_DEEPSEEK_ALONE, rotates_neighbours=True, experts="deepseek_v2"),
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "DeepseekV32ForCausalLM": _DEEPSEEK_SPARSE,
    "GlmMoeDsaForCausalLM": replace(_DEEPSEEK_SPARSE, index_rotation="neighbours"),
    "Glm4MoeLiteForCausalLM": _DEEPSEEK,
    "Mistral4ForCausalLM": replace(_DEEPSEEK_ALONE, experts="mistral4", grows_queries=True),
    "YoutuForCausalLM": replace(_DEEPSEEK_ALONE, experts=None),
    "MiniCPM3ForCausalLM": Family(
        output_bias=None,
        has_depth_multipliers=True,
        rope_types=(*_ROPE_TYPES, "longrope"),
        has_latents=True,
    ),
    "Llama4ForCausalLM": Family(
        qk_norm="unit",
        qkv_bias=None,
        output_bias=None,
        stored_names=LLAMA4,
        rotates_neighbours=True,
        has_unrotated_layers=True,
        experts="llama4",
        layer_types=("full_attention", "chunked_attention"),
        grows_queries=True,
    ),
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": replace(_LFM2, experts="lfm2"),
    "Qwen3NextForCausalLM": replace(_QWEN_GATED_DELTA, experts="qwen"),
    "Qwen3_5ForCausalLM": _QWEN_GATED_DELTA,
    "Qwen3_5MoeForCausalLM": replace(_QWEN_GATED_DELTA, experts="qwen"),
    "KimiLinearForCausalLM": Family(
        output_bias=None,
        stored_names=KIMI_LINEAR,
        has_rope="never",
        has_latents=True,
        experts="kimi",
        layer_types=_HYBRID,
        recurrent="kimi_delta",
    ),
    "GraniteMoeHybridForCausalLM": Family(
        qkv_bias=None,
        output_bias=None,
        has_multipliers=True,
        stored_names=GRANITE_HYBRID,
        fused=frozenset({"gate_up_proj"}),
        has_rope="optional",
        experts="granite",
        layer_types=_HYBRID,
        recurrent="mamba",
    ),
    "BambaForCausalLM": Family(
        qkv_bias=None,
        output_bias=None,
        stored_names=BAMBA,
        rotates_partially=True,
        rope_types=("default",),
        layer_types=_HYBRID,
        recurrent="mamba",
    ),
    "FalconH1ForCausalLM": Family(
        qkv_bias=None,
        output_bias=None,
        has_projection_multipliers=True,
        stored_names=BAMBA,
        layer_types=("hybrid",),
        recurrent="mamba",
    ),
    "NemotronHForCausalLM": Family(
        stored_names=NEMOTRON_H,
        prefixes=("backbone.", "model."),
        ignored="mtp.",
        has_rope="never",
        experts="nemotron",
        layer_types=(*_HYBRID, "moe", "mlp"),
        recurrent="mamba",
        has_single_halves=True,
        has_feed_forward_gate=False,
        eps_field="layer_norm_epsilon",
        activation_field="mlp_hidden_act",
    ),
    "Mamba2ForCausalLM": Family(
        stored_names=MAMBA2,
        prefixes=("backbone.",),
        has_rope="never",
        layer_types=("linear_attention",),
        recurrent="mamba",
        has_single_halves=True,
        eps_field="layer_norm_epsilon",
    ),
}
