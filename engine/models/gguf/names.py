"""gguf_weights: the weights of a GGUF file by transformers' names, and how each is stored.

llama.cpp's converter renames tensors, stacks experts, and changes some weights: see GgufWeight.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from engine.models.gguf.fields import Fields
from engine.models.gguf.file import GgufFile
from engine.models.gguf.header import GgufTensor
from engine.models.gguf.recurrent_names import RECURRENT_NAMES, recurrent_weights
from engine.models.gguf.sizes import head_dim_of
from engine.models.gguf.weight import EXPERTS, GgufWeight, holds_experts, of_each_expert

__all__ = ["gguf_weights"]

_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA4 = _GEMMA_NORMS | {
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_SHARED_EXPERTS = {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
_DEEPSEEK = _SHARED_EXPERTS | {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",  # of older files; of newer ones in halves, as MLX has them
    "attn_k_b": "self_attn.embed_q",
    "attn_v_b": "self_attn.unembed_out",
}
_OWN = {  # names that an architecture has for itself
    "gemma2": _GEMMA_NORMS,
    "gemma3": _GEMMA_NORMS,
    "gemma4": _GEMMA4,
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "gpt-oss": {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
    "deepseek2": _DEEPSEEK,
    "glm4": {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
    "glm4moe": _SHARED_EXPERTS | {"post_attention_norm": "post_attention_layernorm"},
}
_CHOICE = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_WITHOUT_KIND = {  # an architecture's weights that are not called weight or bias
    "gpt-oss": {"attn_sinks.weight": "self_attn.sinks"},
    "deepseek2": _CHOICE,
    "glm4moe": _CHOICE,
    "gemma4": {
        "layer_output_scale.weight": "layer_scalar",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
    },
}
_MIXTRAL = {"ffn_gate_inp": "block_sparse_moe.gate"}
_MIXTRAL_EXPERTS = {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}
_IN_CONFIG = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}  # gguf_config reads them
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias|scale)")
_NUMBER = re.compile(r"blk\.(\d+)\.")


def gguf_weights(gguf: GgufFile) -> dict[str, GgufWeight]:
    """Return all weights by transformers' names; a tensor that no model has keeps its name, so it is refused later.

    Raises:
        ModelLoadError: if the file does not say how many heads or experts there are.
    """
    fields = Fields(gguf)
    architecture = fields.architecture
    if architecture in RECURRENT_NAMES:
        return recurrent_weights(gguf, fields)
    heads = {}
    if architecture in ("llama", "mistral3"):
        count = fields.integer("attention.head_count")
        heads = {"attn_q": count, "attn_k": fields.integer("attention.head_count_kv", count)}
    is_mixtral = architecture == "llama" and fields.integer("expert_count", 0, smallest=0) > 0
    names = _IN_LAYER | _OWN.get(architecture, {}) | (_MIXTRAL if is_mixtral else {})
    order = _halves_order(fields) if architecture == "glm4" and "rope.dimension_sections" in fields else None
    adds_one = architecture in ("gemma", "gemma2", "gemma3")
    further = fields.integer("nextn_predict_layers", 0, smallest=0)
    num_layers = fields.integer("block_count") - further if further else None
    weights: dict[str, GgufWeight] = {}
    for name, tensor in gguf.tensors.items():
        if name in _IN_CONFIG:
            continue
        if num_layers is not None and (number := _NUMBER.match(name)) and int(number[1]) >= num_layers:
            own = name.removeprefix(number[0])
            weights[f"model.layers.{number[1]}.{own}"] = GgufWeight(parts=(tensor,), shape=tensor.shape)
            continue
        layer = _LAYER.fullmatch(name)
        if layer is not None and holds_experts(layer[2], layer[3], tensor):
            weights |= _experts(gguf, layer, tensor, architecture, is_mixtral)
            continue
        stored_as = _own_name(name, layer, names, architecture)
        weights[stored_as] = GgufWeight(
            parts=(tensor,),
            shape=tensor.shape,
            heads=0 if layer is None else heads.get(layer[2], 0),
            has_one_added=adds_one and name.endswith("norm.weight"),
            row_order=None if layer is None or order is None else order.get(layer[2]),
        )
    return weights


def _halves_order(fields: Fields) -> dict[str, tuple[int, ...]]:
    """Return the rows of GLM-4.1V's queries and keys, whose rotated elements are stored as halves, not as neighbours.

    Raises:
        ModelLoadError: if the rotated elements are no pairs of a head's.
    """
    head_dim = head_dim_of(fields)
    rotary = fields.integer("rope.dimension_count", head_dim)
    if rotary % 2 or rotary > head_dim:
        raise fields.error(f"glm4.rope.dimension_count={rotary} does not fit heads of {head_dim}; download it again")
    head = [index // 2 + index % 2 * (rotary // 2) for index in range(rotary)] + list(range(rotary, head_dim))
    queries = fields.integer("attention.head_count")
    counts = {"attn_q": queries, "attn_k": fields.integer("attention.head_count_kv", queries)}
    return {
        module: tuple(number * head_dim + index for number in range(count) for index in head)
        for module, count in counts.items()
    }


def _own_name(name: str, layer: re.Match[str] | None, names: dict[str, str], architecture: str) -> str:
    """Return transformers' name of a tensor that is not of experts."""
    if layer is None:
        module, _, kind = name.rpartition(".")
        return f"{_WHOLE[module]}.{kind}" if module in _WHOLE else name
    number, module, kind = layer.groups()
    if own := _WITHOUT_KIND.get(architecture, {}).get(f"{module}.{kind}"):
        return f"model.layers.{number}.{own}"
    return f"model.layers.{number}.{names[module]}.{kind}" if module in names else name


def _experts(
    gguf: GgufFile, layer: re.Match[str], tensor: GgufTensor, architecture: str, is_mixtral: bool
) -> dict[str, GgufWeight]:
    """Return the weights of a layer's experts: one for each expert, or GPT-OSS's, which are stacked."""
    number, module, kind = layer.groups()
    if architecture == "gpt-oss":
        return dict(_stacked(gguf, number, module, kind, tensor))
    parent = "block_sparse_moe." if is_mixtral else "" if architecture == "gemma4" else "mlp."
    block = f"model.layers.{number}.{parent}experts"
    return of_each_expert(tensor, block, module, kind, _MIXTRAL_EXPERTS if is_mixtral else EXPERTS)


def _stacked(
    gguf: GgufFile, number: str, module: str, kind: str, tensor: GgufTensor
) -> Iterator[tuple[str, GgufWeight]]:
    """Yield GPT-OSS's weight that a tensor belongs to: gates and ups alternate in one, which both tensors make up."""
    block = f"model.layers.{number}.mlp.experts"
    suffix = "_bias" if kind == "bias" else ""
    if module == "ffn_down_exps":
        shape = tensor.shape if kind == "bias" else (tensor.shape[0], *reversed(tensor.shape[1:]))
        yield (
            f"{block}.down_proj{suffix}",
            GgufWeight(parts=(tensor,), shape=shape, is_transposed=kind == "weight"),
        )
        return
    other = "ffn_up_exps" if module == "ffn_gate_exps" else "ffn_gate_exps"
    name = f"blk.{number}.{other}.{kind}"
    partner = gguf.tensors.get(name)
    if partner is None or partner.shape != tensor.shape:
        yield f"blk.{number}.{module}.{kind}", GgufWeight(parts=(tensor,), shape=tensor.shape)  # refused by its name
    elif module == "ffn_gate_exps":
        size = 2 * tensor.shape[1]
        shape = (tensor.shape[0], size) if kind == "bias" else (tensor.shape[0], tensor.shape[2], size)
        yield (
            f"{block}.gate_up_proj{suffix}",
            GgufWeight(parts=(tensor, partner), shape=shape, is_transposed=kind == "weight"),
        )
