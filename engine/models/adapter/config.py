"""TransformersConfig: what a config of transformers says about a model that its own modules compute.

It refuses what they would compute wrongly on a paged cache of mixed batches. The attention layers' shape is not read
here: decoder.py measures it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch

from engine.errors import ConfigError, ModelLoadError
from engine.models.adapter.architectures import WITH_SINKS, require_proven
from engine.models.rope_config import check_longrope_length
from engine.models.shape import ModelShape

__all__ = ["TransformersConfig"]

_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, kw_only=True)
class TransformersConfig(ModelShape):
    """A model that transformers' modules compute.

    Attributes:
        longrope_length: positions up to which LongRoPE uses its factors for short contexts; None without LongRoPE.
    """

    longrope_length: int | None

    @classmethod
    def from_hf(cls, config: Any) -> Self:
        """Read a transformers config.

        Raises:
            ModelLoadError: for an architecture or an option whose answers were not proven to equal transformers'.
        """
        architecture = (getattr(config, "architectures", None) or ["none"])[0]
        require_proven(architecture)
        if reason := _wrong_option(config):
            raise ModelLoadError(f"{reason}, which is not supported for '{architecture}'")
        options = {"softcap"} if getattr(config, "attn_logit_softcapping", None) is not None else set()
        if architecture in WITH_SINKS:
            options.add("sinks")
        return cls(
            architecture=architecture,
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_position_embeddings,
            dtype=config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32,
            attention_options=frozenset(options),
            longrope_length=min(_longrope_lengths(config), default=None),
        )

    def check_options(self, *, max_model_len: int, tensor_parallel_size: int, quantization: str | None) -> None:
        """Raise ConfigError if the engine's options do not fit the model."""
        if tensor_parallel_size > 1:
            raise ConfigError(
                f"is not supported for '{self.architecture}', which transformers' modules compute",
                param="tensor_parallel_size",
                value=tensor_parallel_size,
                remedy="set 1",
            )
        if quantization is not None:
            raise ConfigError(
                f"is not supported for '{self.architecture}', which transformers' modules compute",
                param="quantization",
                value=quantization,
                remedy="leave it out",
            )
        check_longrope_length(self.longrope_length, max_model_len)


def _wrong_option(config: Any) -> str | None:
    """Return an option of the config that changes the model in a way that the adapter does not compute, or None."""
    for name in ("use_bidirectional_attention", "add_cross_attention", "is_encoder_decoder"):
        if getattr(config, name, None):
            return f"{name}={getattr(config, name)}"
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in _LAYER_TYPES:
            return f"a layer of the type '{kind}'"
    if getattr(config, "reorder_and_upcast_attn", False):
        return "reorder_and_upcast_attn=True"
    return None


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the parameters of every RoPE of the model: one, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    yield parameters
    yield from (one for one in parameters.values() if isinstance(one, dict))


def _longrope_lengths(config: Any) -> Iterator[int]:
    for parameters in _rope_parameters(config):
        if parameters.get("rope_type") == "longrope":
            yield int(parameters["original_max_position_embeddings"])
