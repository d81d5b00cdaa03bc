"""TransformersConfig: what a config of transformers says about a model that its own modules compute.

It refuses what they would compute wrongly on a paged cache of mixed batches. The attention layers' shape is not read
here: decoder.py measures it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch

from engine.errors import ConfigError, ModelLoadError, shown
from engine.models.config.families.architectures import TENSOR_PARALLEL, WITH_SINKS, WITH_VALUE_DIMS, require_proven
from engine.models.config.files.config_json import num_positions
from engine.models.config.model_shape import ModelShape, attends_causally
from engine.models.config.shapes.rope import check_longrope_length, longrope_length
from engine.models.config.values.limits import require_integer
from kernels.linear.registry import DEQUANTIZE

__all__ = ["TransformersConfig"]

_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, kw_only=True)
class TransformersConfig(ModelShape):
    """A model that transformers' modules compute.

    Attributes:
        not_ours: why our own decoder does not compute it, though it knows the architecture.
    """

    not_ours: str | None = None

    @classmethod
    def from_hf(cls, config: Any, not_ours: str | None = None) -> Self:
        """Read a transformers config.

        Raises:
            ModelLoadError: for an architecture or an option whose answers were not proven to equal transformers'.
        """
        architecture = require_proven((getattr(config, "architectures", None) or ["none"])[0])
        if reason := _wrong_option(config):
            raise ModelLoadError(
                f"config.json has {reason}, which is not supported for '{architecture}'; "
                "docs/models.md lists what is served"
            )
        options = {"softcap"} if getattr(config, "attn_logit_softcapping", None) is not None else set()
        if architecture in WITH_SINKS:
            options.add("sinks")
        if architecture in WITH_VALUE_DIMS:
            options.add("value_dims")
        return cls(
            architecture=architecture,
            vocab_size=require_integer(config, "vocab_size"),
            max_position_embeddings=num_positions(
                require_integer(config, "max_position_embeddings"), getattr(config, "rope_parameters", None)
            ),
            dtype=config.dtype if isinstance(config.dtype, torch.dtype) else None,
            attention_options=frozenset(options),
            longrope_length=min(filter(None, map(longrope_length, _rope_parameters(config))), default=None),
            not_ours=not_ours,
        )

    def check_options(self, *, max_model_len: int, tensor_parallel_size: int, quantization: str | None) -> None:
        """Raise ConfigError if the engine's options do not fit the model."""
        why = "" if self.not_ours is None else f", because our own decoder does not: {self.not_ours}"
        problem = f"is not supported for '{self.architecture}', which transformers' modules compute{why}"
        if tensor_parallel_size > 1 and self.architecture not in TENSOR_PARALLEL:
            raise ConfigError(problem, param="tensor_parallel_size", value=tensor_parallel_size, remedy="set 1")
        if quantization not in (None, DEQUANTIZE):
            raise ConfigError(problem, param="quantization", value=quantization, remedy="leave it out")
        check_longrope_length(self.longrope_length, max_model_len)


def _wrong_option(config: Any) -> str | None:
    """Return an option of the config that changes the model in a way that the adapter does not compute, or None."""
    if not attends_causally(config):
        return f"use_bidirectional_attention={shown(config.use_bidirectional_attention)}"
    for name in ("add_cross_attention", "is_encoder_decoder"):
        if getattr(config, name, None):
            return f"{name}={shown(getattr(config, name))}"
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in _LAYER_TYPES:
            return f"a layer of the type {shown(kind)}"
    pattern = getattr(
        config, "hybrid_layer_pattern", None
    )  # of MiMo V2 Flash, which transformers' class takes as given
    if pattern is not None and pattern != [int(kind == "sliding_attention") for kind in config.layer_types]:
        return f"hybrid_layer_pattern={shown(pattern)}"
    if getattr(config, "reorder_and_upcast_attn", False):
        return "reorder_and_upcast_attn=True"
    return None


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the parameters of every RoPE of the model: one, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    yield parameters
    yield from (parameter for parameter in parameters.values() if isinstance(parameter, dict))
