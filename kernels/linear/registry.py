"""The table of linear methods. It imports no torch, so that an engine's config can be checked without it.

To add a method: implement `LinearMethod` (base.py) in a new module of this folder, and add its line to LINEAR_METHODS.
The values that the engine's option `quantization` accepts, the choice for a device and a dtype, and the error messages
follow from the table.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEQUANTIZE", "LINEAR_METHODS", "QUANTIZATIONS", "LinearEntry", "quantization_devices"]

_PACKED = ("float32", "bfloat16")
_ANY = ("float32", "bfloat16", "float16", "float64")
_ALL = ("batch_invariant", "experts")


@dataclass(frozen=True, slots=True)
class LinearEntry:
    """Where a linear method is implemented, and what it computes.

    Attributes:
        module: name in this folder; imported when the method is chosen, with the libraries that it needs.
        class_name: the subclass of `LinearMethod`.
        devices: types of devices, as torch names them.
        dtypes: of a checkpoint's weights and of activations, as torch names them.
        quantization: the value of the engine's option that asks for it; None: it keeps the weights as they are.
        packed: the C kernels of kernels/cpu compute it, and then a whole decoder.
        options: what a model or the config may need: `experts`: the weights of experts are kept likewise, or as they
            are; `batch_invariant`: a row's result has the same bits whatever the other rows are.
    """

    module: str
    class_name: str
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    quantization: str | None = None
    packed: bool = False
    options: tuple[str, ...] = ()


LINEAR_METHODS: dict[str, LinearEntry] = {  # the first that can run is taken, so the fastest of a device comes first
    "packed":      LinearEntry("packed", "PackedLinears",     ("cpu",), _PACKED, packed=True, options=_ALL),
    "packed_int8": LinearEntry("packed", "PackedInt8Linears", ("cpu",), _PACKED, "int8", packed=True, options=_ALL),
    "packed_int4": LinearEntry("packed", "PackedInt4Linears", ("cpu",), _PACKED, "int4", packed=True, options=_ALL),
    "torch_int8":  LinearEntry("torch_int8", "TorchInt8Linears", ("cpu",), _ANY, "int8"),
    "torch":       LinearEntry("torch", "TorchLinears", ("cpu", "cuda"), _ANY, options=("experts",)),
    "triton":      LinearEntry("triton", "TritonLinears", ("cuda",), _ANY, options=_ALL),
}  # fmt: skip

DEQUANTIZE = "dequantize"  # the value that keeps no codes of a quantised checkpoint
QUANTIZATIONS = tuple(
    dict.fromkeys([*(entry.quantization for entry in LINEAR_METHODS.values() if entry.quantization), DEQUANTIZE])
)


def quantization_devices(quantization: str | None) -> tuple[str, ...]:
    """Return the types of devices that the table has a method with this quantization for."""
    wanted = None if quantization == DEQUANTIZE else quantization
    entries = (entry for entry in LINEAR_METHODS.values() if entry.quantization == wanted)
    return tuple(dict.fromkeys(device for entry in entries for device in entry.devices))
