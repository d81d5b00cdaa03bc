"""ExpertsShape: which layers have experts, how many, and how a token chooses among them, read from a config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from engine.errors import ModelLoadError, UnsupportedModelError, shown
from engine.models.config.families.table import ExpertsFormat
from engine.models.config.values.divided import divided
from engine.models.config.values.limits import require_divisor, require_integer, require_number
from kernels.layer_ops.base import Activation

__all__ = ["ExpertGroups", "ExpertsShape"]

Scores = Literal["softmax", "sigmoid"]
GroupScore = Literal["best", "two_best"]


@dataclass(frozen=True, kw_only=True)
class ExpertGroups:
    """Groups of experts: a token chooses some of the groups, and then experts in these.

    Attributes:
        count: of groups, which have equally many experts.
        chosen: how many of them a token chooses.
        score: what a group is chosen by: its experts' best score, or the sum of their two best ones.
    """

    count: int
    chosen: int
    score: GroupScore


@dataclass(frozen=True, kw_only=True)
class ExpertsShape:
    """The experts of a model's sparse layers; all these layers are alike.

    Attributes:
        num_experts: routed experts of a layer.
        experts_per_token: how many of them compute a token, the most probable ones.
        intermediate_size: features of one expert's feed-forward.
        normalizes_weights: whether the chosen experts' scores are divided by their sum.
        shared_intermediate_size: features of the expert that computes every token; 0 if there is none.
        layers: indices of the layers that have experts; the others have a dense feed-forward, or none.
        scores: what becomes of the router's logits.
        norm_epsilon: is added to the sum of the chosen scores.
        weight_scale: factor of the chosen experts' weights.
        has_choice_bias: whether a bias is added to the scores for the choice, and not to the weights.
        groups: None: all experts are one group.
        float32_router: whether the router's weights are float32 in any model.
        gates_shared_expert: whether the shared expert's output is multiplied by the sigmoid of a logit.
        has_gate: whether an expert is a SwiGLU; else it squares what a ReLU leaves.
        activation: of a gate.
        has_expert_scales: whether the checkpoint has a factor of each expert's weight.
        is_beside_dense: whether these layers have a dense feed-forward, too, whose output is added.
        latent_size: features that routed experts read and write, by projections around all of them; None: no such.
        scales_inputs: whether the chosen experts' weights multiply what they read, and not what they return.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalizes_weights: bool
    shared_intermediate_size: int
    layers: frozenset[int]
    scores: Scores = "softmax"
    norm_epsilon: float = 0.0
    weight_scale: float = 1.0
    has_choice_bias: bool = False
    groups: ExpertGroups | None = None
    float32_router: bool = False
    gates_shared_expert: bool = True
    has_gate: bool = True
    activation: Activation = "silu"
    has_expert_scales: bool = False
    is_beside_dense: bool = False
    latent_size: int | None = None
    scales_inputs: bool = False

    @classmethod
    def from_hf(cls, config: Any, experts_format: ExpertsFormat) -> ExpertsShape | None:
        """Read a transformers config; None if no layer has experts.

        Args:
            config: of transformers, which maps Mixtral's num_local_experts to num_experts.
            experts_format: of the family.

        Raises:
            ModelLoadError: if a token needs more experts than a layer has, or none, or a size is not an integer.
            UnsupportedModelError: for experts that a token chooses by groups.
        """
        shape = _READERS[experts_format](config)
        if not shape.layers or not shape.num_experts:
            return None
        field = _TOP_K.get(experts_format, "num_experts_per_tok")
        experts_per_token = require_integer(config, field)
        if experts_per_token > shape.num_experts:
            raise ModelLoadError(
                f"{field}={experts_per_token} is not between 1 and the {shape.num_experts} experts of a "
                "layer; correct config.json"
            )
        return replace(shape, experts_per_token=experts_per_token)

    def shard(self, size: int) -> ExpertsShape:
        """Return the share of one of ``size`` tensor-parallel ranks: a part of the features of every expert.

        Raises:
            ConfigError: if the features cannot be divided by ``size``.
        """
        return replace(
            self,
            intermediate_size=divided(self.intermediate_size, size, "features of an expert"),
            shared_intermediate_size=divided(self.shared_intermediate_size, size, "features of the shared expert"),
        )


def _qwen(config: Any) -> ExpertsShape:
    """Read Qwen2-MoE, Qwen3-MoE, Qwen3-Next or Qwen3.5-MoE, whose weights are always normalised."""
    return ExpertsShape(
        num_experts=require_integer(config, "num_experts", smallest=0),
        experts_per_token=0,
        intermediate_size=require_integer(config, "moe_intermediate_size"),
        normalizes_weights=bool(getattr(config, "norm_topk_prob", True)),
        shared_intermediate_size=_shared(config, "shared_expert_intermediate_size"),
        layers=_sparse_layers(config) if hasattr(config, "decoder_sparse_step") else _all_layers(config),
    )


def _mixtral(config: Any) -> ExpertsShape:
    return ExpertsShape(
        num_experts=require_integer(config, "num_experts", smallest=0),
        experts_per_token=0,
        intermediate_size=require_integer(config, "intermediate_size"),
        normalizes_weights=True,
        shared_intermediate_size=0,
        layers=_all_layers(config),
    )


def _lfm2(config: Any) -> ExpertsShape:
    num_dense = require_integer(config, "num_dense_layers", smallest=0)
    return ExpertsShape(
        num_experts=require_integer(config, "num_experts", smallest=0),
        experts_per_token=0,
        intermediate_size=require_integer(config, "moe_intermediate_size"),
        normalizes_weights=bool(config.norm_topk_prob),
        shared_intermediate_size=0,
        layers=frozenset(range(num_dense, config.num_hidden_layers)),
        scores="sigmoid",
        norm_epsilon=1e-6,
        weight_scale=require_number(config, "routed_scaling_factor"),
        has_choice_bias=bool(config.use_expert_bias),
    )


def _granite(config: Any) -> ExpertsShape:
    return ExpertsShape(
        num_experts=require_integer(config, "num_local_experts", smallest=0),
        experts_per_token=0,
        intermediate_size=require_integer(config, "intermediate_size"),
        normalizes_weights=True,
        shared_intermediate_size=require_integer(config, "shared_intermediate_size"),
        layers=_all_layers(config),
        gates_shared_expert=False,
    )


def _nemotron(config: Any) -> ExpertsShape:
    if config.n_group != 1:
        raise UnsupportedModelError(
            f"config.json has n_group={shown(config.n_group)}, and only a choice among all experts is supported; "
            "docs/models.md lists what is served"
        )
    has_latent = config.moe_latent_size is not None
    return ExpertsShape(
        num_experts=require_integer(config, "n_routed_experts", smallest=0),
        experts_per_token=0,
        intermediate_size=require_integer(config, "moe_intermediate_size"),
        normalizes_weights=bool(config.norm_topk_prob),
        shared_intermediate_size=require_integer(config, "moe_shared_expert_intermediate_size"),
        layers=frozenset(layer for layer, kind in enumerate(config.layer_types) if kind == "moe"),
        scores="sigmoid",
        norm_epsilon=1e-20,
        weight_scale=require_number(config, "routed_scaling_factor"),
        has_choice_bias=True,
        float32_router=True,
        gates_shared_expert=False,
        has_gate=False,
        latent_size=require_integer(config, "moe_latent_size") if has_latent else None,
    )


def _gemma4(config: Any) -> ExpertsShape:
    has_experts = bool(getattr(config, "enable_moe_block", False))
    return ExpertsShape(
        num_experts=require_integer(config, "num_experts") if has_experts else 0,
        experts_per_token=0,
        intermediate_size=require_integer(config, "moe_intermediate_size") if has_experts else 0,
        normalizes_weights=True,
        shared_intermediate_size=0,
        layers=_all_layers(config),
        activation="gelu_tanh",
        has_expert_scales=True,
        is_beside_dense=True,
    )


def _llama4(config: Any) -> ExpertsShape:
    inner = require_integer(config, "intermediate_size")
    return ExpertsShape(
        num_experts=require_integer(config, "num_local_experts", smallest=0),
        experts_per_token=0,
        intermediate_size=inner,
        normalizes_weights=False,
        shared_intermediate_size=inner,
        layers=frozenset(_listed_layers(config, "moe_layers")) & _all_layers(config),
        scores="sigmoid",
        gates_shared_expert=False,
        scales_inputs=True,
    )


def _deepseek_v2(config: Any) -> ExpertsShape:
    _require(config, "norm_topk_prob", False)
    has_groups = config.topk_method == "group_limited_greedy"
    if not has_groups:
        _require(config, "topk_method", "greedy")
    return replace(_deepseek(config), groups=_groups(config, "best") if has_groups else None, float32_router=True)


def _deepseek_v3(config: Any) -> ExpertsShape:
    return replace(
        _deepseek(config),
        normalizes_weights=bool(config.norm_topk_prob),
        scores="sigmoid",
        norm_epsilon=1e-20,
        has_choice_bias=True,
        groups=_groups(config, "two_best"),
        float32_router=True,
    )


def _kimi(config: Any) -> ExpertsShape:
    if hasattr(config, "moe_router_activation_func"):
        _require(config, "moe_router_activation_func", "sigmoid")
    return _deepseek_v3(config)


def _mistral4(config: Any) -> ExpertsShape:
    return replace(
        _deepseek(config),
        normalizes_weights=bool(config.norm_topk_prob),
        norm_epsilon=1e-20,
        groups=_groups(config, "two_best"),
    )


def _deepseek(config: Any) -> ExpertsShape:
    """Read what DeepSeek's models, GLM's with latent attention and Mistral 4 have in common."""
    inner = require_integer(config, "moe_intermediate_size")
    if hasattr(config, "moe_layer_freq"):
        _require(config, "moe_layer_freq", 1)
    return ExpertsShape(
        num_experts=require_integer(config, _count_field(config), smallest=0),
        experts_per_token=0,
        intermediate_size=inner,
        normalizes_weights=False,
        shared_intermediate_size=inner * require_integer(config, "n_shared_experts", smallest=0),
        layers=_after_dense_layers(config),
        weight_scale=require_number(config, "routed_scaling_factor"),
        gates_shared_expert=False,
    )


def _count_field(config: Any) -> str:
    """Return the name of the field that has the number of experts."""
    return "n_routed_experts" if hasattr(config, "n_routed_experts") else "num_experts"


def _after_dense_layers(config: Any) -> frozenset[int]:
    count, types = config.num_hidden_layers, getattr(config, "mlp_layer_types", None)
    if types is None:
        return frozenset(range(require_integer(config, "first_k_dense_replace", smallest=0), count))
    if not isinstance(types, list) or len(types) != count or not set(types) <= {"dense", "sparse"}:
        raise ModelLoadError(
            f"mlp_layer_types={shown(types)} does not say dense or sparse of each of {count} layers; correct "
            "config.json"
        )
    return frozenset(layer for layer, kind in enumerate(types) if kind == "sparse")


def _groups(config: Any, score: GroupScore) -> ExpertGroups | None:
    """Return the groups of experts; None if a token may choose among all experts."""
    if config.n_group is None:
        return None
    field = _count_field(config)
    count, chosen = require_divisor(config, "n_group", field), require_integer(config, "topk_group")
    num_experts = require_integer(config, field)
    if chosen > count or (score == "two_best" and count > 1 and num_experts < 2 * count):
        raise ModelLoadError(
            f"topk_group={chosen} of n_group={count} groups of {field}={num_experts} cannot be chosen; correct "
            "config.json"
        )
    if chosen * (num_experts // count) < require_integer(config, "num_experts_per_tok"):
        raise ModelLoadError(
            f"num_experts_per_tok={config.num_experts_per_tok} is more than topk_group={chosen} of n_group={count} "
            f"groups of {field}={num_experts} have; correct config.json"
        )
    return ExpertGroups(count=count, chosen=chosen, score=score) if chosen < count else None


def _require(config: Any, name: str, value: object) -> None:
    """Raise UnsupportedModelError unless a field has the only value that is computed."""
    if getattr(config, name) != value:
        raise UnsupportedModelError(
            f"config.json has {name}={shown(getattr(config, name))}, and only {shown(value)} is supported; "
            "docs/models.md lists what is served"
        )


_TOP_K: dict[ExpertsFormat, str] = {"gemma4": "top_k_experts"}  # fields that are not num_experts_per_tok
_READERS: dict[ExpertsFormat, Callable[[Any], ExpertsShape]] = {
    "qwen": _qwen,
    "mixtral": _mixtral,
    "lfm2": _lfm2,
    "granite": _granite,
    "nemotron": _nemotron,
    "gemma4": _gemma4,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "mistral4": _mistral4,
    "kimi": _kimi,
    "llama4": _llama4,
}


def _shared(config: Any, name: str) -> int:
    return require_integer(config, name, smallest=0) if hasattr(config, name) else 0


def _all_layers(config: Any) -> frozenset[int]:
    return frozenset(range(config.num_hidden_layers))


def _listed_layers(config: Any, name: str) -> list[int]:
    """Return the layers that a field lists; none if it is absent or null."""
    layers = getattr(config, name, None) or []
    if not isinstance(layers, list) or any(type(layer) is not int for layer in layers):
        raise ModelLoadError(f"{name}={shown(layers)} is not a list of layers; correct config.json")
    return layers


def _sparse_layers(config: Any) -> frozenset[int]:
    """Return the indices of the layers that have experts in Qwen's models."""
    step, dense = require_integer(config, "decoder_sparse_step"), _listed_layers(config, "mlp_only_layers")
    return frozenset(
        layer for layer in range(config.num_hidden_layers) if layer not in dense and (layer + 1) % step == 0
    )
