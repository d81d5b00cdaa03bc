"""recurrent_weights: the weights of models with recurrent layers by transformers' names, and how each is stored.

llama.cpp's converter stores -exp(A_log), drops and adds dimensions of size 1, and changes the order of Qwen3.5's value
heads: the first of every key head, then the second of each. It splits Granite's gates and ups. Of Qwen3-Next, whose
layers are those of Qwen3.5 with experts, it splits one of two joined projections, and this reads the other as two.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from engine.models.gguf.fields import Fields
from engine.models.gguf.file import GgufFile
from engine.models.gguf.header import GgufTensor
from engine.models.gguf.weight import GgufWeight, holds_experts, of_each_expert

__all__ = ["RECURRENT_NAMES", "recurrent_weights"]

_BETAS_AND_ALPHAS = "ssm_ba"
_LAYER = re.compile(r"blk\.(\d+)\.([\w.]+?)(?:\.(weight|bias))?")
_WITHOUT_KIND = ("A_log", "D", "dt_bias", "e_score_correction_bias")  # are not a module's weight or bias
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_SSM = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_dt": "dt_bias",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}


def _within(block: str, names: Mapping[str, str]) -> dict[str, str]:
    return {stored: f"{block}.{name}" for stored, name in names.items()}


@dataclass(frozen=True, kw_only=True)
class _Names:
    """Transformers' names of an architecture's modules.

    Attributes:
        whole: of those that are in no layer.
        layer: of those in layers, by llama.cpp's names.
        layers: what precedes the layer's number.
        experts: what precedes an expert's number in a layer.
        joined: of weights that two stored tensors make up, by llama.cpp's name of the first.
        permutes: whether queries and keys are stored as Llama's are.
        adds_one: whether norms are stored with 1 added, except those of recurrent layers' outputs.
    """

    whole: Mapping[str, str]
    layer: Mapping[str, str]
    layers: str = "model.layers"
    experts: str = "mlp.experts"
    joined: Mapping[str, str] = field(default_factory=dict)
    permutes: bool = False
    adds_one: bool = False


_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_QWEN35 = _Names(
    whole=_WHOLE,
    layer={
        **_ATTENTION,
        **_MLP,
        **_within("linear_attn", {key: _SSM[key] for key in ("ssm_conv1d", "ssm_dt", "ssm_a", "ssm_norm", "ssm_out")}),
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    },
    adds_one=True,
)
_MAMBA2_WHOLE = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
_NEMOTRON_H = _Names(
    whole=_MAMBA2_WHOLE,
    layer={
        **_within("mixer", _SSM),
        **{stored: name.replace("self_attn", "mixer") for stored, name in _ATTENTION.items()},
        "attn_norm": "norm",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
        "ffn_gate_inp": "mixer.gate",
        "exp_probs_b": "mixer.gate.e_score_correction_bias",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
    },
    layers="backbone.layers",
    experts="mixer.experts",
    permutes=True,
)
RECURRENT_NAMES: dict[str, _Names] = {
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35,
    "qwen3next": _QWEN35,
    "lfm2": _Names(
        whole=_WHOLE | {"token_embd_norm": "model.embedding_norm"},
        layer={
            **_ATTENTION,
            "attn_output": "self_attn.out_proj",
            "attn_norm": "operator_norm",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "ffn_norm": "ffn_norm",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
            "shortconv.conv": "conv.conv",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.out_proj": "conv.out_proj",
        },
    ),
    "mamba2": _Names(
        whole=_MAMBA2_WHOLE, layer=_within("mixer", _SSM) | {"attn_norm": "norm"}, layers="backbone.layers"
    ),
    "falcon-h1": _Names(
        whole=_WHOLE | {"output_norm": "model.final_layernorm"},
        layer={
            **_ATTENTION,
            **_within("mamba", _SSM),
            "attn_norm": "input_layernorm",
            "ffn_norm": "pre_ff_layernorm",
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
        },
    ),
    "granitehybrid": _Names(
        whole=_WHOLE,
        layer={
            **_ATTENTION,
            **_within("mamba", _SSM),
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "ffn_down": "shared_mlp.output_linear",
            "ffn_down_shexp": "shared_mlp.output_linear",
            "ffn_down_exps": "block_sparse_moe.output_linear",
            "ffn_gate_inp": "block_sparse_moe.router.layer",
        },
        joined={
            "ffn_gate": "shared_mlp.input_linear",
            "ffn_gate_shexp": "shared_mlp.input_linear",
            "ffn_gate_exps": "block_sparse_moe.input_linear",
        },
        permutes=True,
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
}


def recurrent_weights(gguf: GgufFile, fields: Fields) -> dict[str, GgufWeight]:
    """Return all weights by transformers' names; a tensor that no model has keeps its name, so it is refused later.

    Raises:
        ModelLoadError: if the file does not say how many heads there are, or heads do not divide one another.
    """
    names, order = RECURRENT_NAMES[fields.architecture], _ValueOrder.of(fields)
    num_layers = fields.integer("block_count") - fields.integer("nextn_predict_layers", 0, smallest=0)
    heads = _rotated_heads(fields) if names.permutes else {}
    second_names = _second_names(gguf, names)
    weights: dict[str, GgufWeight] = {}
    for name, tensor in gguf.tensors.items():
        layer = _LAYER.fullmatch(name)
        if layer is None:
            module, _, kind = name.rpartition(".")
            stored_as = f"{names.whole[module]}.{kind}" if module in names.whole else name
            weights[stored_as] = GgufWeight(parts=(tensor,), shape=tensor.shape, has_one_added=_adds_one(names, module))
            continue
        number, module, kind = layer[1], layer[2], layer[3] or "weight"  # Falcon-H1's norms have no suffix
        block = f"{names.layers}.{number}"
        if int(number) >= num_layers:
            weights[f"mtp.{name}"] = GgufWeight(parts=(tensor,), shape=tensor.shape)  # predicts further tokens
        elif name in second_names:
            continue
        elif module == _BETAS_AND_ALPHAS and kind == "weight" and fields.architecture == "qwen3next":
            weights |= _betas_and_alphas(tensor, fields, f"{block}.linear_attn")
        elif module in names.joined:
            weights |= _joined(gguf, name, tensor, f"{block}.{names.joined[module]}.{kind}")
        elif module in names.layer:
            own = names.layer[module]
            stored_as = f"{block}.{own}" if own.endswith(_WITHOUT_KIND) else f"{block}.{own}.{kind}"
            weight = _weight(tensor, module, own, heads.get(module, 0), adds_one=_adds_one(names, module))
            weights[stored_as] = weight if order is None else order.restored(weight, module)
        elif holds_experts(module, kind, tensor):
            weights |= of_each_expert(tensor, f"{block}.{names.experts}", module, kind)
        else:
            weights[name] = GgufWeight(parts=(tensor,), shape=tensor.shape)
    return weights


def _adds_one(names: _Names, module: str) -> bool:
    return names.adds_one and module.endswith("norm") and module != "ssm_norm"


def _rotated_heads(fields: Fields) -> dict[str, int]:
    kv_heads = fields.integers("attention.head_count_kv", fields.integer("block_count"))
    return {"attn_q": fields.integer("attention.head_count"), "attn_k": max(kv_heads)}


def _weight(tensor: GgufTensor, module: str, own: str, heads: int, *, adds_one: bool) -> GgufWeight:
    """Return a weight in transformers' shape."""
    shape = tensor.shape
    if own.endswith(("conv1d", "conv.conv")) and len(shape) == 2:
        shape = (shape[0], 1, shape[1])
    elif module in ("ssm_a", "ssm_d", "ssm_norm"):
        shape = (math.prod(shape),)
    elif own.endswith("shared_expert_gate"):
        shape = (1, math.prod(shape))
    return GgufWeight(parts=(tensor,), shape=shape, heads=heads, has_one_added=adds_one, is_decay=own.endswith("A_log"))


def _betas_and_alphas(tensor: GgufTensor, fields: Fields, block: str) -> dict[str, GgufWeight]:
    """Return the two weights whose rows are stored for each key head in turn: those of betas, then those of alphas.

    Raises:
        ModelLoadError: if heads do not divide one another, or the tensor has another number of rows.
    """
    keys, heads = fields.integer("ssm.group_count"), fields.integer("ssm.time_step_rank")
    if heads % keys or tensor.shape[0] != 2 * heads:
        raise fields.error(
            f"a tensor of {_BETAS_AND_ALPHAS} is {list(tensor.shape)}, which does not fit {keys} key heads and {heads} "
            "value heads; download the file again"
        )
    each = heads // keys
    rows = [[2 * key * each + half * each + index for key in range(keys) for index in range(each)] for half in (0, 1)]
    return {
        f"{block}.{name}.weight": GgufWeight(parts=(tensor,), shape=(heads, *tensor.shape[1:]), row_order=tuple(order))
        for name, order in zip(("in_proj_b", "in_proj_a"), rows, strict=True)
    }


def _joined(gguf: GgufFile, name: str, gates: GgufTensor, stored_as: str) -> dict[str, GgufWeight]:
    """Return the weight of gates and ups; without ups the gates keep their name and are refused."""
    ups = gguf.tensors.get(_second_name(name))
    if ups is None or ups.shape != gates.shape:
        return {name: GgufWeight(parts=(gates,), shape=gates.shape)}
    shape = (*gates.shape[:-2], 2 * gates.shape[-2], gates.shape[-1])
    return {stored_as: GgufWeight(parts=(gates, ups), shape=shape, is_joined=True)}


def _second_name(name: str) -> str:
    return name.replace("ffn_gate", "ffn_up")


def _second_names(gguf: GgufFile, names: _Names) -> set[str]:
    """Return the tensors that follow another one in a joined weight."""
    layers = (_LAYER.fullmatch(name) for name in gguf.tensors)
    return {_second_name(layer[0]) for layer in layers if layer is not None and layer[2] in names.joined}


# --- value heads -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ValueOrder:
    """The order of Qwen3.5's value heads, of which each key head serves several neighbours in transformers."""

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, fields: Fields) -> _ValueOrder | None:
        """Return the order of a file; None if transformers has the same."""
        if fields.architecture not in ("qwen35", "qwen35moe"):
            return None
        keys, heads = fields.integer("ssm.group_count"), fields.integer("ssm.time_step_rank")
        inner = fields.integer("ssm.inner_size")
        if heads % keys or inner % heads:
            raise fields.error(
                f"{keys} key heads, {heads} value heads and {inner} features of all heads do not divide one another; "
                "download the file again"
            )
        return cls(keys, heads, fields.integer("ssm.state_size"), inner // heads) if heads > keys else None

    def restored(self, weight: GgufWeight, module: str) -> GgufWeight:
        """Return a weight with the order of its rows or columns."""
        match module:
            case "ssm_a" | "ssm_dt" | "ssm_alpha" | "ssm_beta":
                return replace(weight, row_order=self._elements(1))
            case "attn_gate":
                return replace(weight, row_order=self._elements(self.value_dim))
            case "attn_qkv" | "ssm_conv1d":
                first = 2 * self.num_key_heads * self.key_dim  # queries and keys stay where they are
                values = (first + index for index in self._elements(self.value_dim))
                return replace(weight, row_order=(*range(first), *values))
            case "ssm_out":
                return replace(weight, column_order=self._elements(self.value_dim))
        return weight

    def _elements(self, size: int) -> tuple[int, ...]:
        """Return where the elements of all heads are stored, ``size`` of each."""
        each = self.num_heads // self.num_key_heads
        heads = (head % each * self.num_key_heads + head // each for head in range(self.num_heads))
        return tuple(head * size + index for head in heads for index in range(size))
