"""What the checkpoints of families call modules that have other names in our decoder.

A name is translated from its beginning on, component by component: the longest key that fits is replaced. Norms and
projections are translated one by one, so fused ones need no entry unless the checkpoint fuses them too.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "BAMBA",
    "DEEPSEEK",
    "GEMMA",
    "GEMMA3N",
    "GEMMA4",
    "GLM4",
    "GRANITE_HYBRID",
    "KIMI_LINEAR",
    "LFM2",
    "LLAMA4",
    "MAMBA2",
    "NEMOTRON_H",
    "OLMO",
    "OLMO_HYBRID",
    "QWEN_GATED_DELTA",
    "stored_name",
]

_POST_ATTENTION, _POST_MLP = "attention_output_norm", "mlp_output_norm"

OLMO = {_POST_ATTENTION: "post_attention_layernorm", _POST_MLP: "post_feedforward_layernorm"}
GEMMA = {
    _POST_ATTENTION: "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    _POST_MLP: "post_feedforward_layernorm",
}
_OWN_INPUTS = {
    "per_layer_inputs.embed_tokens_per_layer": "embed_tokens_per_layer",
    "per_layer_inputs.per_layer_model_projection": "per_layer_model_projection",
    "per_layer_inputs.per_layer_projection_norm": "per_layer_projection_norm",
    "per_layer_input.gate": "per_layer_input_gate",
    "per_layer_input.projection": "per_layer_projection",
    "per_layer_output_norm": "post_per_layer_input_norm",
}
GEMMA3N = (
    GEMMA
    | _OWN_INPUTS
    | {
        "streams.projections": "altup_projections",
        "streams.unembed_projections": "altup_unembed_projections",
        "altup.router": "altup.modality_router.weight",
        "altup.predictions": "altup.prediction_coefs.weight",
        "altup.corrections": "altup.correction_coefs.weight",
        "altup.output_scale": "altup.correct_output_scale",
        "laurel.left": "laurel.linear_left",
        "laurel.right": "laurel.linear_right",
    }
)
_GEMMA4_EXPERTS = {
    "mlp.dense": "mlp",
    "mlp.dense_norm": "pre_feedforward_layernorm",
    "mlp.dense_output_norm": "post_feedforward_layernorm_1",
    "mlp.sparse_norm": "pre_feedforward_layernorm_2",
    "mlp.sparse_output_norm": "post_feedforward_layernorm_2",
    "mlp.router_norm.weight": "router.scale",
    "mlp.sparse.gate": "router.proj",
    "mlp.sparse.expert_scale": "router.per_expert_scale",
    "mlp.sparse.experts": "experts",
}
GEMMA4 = GEMMA | _GEMMA4_EXPERTS | _OWN_INPUTS
GLM4 = {_POST_ATTENTION: "post_self_attn_layernorm", _POST_MLP: "post_mlp_layernorm"}
LFM2 = {
    "norm": "embedding_norm",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "recurrent": "conv",
    "mlp": "feed_forward",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
    "mlp.experts.down_proj": "feed_forward.experts.down_proj",  # of all experts, in one tensor
}
LLAMA4 = {"mlp": "feed_forward", "mlp.gate": "feed_forward.router"}
DEEPSEEK = {"mlp.shared_expert": "mlp.shared_experts", "mlp.expert_bias": "mlp.gate.e_score_correction_bias"}
KIMI_LINEAR = DEEPSEEK | {"recurrent": "self_attn", "out_proj": "o_proj", "gated_norm": "o_norm"}
QWEN_GATED_DELTA = {"recurrent": "linear_attn", "conv": "conv1d", "gated_norm": "norm"}
OLMO_HYBRID = OLMO | {"recurrent": "linear_attn", "out_proj": "o_proj", "gated_norm": "o_norm"}
_MAMBA = {"recurrent": "mamba", "conv": "conv1d", "gated_norm": "norm"}
BAMBA = _MAMBA | {"norm": "final_layernorm", "post_attention_layernorm": "pre_ff_layernorm", "mlp": "feed_forward"}
GRANITE_HYBRID = _MAMBA | {
    "mlp": "shared_mlp",
    "mlp.shared_expert": "shared_mlp",
    "mlp.gate": "block_sparse_moe.router.layer",
    "mlp.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "mlp.experts.down_proj": "block_sparse_moe.output_linear.weight",
    "gate_up_proj": "input_linear",
    "down_proj": "output_linear",
}
MAMBA2 = _MAMBA | {"embed_tokens": "embeddings", "norm": "norm_f", "input_layernorm": "norm", "recurrent": "mixer"}
NEMOTRON_H = MAMBA2 | {
    "post_attention_layernorm": "norm",
    "self_attn": "mixer",
    "mlp": "mixer",
    "mlp.shared_expert": "mixer.shared_experts",
    "mlp.expert_bias": "mixer.gate.e_score_correction_bias",
}


def stored_name(name: str, names: Mapping[str, str]) -> str:
    """Return a checkpoint's name of our ``name``, without the prefix of the whole model."""
    components, stored = name.split("."), list[str]()
    while components:
        for count in range(len(components), 0, -1):
            key = ".".join(components[:count])
            if key in names or count == 1:
                stored.append(names.get(key, key))
                components = components[count:]
                break
    return ".".join(stored)
