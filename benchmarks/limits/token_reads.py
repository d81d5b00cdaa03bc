"""What computing one token of one stream must read at least, from a checkpoint: its active weights and its caches."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from engine.kv.layer_cache import LayerCache, SharedWith, State, TokenCache, bytes_per_state
from engine.models.checkpoint.checkpoint import open_checkpoint
from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.model_config import ModelConfig
from kernels.attention.window import most_keys

__all__ = ["TokenReads"]

_LOOKED_UP = ("embed_tokens_per_layer.weight",)  # of which a token reads one row
_EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight")  # looked up too, where the head has weights of its own
_ROUTED = re.compile(r"\.experts\.")  # not the shared ones


@dataclass(frozen=True)
class TokenReads:
    """What one token reads.

    Attributes:
        weights: elements; the head is read once, whether it is the embedding or not, and of experts the chosen ones.
        caches: what the layers cache; one that shares the keys and values of another reads those again.
    """

    weights: float
    caches: tuple[LayerCache, ...]

    @classmethod
    def of(cls, path: str | Path) -> TokenReads:
        """Return what a token of a checkpoint that our own decoder computes reads.

        Raises:
            ModelLoadError: our own decoder does not compute it.
        """
        config = ModelConfig.from_hf(load_hf_config(path))
        experts = config.experts
        share = 1.0 if experts is None else experts.experts_per_token / experts.num_experts
        with open_checkpoint(path) as checkpoint:
            names = checkpoint.names
            unread = _LOOKED_UP + _EMBEDDINGS if _has_head(names) else _LOOKED_UP
            weights = sum(
                math.prod(checkpoint.shape_of(name)) * (share if _ROUTED.search(name) else 1.0)
                for name in names
                if not name.endswith(unread)
            )
        return cls(weights, config.layer_caches)

    def bytes_at(self, context: int, weight_bytes: int, element_bytes: int) -> float:
        """Return the bytes that the token after ``context`` others reads.

        Args:
            context: tokens.
            weight_bytes: of one weight.
            element_bytes: of one element in the caches of tokens; states are float32.
        """
        layers = [self.caches[layer.index] if isinstance(layer, SharedWith) else layer for layer in self.caches]
        elements = sum(_elements_at(layer, context) for layer in layers if not isinstance(layer, State | SharedWith))
        return self.weights * weight_bytes + elements * element_bytes + bytes_per_state(self.caches)


def _elements_at(layer: TokenCache, context: int) -> int:
    return layer.elements_per_token * (context if layer.window is None else min(context, most_keys(layer.window)))


def _has_head(names: list[str]) -> bool:
    return any(name.endswith("lm_head.weight") for name in names)
