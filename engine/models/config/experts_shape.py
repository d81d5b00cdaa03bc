"""ExpertsShape: which layers have experts, how many, and how a token chooses among them, read from a config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from engine.errors import ConfigError, ModelLoadError, shown
from engine.models.config.limits import require_integer

__all__ = ["ExpertsShape"]


@dataclass(frozen=True, kw_only=True)
class ExpertsShape:
    """The experts of a model's sparse layers; all these layers are alike.

    Attributes:
        num_experts: routed experts of a layer.
        experts_per_token: how many of them compute a token, the most probable ones.
        intermediate_size: features of one expert's SwiGLU.
        normalizes_weights: whether the chosen experts' probabilities are divided by their sum.
        shared_intermediate_size: features of the expert that computes every token; 0 if there is none.
        layers: indices of the layers that have experts; the others have a dense feed-forward.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalizes_weights: bool
    shared_intermediate_size: int
    layers: frozenset[int]

    @classmethod
    def from_hf(cls, config: Any, *, has_options: bool) -> ExpertsShape | None:
        """Read a transformers config of Qwen2-MoE, Qwen3-MoE or Mixtral; None if no layer has experts.

        Args:
            config: of transformers, which maps Mixtral's num_local_experts to num_experts.
            has_options: see ``Family.has_expert_options``.

        Raises:
            ModelLoadError: if a token needs more experts than a layer has, or none, or a size is not an integer.
        """
        num_experts = require_integer(config, "num_experts", smallest=0)
        layers = _sparse_layers(config) if has_options else frozenset(range(config.num_hidden_layers))
        if not layers or not num_experts:
            return None
        experts_per_token = require_integer(config, "num_experts_per_tok")
        if experts_per_token > num_experts:
            raise ModelLoadError(
                f"num_experts_per_tok={experts_per_token} is not between 1 and the {num_experts} experts of a "
                "layer; correct config.json"
            )
        has_shared_expert = has_options and hasattr(config, "shared_expert_intermediate_size")
        return cls(
            num_experts=num_experts,
            experts_per_token=experts_per_token,
            intermediate_size=require_integer(config, "moe_intermediate_size" if has_options else "intermediate_size"),
            normalizes_weights=not has_options or bool(config.norm_topk_prob),
            shared_intermediate_size=(
                require_integer(config, "shared_expert_intermediate_size", smallest=0) if has_shared_expert else 0
            ),
            layers=layers,
        )

    def shard(self, size: int) -> ExpertsShape:
        """Return the share of one of ``size`` tensor-parallel ranks: a part of the features of every expert.

        Raises:
            ConfigError: if the features cannot be divided by ``size``.
        """
        for name, count in (("expert", self.intermediate_size), ("shared expert", self.shared_intermediate_size)):
            if count % size:
                raise ConfigError(
                    f"tensor_parallel_size={size} does not divide the {count} features of the model's {name}; "
                    "choose another size"
                )
        return replace(
            self,
            intermediate_size=self.intermediate_size // size,
            shared_intermediate_size=self.shared_intermediate_size // size,
        )


def _sparse_layers(config: Any) -> frozenset[int]:
    """Return the indices of the layers that have experts in Qwen's models."""
    step, dense = require_integer(config, "decoder_sparse_step"), getattr(config, "mlp_only_layers", None) or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise ModelLoadError(f"mlp_only_layers={shown(dense)} is not a list of layers; correct config.json")
    return frozenset(
        layer for layer in range(config.num_hidden_layers) if layer not in dense and (layer + 1) % step == 0
    )
