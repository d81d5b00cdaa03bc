"""packed_layer and set_parameter: a decoder's layers for the C kernels, from a config and from parameters by name."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.models.config.model_config import ModelConfig
from engine.models.config.shapes.experts import ExpertsShape
from engine.models.config.shapes.latent import LatentShape
from engine.models.config.shapes.mixers import RecurrentShape
from engine.models.config.shapes.recurrent.gated_delta import GatedDeltaShape
from engine.models.config.shapes.recurrent.kimi_delta import KimiDeltaShape
from engine.models.config.shapes.recurrent.mamba import MambaShape
from engine.models.config.shapes.recurrent.short_conv import ConvShape
from engine.models.decoder.coded_plan import CodedPlan
from kernels.coded_weight import Weight
from kernels.cpu.altup import PackedAltUp
from kernels.cpu.experts import ExpertSizes, PackedExperts
from kernels.cpu.indexer import IndexerSizes, PackedIndexer
from kernels.cpu.latent import LatentSizes, PackedLatent
from kernels.cpu.layer import LayerShape, PackedLayer
from kernels.cpu.linear import PackedLinear, WeightKind
from kernels.cpu.recurrent_layer import PackedRecurrent, RecurrentKind, RecurrentSizes

__all__ = ["packed_layer", "set_parameter"]

_COLUMN_PARALLEL = (
    "qkv_proj",
    "qkv_a_proj",
    "gate_up_proj",
    "up_proj",
    "in_proj",
    "conv",
)  # each rank has outputs of its own
_LATENT = ("q_a_layernorm", "kv_a_layernorm", "q_b_proj", "kv_b_proj")


def packed_layer(
    config: ModelConfig, layer: int, kind: WeightKind, dtype: torch.dtype, plan: CodedPlan, mixer_inputs: int = 0
) -> PackedLayer:
    """Return a layer of a rank's share of the model, whose weights are zero.

    Args:
        config: a rank's share, ``ModelConfig.shard``.
        layer: its index.
        kind: the type of the packed weights.
        dtype: of the KV cache.
        plan: which weights stay codes.
        mixer_inputs: numbers that attention reads of each token; 0: the hidden states.
    """
    shape = replace(_layer_shape(config, layer), mixer_inputs=mixer_inputs)
    packed = PackedLayer(shape, kind, dtype, plan.of_layer(layer, "layer"))
    if config.experts is not None and config.has_experts(layer):
        sizes = _expert_sizes(config.experts, config.hidden_size)
        packed.set_experts(PackedExperts(sizes, kind, plan.of_layer(layer, "experts")))
    if (altup := config.altup) is not None:
        packed.set_altup(PackedAltUp(altup.num_streams, altup.active, config.hidden_size, config.rms_norm_eps))
    if config.recurrent is not None and config.mixers[layer] in ("recurrent", "both"):
        recurrent = _recurrent_sizes(config.recurrent, config)
        packed.set_recurrent(PackedRecurrent(recurrent, kind, plan.of_layer(layer, "recurrent")))
    return packed


def set_parameter(layer: PackedLayer, name: list[str], value: Weight, *, is_first_rank: bool) -> None:
    """Set a weight or bias of a layer, except its norms, by its name in decoder.py after the layer's index.

    Args:
        layer: the layer.
        name: the parts of the name.
        value: the weights of this rank.
        is_first_rank: whether this rank adds the biases of outputs that the ranks sum.
    """
    match name:
        case ["mlp", "dense", module, kind]:
            set_parameter(layer, ["dense", module, kind], value, is_first_rank=is_first_rank)
        case ["mlp", "sparse", *rest] | ["mlp", *rest] if layer.experts is not None:
            _set_expert_weight(layer.experts, rest, value)
        case ["self_attn", "indexer", module, kind]:
            assert layer.latent is not None
            assert layer.latent.indexer is not None
            _set_index_parameter(layer.latent.indexer, f"{module}.{kind}", value)
        case [*_, module, "bias"] if module not in _COLUMN_PARALLEL and not is_first_rank:
            return
        case ["per_layer_input", "gate", "weight"]:
            assert layer.own_gate is not None
            layer.own_gate.set_weight(value)
        case ["per_layer_input", "projection", "weight"]:
            assert layer.own_projection is not None
            layer.own_projection.set_weight(value)
        case ["laurel", "left" | "right" as side, "weight"]:
            branch = layer.laurel_left if side == "left" else layer.laurel_right
            assert branch is not None
            branch.set_weight(_tensor(value))
        case ["altup", *rest]:
            assert layer.altup is not None
            _set_altup_parameter(layer.altup, ".".join(rest), _tensor(value))
        case ["layer_scalar"]:
            layer.set_output_scale(float(_tensor(value)))
        case ["recurrent", *rest]:
            assert layer.recurrent is not None
            _set_recurrent_parameter(layer.recurrent, rest, value)
        case ["self_attn", module, "weight"] if layer.latent is not None and module in _LATENT:
            _set_latent_parameter(layer.latent, module, value)
        case [_, "gate_up_proj", "weight"]:
            layer.set_gate_up_weight(value)
        case [_, "gate_up_proj", "bias"]:
            layer.set_gate_up_bias(_tensor(value))
        case [_, module, "weight"]:
            _linear(layer, module).set_weight(value)
        case [_, module, "bias"]:
            _linear(layer, module).set_bias(_tensor(value))
        case _:
            raise AssertionError(f"no parameter of a layer is called {'.'.join(name)}")


# --- shapes ---------------------------------------------------------------------------------------------------------


def _layer_shape(config: ModelConfig, index: int) -> LayerShape:
    has_attention, kv_heads = config.mixers[index] in ("attention", "both"), config.kv_heads(index)
    shape = config.latent if has_attention else None
    latent = None if shape is None else _latent_sizes(shape, config, index)
    return LayerShape(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads if has_attention else 0,
        num_kv_heads=kv_heads.count if has_attention else 0,
        head_dim=kv_heads.dim if latent is None else latent.cached_dim,
        stores=index not in config.layer_heads.shared,
        intermediate_size=config.intermediate_size_of(index) if config.has_dense(index) else 0,
        window=config.windows[index],
        norm_eps=config.rms_norm_eps,
        qkv_bias=config.qkv_bias if latent is None else config.output_bias,
        output_bias=config.output_bias,
        mlp_bias=config.mlp_bias,
        scale=config.attention_scale,
        softcap=config.attention_softcap,
        norms_values=config.normalizes_values,
        norms_all_heads=config.qk_norm == "projection",
        activation=config.activation,
        residual_multiplier=config.residual_multiplier,
        gates_attention=config.gates_attention,
        has_mlp_gate=config.has_feed_forward_gate,
        latent=latent,
        own_width=config.per_layer_width,
        own_index=index,
        laurel_rank=0 if config.altup is None else config.altup.laurel_rank,
        gate_cutoff=config.gate_cutoffs.get(index),
    )


def _latent_sizes(shape: LatentShape, config: ModelConfig, layer: int) -> LatentSizes:
    return LatentSizes(
        num_heads=config.num_heads,
        query_rank=shape.query_rank,
        rank=shape.rank,
        nope_dim=shape.nope_dim,
        rope_dim=shape.rope_dim,
        value_dim=shape.value_dim,
        norm_eps=shape.norm_eps,
        index=_index_sizes(shape, config.hidden_size) if shape.has_indexer(layer) else None,
    )


def _index_sizes(shape: LatentShape, hidden_size: int) -> IndexerSizes:
    assert shape.index is not None
    assert shape.query_rank is not None
    return IndexerSizes(
        hidden_size=hidden_size,
        query_rank=shape.query_rank,
        num_heads=shape.index.num_heads,
        head_dim=shape.index.head_dim,
        top_k=shape.index.top_k,
        norm_eps=shape.index.norm_eps,
    )


def _expert_sizes(experts: ExpertsShape, hidden_size: int) -> ExpertSizes:
    groups = experts.groups
    return ExpertSizes(
        hidden_size=hidden_size,
        num_experts=experts.num_experts,
        top_k=experts.experts_per_token,
        intermediate_size=experts.intermediate_size,
        shared_intermediate_size=experts.shared_intermediate_size,
        normalizes_weights=experts.normalizes_weights,
        norm_epsilon=experts.norm_epsilon,
        is_sigmoid=experts.scores == "sigmoid",
        weight_scale=experts.weight_scale,
        has_gate=experts.has_gate,
        activation=experts.activation,
        gates_shared_expert=experts.gates_shared_expert,
        latent_size=experts.latent_size,
        num_groups=1 if groups is None else groups.count,
        top_groups=1 if groups is None else groups.chosen,
        groups_sum_two=groups is not None and groups.score == "two_best",
        scales_inputs=experts.scales_inputs,
    )


def _recurrent_sizes(shape: RecurrentShape, config: ModelConfig) -> RecurrentSizes:
    match shape:
        case ConvShape():
            return RecurrentSizes(
                kind=RecurrentKind.SHORT_CONV,
                hidden_size=config.hidden_size,
                num_heads=1,
                head_dim=shape.inner_size,
                conv_width=shape.conv_width,
                in_bias=shape.has_bias,
                out_bias=shape.has_bias,
            )
        case GatedDeltaShape():
            return RecurrentSizes(
                kind=RecurrentKind.GATED_DELTA,
                hidden_size=config.hidden_size,
                num_heads=shape.num_heads,
                num_groups=shape.num_key_heads,
                head_dim=shape.value_dim,
                state_size=shape.key_dim,
                conv_width=shape.conv_width,
                norm_group=shape.value_dim,
                norm_eps=shape.norm_eps,
                largest_beta=shape.largest_beta,
            )
        case KimiDeltaShape():
            return RecurrentSizes(
                kind=RecurrentKind.KIMI_DELTA,
                hidden_size=config.hidden_size,
                num_heads=shape.num_heads,
                num_groups=shape.num_heads,
                head_dim=shape.head_dim,
                state_size=shape.head_dim,
                conv_width=shape.conv_width,
                norm_group=shape.head_dim,
                has_sigmoid=True,
                norm_eps=shape.norm_eps,
            )
    return _mamba_sizes(shape, config)


def _mamba_sizes(shape: MambaShape, config: ModelConfig) -> RecurrentSizes:
    return RecurrentSizes(
        kind=RecurrentKind.MAMBA,
        hidden_size=config.hidden_size,
        num_heads=shape.num_heads,
        num_groups=shape.num_groups,
        head_dim=shape.head_dim,
        state_size=shape.state_size,
        conv_width=shape.conv_width,
        norm_group=shape.inner_size // shape.num_groups,
        gates_first=shape.norm == "after_gate",
        norm_eps=config.rms_norm_eps,
        step_limits=shape.step_limits,
        in_bias=shape.in_bias,
        out_bias=shape.out_bias,
    )


def _tensor(value: Weight) -> torch.Tensor:
    assert isinstance(value, torch.Tensor), "only linear layers have codes"
    return value


# --- parameters -----------------------------------------------------------------------------------------------------


def _linear(layer: PackedLayer, module: str) -> PackedLinear:
    linears = {
        "qkv_proj": layer.qkv,
        "qkv_a_proj": layer.qkv,
        "o_proj": layer.output,
        "up_proj": layer.gate_up,
        "down_proj": layer.down,
    }
    return linears[module]


def _set_altup_parameter(altup: PackedAltUp, name: str, value: torch.Tensor) -> None:
    """Set a parameter of the residual streams, by its name in decoder.py after ``altup``."""
    match name:
        case "router":
            altup.set_router(value)
        case "router_norm.weight":
            altup.set_router_norm(value)
        case "predictions":
            altup.set_predictions(value)
        case "corrections":
            altup.set_corrections(value)
        case "output_scale":
            altup.set_output_scale(value)
        case _:
            raise AssertionError(f"no parameter of residual streams is called {name}")


def _set_latent_parameter(latent: PackedLatent, module: str, weight: Weight) -> None:
    """Set a parameter of latent attention, by the name of its module in decoder.py."""
    match module:
        case "q_a_layernorm":
            latent.set_query_norm(_tensor(weight))
        case "kv_a_layernorm":
            latent.set_latent_norm(_tensor(weight))
        case "q_b_proj":
            assert latent.query is not None
            latent.query.set_weight(weight)
        case "kv_b_proj":
            latent.set_head_matrices(_tensor(weight))


def _set_index_parameter(indexer: PackedIndexer, name: str, value: Weight) -> None:
    """Set a parameter of an indexer, by its name in decoder.py after ``indexer``."""
    match name:
        case "wq_b.weight":
            indexer.query.set_weight(value)
        case "wk.weight":
            indexer.key.set_weight(value)
        case "weights_proj.weight":
            assert isinstance(value, torch.Tensor)
            indexer.head_weights.set_weight(value)
        case "k_norm.weight":
            indexer.set_key_norm(_tensor(value))
        case "k_norm.bias":
            indexer.set_key_bias(_tensor(value))
        case _:
            raise AssertionError(f"no parameter of an indexer is called {name}")


def _set_expert_weight(experts: PackedExperts, name: list[str], weight: Weight) -> None:
    """Set a weight of a sparse layer's feed-forward, by its name in decoder.py after ``mlp``."""
    match name:
        case ["gate", "weight"]:
            experts.set_router_weight(_tensor(weight))
        case ["router_norm", "weight"]:
            experts.set_router_norm(_tensor(weight))
        case ["expert_scale"]:
            experts.set_expert_scales(_tensor(weight))
        case ["expert_bias"]:
            experts.set_choice_bias(_tensor(weight))
        case ["experts", index, "up_proj"]:
            experts.set_up_weight(int(index), weight)
        case ["shared_expert", "up_proj", "weight"]:
            experts.set_shared_up_weight(weight)
        case ["experts", index, "gate_up_proj"]:
            experts.set_gate_up_weight(int(index), weight)
        case ["experts", index, "down_proj"]:
            experts.set_down_weight(int(index), weight)
        case ["shared_expert", "gate_up_proj", "weight"]:
            experts.set_shared_gate_up_weight(weight)
        case ["shared_expert", "down_proj", "weight"]:
            experts.set_shared_down_weight(weight)
        case ["shared_expert_gate", "weight"]:
            experts.set_shared_gate_weight(_tensor(weight))
        case ["fc1_latent_proj", "weight"]:
            experts.set_latent_in_weight(weight)
        case ["fc2_latent_proj", "weight"]:
            experts.set_latent_out_weight(weight)
        case _:
            raise AssertionError(f"no parameter of experts is called {'.'.join(name)}")


def _set_recurrent_parameter(recurrent: PackedRecurrent, name: list[str], value: Weight) -> None:
    """Set a parameter of a recurrent layer, by its name in decoder.py after ``recurrent``."""
    match name:
        case ["in_proj", "weight"]:
            recurrent.input.set_weight(value)
        case ["in_proj", "bias"]:
            recurrent.input.set_bias(_tensor(value))
        case ["out_proj", "weight"]:
            recurrent.output.set_weight(value)
        case ["out_proj", "bias"]:
            recurrent.output.set_bias(_tensor(value))
        case ["f_b_proj" | "g_b_proj" as module, "weight"]:
            linear = recurrent.steps if module == "f_b_proj" else recurrent.gates
            assert linear is not None
            linear.set_weight(value)
        case ["conv", "weight"]:
            recurrent.set_conv_weight(_tensor(value))
        case ["conv", "bias"]:
            recurrent.set_conv_bias(_tensor(value))
        case ["A_log"]:
            recurrent.set_decay(_tensor(value))
        case ["dt_bias"]:
            recurrent.set_step_bias(_tensor(value))
        case ["D"]:
            recurrent.set_skip(_tensor(value))
        case ["gated_norm", "weight"]:
            recurrent.set_norm(_tensor(value))
        case _:
            raise AssertionError(f"no parameter of a recurrent layer is called {'.'.join(name)}")
