"""read_gguf_header: the metadata of a GGUF file, and the types, shapes and positions of its tensors, all checked.

The format is documented at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: magic, version, two counts,
key-value pairs, a table of tensors, and the tensors, each at a multiple of the alignment. Nothing is allocated because
of a number in the file: each count is first compared with the bytes that are left.
"""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import ModelLoadError, shown
from engine.models.gguf.cursor import Cursor, FormatError
from kernels.dequant.gguf_types import GGUF_TYPES, GgufType

__all__ = ["GgufHeader", "GgufTensor", "read_gguf_header"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # version 1 has counts of 32 bits, and was replaced within weeks
MAX_DIMENSIONS = 4  # as in ggml
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 2**20
_SMALLEST_PAIR, _SMALLEST_TENSOR = 13, 32  # bytes in the header
_UNREADABLE_TYPES = {  # their names, for messages
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S",
    22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
    40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
_REMEDY = "download the file again"


class GgufTensor(NamedTuple):
    """Where a tensor is stored, and its type and shape."""

    path: Path
    type: GgufType
    shape: tuple[int, ...]  # as torch has it: rows before columns
    start: int  # bytes from the start of the file
    stop: int


class GgufHeader(NamedTuple):
    """What a GGUF file says before its tensors."""

    path: Path
    metadata: dict[str, Any]  # arrays are lists
    tensors: dict[str, GgufTensor]  # by llama.cpp's names, in the order of the file


def read_gguf_header(path: Path) -> GgufHeader:
    """Return the header of one file.

    Raises:
        ModelLoadError: if it is malformed, has a tensor of a type that is not read, or does not describe the file.
    """
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise ModelLoadError(f"'{path}' could not be read: {error}") from error
    try:
        size = os.fstat(file).st_size
        if size == 0:
            raise _error(path, "it is empty")
        with mmap.mmap(file, 0, access=mmap.ACCESS_READ) as mapped:
            return _parse(path, Cursor(mapped, size))
    except OSError as error:
        raise ModelLoadError(f"'{path}' could not be read: {error}") from error
    except FormatError as error:
        raise _error(path, str(error)) from error
    finally:
        os.close(file)


def _parse(path: Path, cursor: Cursor) -> GgufHeader:
    if cursor.take(4, "its magic number") != MAGIC:
        raise FormatError("it does not begin with the letters GGUF")
    version = cursor.integer("<I", "its version")
    if version not in VERSIONS:
        if version in (1, *(int.from_bytes(number.to_bytes(4, "little"), "big") for number in (1, *VERSIONS))):
            kind = "of version 1" if version == 1 else "big-endian"
            raise ModelLoadError(f"'{path}' is {kind}, which is not supported; convert it with llama.cpp's tools")
        raise FormatError(f"its version is {version}; supported: 2 and 3")
    num_tensors = cursor.count("<Q", _SMALLEST_TENSOR, "its number of tensors")
    num_pairs = cursor.count("<Q", _SMALLEST_PAIR, "its number of metadata entries")
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.string("a key of its metadata")
        if key in metadata:
            raise FormatError(f"its metadata has the key {shown(key)} twice")
        metadata[key] = cursor.value(f"the metadata {shown(key)}")
    return GgufHeader(path, metadata, _tensors(path, cursor, num_tensors, _alignment(metadata)))


def _alignment(metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise FormatError(f"general.alignment={shown(alignment)} is not a power of two up to {MAX_ALIGNMENT}")
    return alignment


def _tensors(path: Path, cursor: Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    """Return the tensors of the table, which follow one another in the file, each at a multiple of ``alignment``."""
    entries: dict[str, tuple[GgufType, tuple[int, ...], int]] = {}
    for _ in range(count):
        name = cursor.string("the name of a tensor")
        if name in entries:
            raise FormatError(f"it has the tensor {shown(name)} twice")
        entries[name] = _entry(path, cursor, name)
    data = expected = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, (kind, shape, offset) in entries.items():
        num_bytes = kind.row_bytes(math.prod(shape))
        if data + offset != expected:
            raise FormatError(
                f"the tensor {shown(name)} begins at byte {data + offset}, but should at {expected}, after the one "
                "before it"
            )
        tensors[name] = GgufTensor(path, kind, shape, expected, expected + num_bytes)
        if expected + num_bytes > cursor.size:
            raise FormatError(f"it has {cursor.size} bytes, so it is cut off in the tensor {shown(name)}")
        expected = -(-(expected + num_bytes) // alignment) * alignment
    return tensors


def _entry(path: Path, cursor: Cursor, name: str) -> tuple[GgufType, tuple[int, ...], int]:
    """Return type, shape and offset of the tensor ``name``, whose entry continues at the cursor."""
    what = f"the entry of the tensor {shown(name)}"
    num_dimensions = cursor.integer("<I", what)
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise FormatError(f"the tensor {shown(name)} has {num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} are")
    sizes = [cursor.integer("<Q", what) for _ in range(num_dimensions)]
    number, offset = cursor.integer("<I", what), cursor.integer("<Q", what)
    if number in _UNREADABLE_TYPES:
        supported = ", ".join(kind.name for kind in GGUF_TYPES.values())
        raise ModelLoadError(
            f"the tensor {shown(name)} of '{path}' has the type {_UNREADABLE_TYPES[number]}, which is not supported; "
            f"give a file of another quantisation: {supported}"
        )
    if number not in GGUF_TYPES:
        raise FormatError(f"the tensor {shown(name)} has the unknown type {number}")
    kind = GGUF_TYPES[number]
    if not all(sizes) or sizes[0] % kind.block_elements or math.prod(sizes) >= 2**63:
        raise FormatError(
            f"the tensor {shown(name)} of type {kind.name} has the sizes {shown(sizes)}; all are positive, and the "
            f"first is a multiple of {kind.block_elements}"
        )
    return kind, tuple(reversed(sizes)), offset


def _error(path: Path, problem: str) -> ModelLoadError:
    return ModelLoadError(f"'{path}' is not a readable GGUF file: {problem}; {_REMEDY}")
