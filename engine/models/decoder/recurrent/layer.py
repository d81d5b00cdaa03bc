"""recurrent_layer: the recurrent part of a layer, by its kind."""

from __future__ import annotations

from engine.models.config.model_config import ModelConfig
from engine.models.config.shapes.recurrent.gated_delta import GatedDeltaShape
from engine.models.config.shapes.recurrent.kimi_delta import KimiDeltaShape
from engine.models.config.shapes.recurrent.short_conv import ConvShape
from engine.models.decoder.recurrent.gated_delta import GatedDeltaNet
from engine.models.decoder.recurrent.kimi_delta import KimiDeltaAttention
from engine.models.decoder.recurrent.mamba import Mamba
from engine.models.decoder.recurrent.short_conv import ShortConv
from engine.models.tensor_parallel import TensorParallel
from kernels.recurrent.base import RecurrentOps

__all__ = ["RecurrentLayer", "recurrent_layer"]

RecurrentLayer = GatedDeltaNet | KimiDeltaAttention | Mamba | ShortConv


def recurrent_layer(
    config: ModelConfig, layer: int, parallel: TensorParallel, ops: RecurrentOps
) -> RecurrentLayer | None:
    """Return the recurrent part of a layer of a rank's share; None if it has none."""
    shape, mixer = config.recurrent, config.mixers[layer]
    if shape is None or mixer not in ("recurrent", "both"):
        return None
    cache = config.first_cache(layer) + (mixer == "both")  # after keys and values
    match shape:
        case GatedDeltaShape():
            return GatedDeltaNet(shape, config.hidden_size, cache, parallel, ops)
        case KimiDeltaShape():
            return KimiDeltaAttention(shape, config.hidden_size, cache, parallel, ops)
        case ConvShape():
            return ShortConv(shape, config.hidden_size, cache, parallel, ops)
    return Mamba(shape, config.hidden_size, config.rms_norm_eps, cache, parallel, ops)
