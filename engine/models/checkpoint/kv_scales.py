"""KVScales: what a layer's keys and values are divided by in a cache of FP8, as quantised checkpoints store it.

    model.layers.0.self_attn.k_scale               compressed-tensors; vLLM adds attn., older programs have kv_scale
    model.layers.0.self_attn.k_proj.k_scale        ModelOpt
    model.layers.0.self_attn.k_proj.output_scale   Quark, and older compressed-tensors

Any scale is right for any text: it only moves what FP8 can represent. So of several for a layer the largest is taken.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.errors import ModelLoadError
from engine.models.checkpoint.files.safetensors_header import StoredTensor
from engine.models.checkpoint.files.tensor_files import TensorFiles
from engine.models.checkpoint.plain_tensor import PLAIN_DTYPES, read_plain

__all__ = ["KVScales", "StoredKVScales"]

# The layers of multi-token prediction, mtp.layers, are not the model's.
_NAME = re.compile(r"(?:^|(?<!mtp)\.)layers\.(\d+)\.(?:\w+\.)+?(?:(k|v|kv)_scale|(k|v)_proj\.output_scale)$")
_FIELDS = {"k": ("key",), "v": ("value",), "kv": ("key", "value")}


@dataclass(frozen=True, slots=True)
class KVScales:
    """The scales of one layer."""

    key: float = 1.0
    value: float = 1.0


class StoredKVScales:
    """The scales among a checkpoint's tensors, which are read on demand.

    Args:
        tensors: of the checkpoint, by name.
        files: that hold them, open.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor], files: TensorFiles) -> None:
        self._tensors = {name: tensor for name, tensor in tensors.items() if _NAME.search(name)}
        self._files = files

    def read(self) -> dict[int, KVScales]:
        """Return the scales of the layers that have some, by index; a scale that is missing is 1.

        Raises:
            ModelLoadError: if one cannot be read, or is not a positive, finite number.
        """
        scales: dict[int, dict[str, float]] = {}
        for name, tensor in self._tensors.items():
            match = _NAME.search(name)
            assert match is not None
            layer, value = int(match[1]), self._read(name, tensor)
            of_layer = scales.setdefault(layer, {})
            for field in _FIELDS[match[2] or match[3]]:
                of_layer[field] = max(value, of_layer.get(field, 0.0))
        return {layer: KVScales(**of_layer) for layer, of_layer in scales.items()}

    def _read(self, name: str, tensor: StoredTensor) -> float:
        where = f"the scale '{name}' of '{tensor.path}'"
        remedy = "download the file again, or set kv_cache_dtype to auto"
        if tensor.dtype not in PLAIN_DTYPES or not math.prod(tensor.shape):
            raise ModelLoadError(f"{where} is {tensor.dtype} {list(tensor.shape)}; {remedy}")
        numbers = torch.empty(tensor.shape, dtype=torch.float32)
        try:
            read_plain(self._files, tensor, numbers, None)
        except OSError as error:
            raise ModelLoadError(f"{where} could not be read: {error}") from error
        scale = float(numbers.max())
        if not 0.0 < scale < math.inf:
            raise ModelLoadError(f"{where} is {scale:g}, and a scale is positive; {remedy}")
        return scale
