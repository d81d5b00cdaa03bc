"""group_weights: the entries of a checkpoint, with the tensors of each quantised weight as one. The table of formats.

A new format is a file of this folder and its line in FORMATS; its name in config files is a line of METHODS in
config/files/quantization.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from engine.errors import ModelLoadError
from engine.models.checkpoint.composed_weight import Entry
from engine.models.checkpoint.files.safetensors_header import StoredTensor
from engine.models.checkpoint.formats.bitsandbytes import bitsandbytes_weights
from engine.models.checkpoint.formats.compressed_integers import compressed_integers
from engine.models.checkpoint.formats.fp4 import fp4_weights
from engine.models.checkpoint.formats.fp8 import fp8_weights
from engine.models.checkpoint.formats.gptq_awq import gptq_awq_weights
from engine.models.checkpoint.formats.mlx import mlx_weights
from engine.models.checkpoint.formats.modelopt_int4 import modelopt_int4_weights
from engine.models.checkpoint.formats.module_tensors import ModuleTensors, modules_of
from engine.models.checkpoint.packed_weight import PackedWeight
from engine.models.checkpoint.scaled_inputs import with_scaled_inputs
from engine.models.config.files.quantization import Quantization

__all__ = ["FORMATS", "group_weights"]

FORMATS: tuple[Callable[[ModuleTensors], Iterator[PackedWeight]], ...] = (
    fp8_weights,
    fp4_weights,
    modelopt_int4_weights,
    compressed_integers,
    gptq_awq_weights,
    bitsandbytes_weights,
    mlx_weights,
)

_PLAIN = ("F32", "BF16", "F16", "F64")

# What quantised modules have beside their weights, for the quantisation of activations, which are not quantised here.
_OF_ACTIVATIONS = (
    "input_scale",
    "input_scale_ub",
    "activation_scale",
    "input_global_scale",
    "input_zero_point",
    "output_scale",
    "output_zero_point",
)
_ZERO_POINT = "weight_zero_point"  # also of formats without zero points, as zeros

# Factors of a layer's inputs, without which its weights are those of another model: ModelOpt's AWQ has the first.
_INPUT_FACTORS, _UNREAD_FACTORS = "pre_quant_scale", "smooth_scale"

# Scales of an FP8 KV cache, which kv_scales.py reads.
_OF_KV_CACHE = ("k_scale", "v_scale", "q_scale", "kv_scale", "prob_output_scale", "k_zero_point", "v_zero_point")


def group_weights(
    stored: Mapping[str, StoredTensor], quantization: Quantization, read: Callable[[StoredTensor], bytes]
) -> dict[str, Entry]:
    """Return the weights of a checkpoint by name: plain tensors, and quantised weights of several tensors.

    Args:
        stored: the tensors.
        quantization: what the checkpoint says.
        read: returns the bytes of a tensor.

    Raises:
        ModelLoadError: if tensors of a quantised weight do not fit each other, with a file and a tensor.
    """
    entries: dict[str, Entry] = {}
    for module in modules_of(stored, quantization, read):
        if any(tensor.dtype not in _PLAIN for tensor in module.tensors.values()):
            _require_plain_inputs(module)
            for find in FORMATS:
                for packed in find(module):
                    entries[packed.name] = _with_factors(module, packed)
                    _drop_unused(module, packed.name.removeprefix(f"{module.name}."))
        elif quantization.method is not None and "weight" in module.tensors:
            _drop_scales(module)  # Quark has the outputs' of keys and values that are not quantised
        for name in _OF_KV_CACHE:
            module.tensors.pop(name, None)
        entries.update((module.full_name(name), tensor) for name, tensor in module.tensors.items())
    return entries


def _require_plain_inputs(module: ModuleTensors) -> None:
    """Raise ModelLoadError if the module's inputs must be changed before they meet its weights."""
    if _UNREAD_FACTORS in module.tensors:
        raise ModelLoadError(
            f"'{module.full_name(_UNREAD_FACTORS)}' of '{module.tensors[_UNREAD_FACTORS].path}' scales the layer's "
            "inputs, which is not supported; give the checkpoint in a format of docs/models.md without it"
        )


def _with_factors(module: ModuleTensors, packed: PackedWeight) -> PackedWeight:
    """Return a quantised weight with the factors of its inputs, if the module has some."""
    factors = module.tensors.get(_INPUT_FACTORS)
    if factors is None:
        return packed
    if factors.dtype not in _PLAIN or len(packed.shape) != 2 or factors.shape != packed.shape[1:]:
        raise module.error(
            _INPUT_FACTORS, f"is {factors.dtype} {list(factors.shape)}, and the weight {list(packed.shape)}"
        )
    return with_scaled_inputs(packed, module.take(factors=_INPUT_FACTORS)["factors"])


def _drop_unused(module: ModuleTensors, weight: str) -> None:
    _drop_scales(module, "" if weight == "weight" else f"{weight}_")
    if weight == "weight" and _ZERO_POINT in module.tensors:
        if any(octet & 0x7F for octet in module.read(module.tensors[_ZERO_POINT])):  # -0.0 is zero, too
            raise module.error(_ZERO_POINT, "is not zero, and the weight's format has no zero points")
        del module.tensors[_ZERO_POINT]


def _drop_scales(module: ModuleTensors, prefix: str = "") -> None:
    """Remove the scales of a layer's inputs and outputs."""
    for name in _OF_ACTIVATIONS:
        module.tensors.pop(prefix + name, None)
