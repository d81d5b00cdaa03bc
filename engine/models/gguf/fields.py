"""Fields: the metadata of a GGUF file, read with the types and ranges that a model needs."""

from __future__ import annotations

import math
import os
import struct
from typing import Any

from engine.errors import ModelLoadError, shown
from engine.models.gguf.file import GgufFile

__all__ = ["Fields"]

_FLOAT = struct.Struct("<f")
_MAX_NUMBERS = 2**16  # of a tensor that is read with the metadata


class Fields:
    """The metadata of a model, whose keys begin with its architecture.

    Args:
        gguf: the file.

    Attributes:
        architecture: as llama.cpp names it.

    Raises:
        ModelLoadError: if the file does not name its architecture. The methods raise it for a key that is absent and
            has no default, or has a value of another type.
    """

    def __init__(self, gguf: GgufFile) -> None:
        self._gguf = gguf
        self.architecture = self.string("general.architecture")

    def __contains__(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self._gguf.metadata

    def error(self, problem: str) -> ModelLoadError:
        """Return the error about what the file says."""
        return ModelLoadError(f"'{self._gguf.path}' could not be read: {problem}")

    def integer(self, key: str, default: int | None = None, *, smallest: int = 1) -> int:
        """Return an integer of at least ``smallest``; a list, with one for each layer, must have all alike."""
        value = self._value(f"{self.architecture}.{key}", default)
        if isinstance(value, list) and value and all(number == value[0] for number in value):
            value = value[0]
        if isinstance(value, list):
            raise self.error(
                f"{self.architecture}.{key}={shown(value)} differs between layers, which is not supported; give "
                "another model"
            )
        if type(value) is not int or value < smallest:
            raise self._wrong(key, value, f"an integer from {smallest}")
        return value

    def integers(self, key: str, count: int) -> list[int]:
        """Return an integer from 0 for each of ``count`` layers; one that is not a list is that of all."""
        value = self._value(f"{self.architecture}.{key}", None)
        values = value if isinstance(value, list) else [value] * count
        if len(values) != count or any(type(number) is not int or number < 0 for number in values):
            raise self._wrong(key, value, f"an integer from 0 for each of {count} layers")
        return values

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number. Those of 32 bits come as the shortest decimal with the same bits, as in a config.json."""
        value = self._value(f"{self.architecture}.{key}", default)
        if type(value) not in (int, float):
            raise self._wrong(key, value, "a number")
        short = float(f"{value:.7g}")
        return short if abs(short) < 3e38 and _FLOAT.pack(short) == _packed(value) else float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """Return a number that can be divided by, as ``number`` does."""
        value = self.number(key, default)
        if not 0 < value < math.inf:
            raise self._wrong(key, value, "a positive number")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        """Return a truth value."""
        value = self._value(f"{self.architecture}.{key}", default)
        if type(value) is not bool:
            raise self._wrong(key, value, "true or false")
        return value

    def string(self, full_key: str, default: str | None = None) -> str:
        """Return a text, of a key that is not of one architecture."""
        value = self._value(full_key, default)
        if not isinstance(value, str):
            raise self.error(f"{full_key}={shown(value)} is not a text; download the file again")
        return value

    def raw(self, key: str) -> Any:
        """Return any value of the architecture's, None if it is absent."""
        return self._gguf.metadata.get(f"{self.architecture}.{key}")

    def tensor(self, name: str, count: int) -> list[float] | None:
        """Return the numbers of a small float32 tensor, None if the file has no such tensor."""
        tensor = self._gguf.tensors.get(name)
        if tensor is None:
            return None
        if tensor.type.name != "F32" or tensor.shape != (count,) or count > _MAX_NUMBERS:
            raise self.error(
                f"the tensor '{name}' has type {tensor.type.name} and shape {list(tensor.shape)}, but its metadata "
                f"asks for F32 and {[count]}; download the file again"
            )
        try:
            with open(tensor.path, "rb", buffering=0) as file:
                numbers = os.pread(file.fileno(), tensor.stop - tensor.start, tensor.start)
            return list(struct.unpack(f"<{count}f", numbers))
        except (OSError, struct.error) as error:
            raise self.error(f"the tensor '{name}': {error}") from error

    def _value(self, full_key: str, default: Any) -> Any:
        value = self._gguf.metadata.get(full_key, default)
        if value is None:
            raise self.error(f"it has no {full_key}; download the file again")
        return value

    def _wrong(self, key: str, value: object, expected: str) -> ModelLoadError:
        return self.error(f"{self.architecture}.{key}={shown(value)} is not {expected}; download the file again")


def _packed(value: float) -> bytes:
    try:
        return _FLOAT.pack(value)
    except OverflowError:
        return b""
