"""PackedWeight: a weight that one or several stored tensors hold in a quantised format, and how to read it."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch

from engine.errors import ModelLoadError
from engine.models.checkpoint.files.safetensors_header import StoredTensor
from engine.models.checkpoint.files.tensor_files import TensorFiles
from engine.models.checkpoint.finite import is_finite
from engine.models.checkpoint.own_memory import own_memory
from engine.models.checkpoint.sharding import Shard
from kernels.coded_weight import CodedMatrix, CodeFormat

__all__ = ["PART_DTYPES", "MatrixParts", "PackedWeight", "Scratch", "read_packed", "row_blocks"]

BLOCK_ELEMENTS = 2**21  # that are dequantised at once: their codes stay in a processor's cache
PIECE_BYTES = 2**20  # of codes that are read and looked at: they stay there, too

_DECODED_DTYPES = (torch.float32, torch.bfloat16)  # that formats can write at once

PART_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "U32": torch.int32,  # the same bits: torch shifts and masks no unsigned ones
    "I64": torch.int64,
}


class Scratch(threading.local):
    """Memory of each thread that reads weights, used again for each part: new pages cost as much as reading them."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def octets(self, name: str, size: int) -> torch.Tensor:
        """Return ``size`` bytes that hold anything; the next call with this name may return the same."""
        if (memory := self._memory.get(name)) is None or len(memory) < size:
            self._memory.pop(name, None)  # is freed before more is allocated
            memory = self._memory[name] = own_memory((size,), torch.uint8)
        return memory[:size]

    def kept(self, part: torch.Tensor) -> torch.Tensor:
        """Return a part that may be a view of this memory, as one that is not."""
        start = part.untyped_storage().data_ptr()
        own = (memory.untyped_storage().data_ptr() for memory in self._memory.values())
        return part.clone() if start in own else part


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedWeight(ABC):
    """A weight in a quantised format. A subclass is a format.

    Attributes:
        format: what the log and messages call it.
        is_tall: whether the parts hold stacked matrices as one, of all their rows.
        name: of the weight, as the model has it.
        parts: the stored tensors, by the names that ``dequantise`` knows. Each has the weight's leading dimensions.
        shape: of the weight as the model has it; leading dimensions count stacked matrices.
        read_by_rows: parts that have the same number of elements for each row of the weight, in order. Only the rows
            that are dequantised are read of these, so nothing else of a large weight is in memory.
        shared: parts that all of the stacked matrices have in common, without leading dimensions.
        row_multiple: blocks of rows that are dequantised begin at a multiple of it.
    """

    format: ClassVar[str]
    is_tall: ClassVar[bool] = False

    name: str
    parts: Mapping[str, StoredTensor]
    shape: tuple[int, ...]
    read_by_rows: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()
    row_multiple: int = 1

    def prepared(self, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the parts of a matrix that are read at once, with what ``dequantise`` would repeat for each block."""
        return parts

    def are_bounded(self, parts: Mapping[str, torch.Tensor]) -> bool:
        """Whether the parts show that all numbers are finite in float32 and bfloat16. Else each number is looked at.

        Args:
            parts: as those of ``dequantise``.
        """
        return False

    @abstractmethod
    def dequantise(
        self, parts: Mapping[str, torch.Tensor], rows: range, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return rows of one matrix, float32 [len(rows), columns], which the caller may change; or write them.

        Args:
            parts: of one matrix, without leading dimensions; of those in ``read_by_rows`` only the ``rows``.
            rows: begins at a multiple of ``row_multiple``, and ends at one or at the last row.
            out: [len(rows), columns], of any dtype, on the CPU. A format that can write the rows there at once does so,
                and returns it.
        """

    @property
    def code_format(self) -> CodeFormat | None:
        """How its codes are kept as they are; None if the weight can only be dequantised."""
        return None

    @property
    def input_order(self) -> torch.Tensor | None:
        """The input that each column of its codes multiplies, int32 [columns]; None: they are in order."""
        return None

    @property
    def why_not_coded(self) -> str:
        """Why it has no ``code_format``, as the log says it of several weights."""
        return "their layout is not computed from its codes"

    def coded(self, parts: Mapping[str, torch.Tensor], rows: range) -> CodedMatrix:
        """Return rows of one matrix as codes of ``code_format``, which is not None; arguments as for ``dequantise``."""
        raise NotImplementedError

    @property
    def keeps_stored_codes(self) -> bool:
        """Whether ``coded`` keeps the codes as they are stored, so that no rows are unpacked to more memory."""
        return False

    def are_codes_finite(self, octets: torch.Tensor) -> bool:
        """Whether some rows of the first part, bytes [any], have only finite floats, and scales between them."""
        return True

    def write_transposed(self, parts: Mapping[str, torch.Tensor], out: torch.Tensor) -> bool:
        """Write a whole matrix to ``out``, [columns, rows], in one pass; return False if the format cannot do that.

        Args:
            parts: all of one matrix.
            out: of any dtype, on the CPU.
        """
        return False

    @property
    def path(self) -> Path:
        """The file that holds the first part."""
        return next(iter(self.parts.values())).path

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes in the files."""
        return sum(part.stop - part.start for part in self.parts.values())

    @property
    def is_convolution(self) -> bool:
        """Whether it is [channels, 1, width]: each channel's convolution is a row of one matrix."""
        return len(self.shape) == 3 and self.shape[1] == 1

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of one of the stacked matrices, or of all together; a vector's are its elements and 1."""
        if self.is_tall:
            return math.prod(self.shape[:-1]), self.shape[-1]
        if self.is_convolution:
            return self.shape[0], self.shape[2]
        rows, columns = self.shape[-2:] if len(self.shape) > 1 else (*self.shape, 1)
        return rows, columns

    @property
    def stacked(self) -> tuple[int, ...]:
        """The leading dimensions, which count stacked matrices."""
        return () if self.is_convolution or self.is_tall else self.shape[:-2]

    @property
    def num_matrices(self) -> int:
        """How many matrices are stacked."""
        return math.prod(self.stacked)

    def index_of_rows(self, rows: range, length: int) -> slice:
        """Return where rows are in a part that is read by rows and has this length."""
        num_rows, _ = self.matrix_shape
        return slice(rows.start * length // num_rows, rows.stop * length // num_rows)

    def error(self, part: str, problem: str) -> ModelLoadError:
        """Return the error about the contents of a part."""
        return ModelLoadError(
            f"the {part} of '{self.name}' ({self.format}) in '{self.parts[part].path}' {problem}; download the file "
            "again"
        )


def read_packed(
    files: TensorFiles, packed: PackedWeight, out: torch.Tensor, shard: Shard | None, scratch: Scratch
) -> bool:
    """Fill ``out``, contiguous and on any device, with a weight or a ``shard`` of it, converted to its dtype.

    Returns:
        Whether all numbers are finite, which is seen sooner while they are in a processor's cache.

    Raises:
        ModelLoadError: if the contents of a part are invalid.
        OSError: if a file cannot be read.
    """
    is_stack_member = shard is not None and shard.num_stacked is not None
    indices = [shard.index] if shard is not None and is_stack_member else range(packed.num_matrices)
    first, columns = 0, slice(None)
    if packed.is_tall:
        first, indices = (indices[0] * packed.shape[-2] if is_stack_member else 0), range(1)
        out = out.flatten(0, -2)
    if shard is not None and shard.dim == 0:
        first += shard.start
    elif shard is not None:
        columns = slice(shard.start, shard.stop)
    if len(packed.shape) == 1:
        out = out.unsqueeze(1)
    elif packed.is_convolution:
        out = out.squeeze(1)
    are_finite = [
        _read_matrix(MatrixParts(files, packed, index, scratch), matrix, first, columns)
        for index, matrix in zip(indices, out.view(len(indices), *out.shape[-2:]), strict=True)
    ]
    return all(are_finite)


@dataclass(frozen=True, slots=True)
class MatrixParts:
    """The stored parts of one of the stacked matrices of a weight."""

    files: TensorFiles
    packed: PackedWeight
    index: int
    scratch: Scratch

    def whole(self) -> dict[str, torch.Tensor]:
        """Return the parts that are read at once, prepared."""
        packed = self.packed
        return packed.prepared({name: self._read(name, None) for name in packed.parts.keys() - packed.read_by_rows})

    def by_rows(self, rows: range) -> dict[str, torch.Tensor]:
        """Return rows of the others. They last until the next call."""
        return {name: self._read(name, rows) for name in self.packed.read_by_rows}

    def kept_rows(self, rows: range) -> tuple[dict[str, torch.Tensor], bool]:
        """Return what ``by_rows`` does in memory of its own, and whether the codes are known to be finite.

        They are looked at while they are in a processor's cache.
        """
        packed, parts, are_finite = self.packed, {}, True
        for index, (name, stored) in enumerate(packed.parts.items()):
            if name in packed.read_by_rows:
                extent = self._extent(name, rows)
                memory = own_memory((extent.size,), torch.uint8)
                step = max(1, PIECE_BYTES // max(1, extent.row_bytes)) * extent.row_bytes
                for start in range(0, extent.size, step):
                    piece = memory[start : start + step]
                    self.files.read_into(piece.numpy().data, stored, extent.offset + start)
                    are_finite = are_finite and (index > 0 or packed.are_codes_finite(piece))
                parts[name] = memory.view(PART_DTYPES[stored.dtype]).view(extent.shape)
        return parts, are_finite

    def block(self, num_rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for dequantised rows."""
        memory = self.scratch.octets("block", num_rows * columns * dtype.itemsize)
        return memory.view(dtype).view(num_rows, columns)

    def _read(self, name: str, rows: range | None) -> torch.Tensor:
        stored, extent = self.packed.parts[name], self._extent(name, rows)
        memory = self.scratch.octets(name, extent.size)
        self.files.read_into(memory.numpy().data, stored, extent.offset)
        return memory.view(PART_DTYPES[stored.dtype]).view(extent.shape)

    def _extent(self, name: str, rows: range | None) -> _Extent:
        stored = self.packed.parts[name]
        is_shared = name in self.packed.shared
        shape = stored.shape if is_shared else stored.shape[len(self.packed.stacked) :]
        size = (stored.stop - stored.start) // (1 if is_shared else self.packed.num_matrices)
        offset, row_bytes = 0 if is_shared else self.index * size, size // max(1, shape[0] if shape else 1)
        if rows is not None:
            own = self.packed.index_of_rows(rows, shape[0])
            shape = (own.stop - own.start, *shape[1:])
            offset, size = offset + own.start * row_bytes, shape[0] * row_bytes
        return _Extent(offset, size, shape, row_bytes)


class _Extent(NamedTuple):
    """Where rows of a part are in its tensor, in bytes, and their shape."""

    offset: int
    size: int
    shape: tuple[int, ...]
    row_bytes: int


def row_blocks(packed: PackedWeight, wanted: range) -> Iterator[tuple[range, range]]:
    """Yield rows of a matrix that are read at once, and those of them that are wanted."""
    all_rows, all_columns = packed.matrix_shape
    multiple = packed.row_multiple
    step = max(1, BLOCK_ELEMENTS // (all_columns or 1) // multiple) * multiple
    for start in range(wanted.start // multiple * multiple, wanted.stop, step):
        rows = range(start, min(start + step, -(-wanted.stop // multiple) * multiple, all_rows))
        yield rows, range(max(wanted.start, rows.start), min(wanted.stop, rows.stop))


def _read_matrix(parts: MatrixParts, out: torch.Tensor, first: int, columns: slice) -> bool:
    """Fill ``out`` with rows from ``first`` on, and some columns, of one matrix; return whether all are finite."""
    packed, whole = parts.packed, parts.whole()
    _, all_columns = packed.matrix_shape
    last, are_finite = first + len(out), True
    dtype = out.dtype if out.dtype in _DECODED_DTYPES else torch.float32
    is_direct = out.device.type == "cpu" and out.dtype == dtype and out.shape[1] == all_columns
    for rows, wanted in row_blocks(packed, range(first, last)):
        target = out[wanted.start - first : wanted.stop - first]
        target_or_scratch = target if is_direct and wanted == rows else parts.block(len(rows), all_columns, dtype)
        own = whole | parts.by_rows(rows)
        block = packed.dequantise(own, rows, target_or_scratch)
        if block.data_ptr() != target.data_ptr():  # else it is written already
            target.copy_(block[wanted.start - rows.start : wanted.stop - rows.start, columns])
        is_bounded = out.dtype in _DECODED_DTYPES and packed.are_bounded(own)
        are_finite = are_finite and (is_bounded or is_finite(target))
    return are_finite
