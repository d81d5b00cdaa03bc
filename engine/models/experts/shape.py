"""ExpertsShape: which layers have experts, how many, and how a token chooses among them, read from a config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from engine.errors import ConfigError, ModelLoadError

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
    def from_hf(cls, config: Any) -> ExpertsShape | None:
        """Read a transformers config of Qwen2-MoE, Qwen3-MoE or Mixtral; None if no layer has experts.

        Raises:
            ModelLoadError: if a token needs more experts than a layer has, or none.
        """
        num_experts = int(config.num_experts)  # transformers maps Mixtral's num_local_experts to it
        step, dense = getattr(config, "decoder_sparse_step", 1), getattr(config, "mlp_only_layers", None) or ()
        layers = frozenset(
            layer
            for layer in range(config.num_hidden_layers)
            if num_experts > 0 and layer not in dense and (layer + 1) % step == 0
        )
        if not layers:
            return None
        if not 0 < config.num_experts_per_tok <= num_experts:
            raise ModelLoadError(
                f"num_experts_per_tok={config.num_experts_per_tok} is not between 1 and the {num_experts} experts of a "
                "layer; correct config.json"
            )
        return cls(
            num_experts=num_experts,
            experts_per_token=config.num_experts_per_tok,
            intermediate_size=getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
            normalizes_weights=bool(getattr(config, "norm_topk_prob", True)),  # Mixtral always does
            shared_intermediate_size=getattr(config, "shared_expert_intermediate_size", 0),
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
