"""GGUF: rows of blocks, which hold codes and scales together, in the layouts that llama.cpp's converter makes.

Numbers that are stored as they are, and in transformers' layout, are plain tensors. Everything else is a GgufPacked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.errors import ModelLoadError, shown
from engine.models.checkpoint.composed_weight import Entry
from engine.models.checkpoint.files.safetensors_header import StoredTensor
from engine.models.checkpoint.packed_weight import PackedWeight
from engine.models.gguf.file import GgufFile
from engine.models.gguf.header import GgufTensor
from engine.models.gguf.names import gguf_weights
from engine.models.gguf.weight import GgufWeight
from kernels.coded_weight import CodedMatrix, CodeFormat, StoredLayout
from kernels.cpu.stored_codes import is_gguf_finite
from kernels.dequant.gguf import FORMATS, dequantise_gguf
from kernels.dequant.gguf_types import GgufType

__all__ = ["gguf_entries"]

_PLAIN = ("F32", "F16", "BF16")
_FIRST, _SECOND = "weight", "up"


@dataclass(frozen=True, kw_only=True, eq=False)
class GgufPacked(PackedWeight):
    """Part ``weight``, or two parts that alternate: ``weight`` (gates) and ``up``. See GgufWeight."""

    format = "GGUF"
    types: Mapping[str, GgufType]  # of the parts
    weight: GgufWeight

    def dequantise(
        self, parts: Mapping[str, torch.Tensor], rows: range, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return rows of one matrix in float32."""
        weight = self.weight
        if weight.is_transposed:
            columns = [self._columns(parts[name], kind, rows) for name, kind in self.types.items()]
            return torch.stack(columns, dim=1).flatten(0, 1).t()
        if not weight.is_changed:
            return dequantise_gguf(parts[_FIRST], self.types[_FIRST], out=out)
        if weight.is_joined:
            return torch.cat(list(self._joined(parts, rows)))
        decoded = [dequantise_gguf(parts[name], kind) for name, kind in self.types.items()]
        values = decoded[0] if len(decoded) == 1 else torch.stack(decoded, dim=2).flatten(1)
        if weight.heads:
            half = self.row_multiple // 2
            values = values.view(-1, half, 2, values.shape[1]).transpose(1, 2).flatten(0, 2)
        if weight.row_order is not None:
            values = values[list(weight.row_order)]
        if weight.column_order is not None:
            values = values[:, list(weight.column_order)]
        if weight.is_decay:
            return values.neg_().log_()
        return values - 1.0 if weight.has_one_added else values

    @property
    def code_format(self) -> CodeFormat | None:
        """How its codes are kept as they are; None if the file's numbers or columns are changed."""
        weight = self.weight
        is_changed = weight.is_transposed or weight.is_joined or weight.column_order or weight.is_decay
        if is_changed or weight.has_one_added or len(self.types) > 1:
            return None
        return FORMATS.get(self.types[_FIRST].name)

    def coded(self, parts: Mapping[str, torch.Tensor], rows: range) -> CodedMatrix:
        """Return rows of the matrix as codes."""
        kind, form = self.types[_FIRST], self.code_format
        assert form is not None
        rows_of_blocks = parts[_FIRST]
        none = torch.empty(len(rows_of_blocks), 0, dtype=form.outer_dtype)  # they are in the blocks
        layout = StoredLayout(kind.name)
        matrix = CodedMatrix(
            format=form, codes=rows_of_blocks, outer_scales=none, layout=layout, stored_inputs=self.shape[-1]
        )
        if self.weight.heads:
            half = self.row_multiple // 2
            order = torch.arange(len(rows)).view(-1, half, 2).transpose(1, 2).flatten()
            matrix = matrix.rows(order)
        return matrix if self.weight.row_order is None else matrix.rows(list(self.weight.row_order))

    @property
    def keeps_stored_codes(self) -> bool:
        """Whether the codes are the stored bytes."""
        return True

    def are_codes_finite(self, octets: torch.Tensor) -> bool:
        """Whether the scales in blocks are finite."""
        return is_gguf_finite(octets, self.types[_FIRST])

    def _joined(self, parts: Mapping[str, torch.Tensor], rows: range) -> Iterator[torch.Tensor]:
        """Yield those of ``rows`` that are in each part, of two that are joined."""
        first = 0
        for name, kind in self.types.items():
            stored = parts[name]
            own = stored[max(rows.start - first, 0) : max(rows.stop - first, 0)]
            if len(own):
                yield dequantise_gguf(own, kind)
            first += len(stored)

    def _columns(self, stored: torch.Tensor, kind: GgufType, columns: range) -> torch.Tensor:
        """Return some columns of stored rows, float32 [num_rows, len(columns)]."""
        first, last = kind.row_bytes(columns.start), kind.row_bytes(columns.stop)
        return dequantise_gguf(stored[:, first:last], kind)


def gguf_entries(gguf: GgufFile, open_file: Callable[[Path], int]) -> dict[str, Entry]:
    """Return the weights of a file, by transformers' names.

    Args:
        gguf: the file, or the first of several.
        open_file: returns a descriptor of a file.

    Raises:
        ModelLoadError: if the heads do not divide the queries or keys.
        OSError: if a file cannot be opened.
    """
    paths = dict.fromkeys(tensor.path for tensor in gguf.tensors.values())
    files = {path: open_file(path) for path in paths}
    return {name: _entry(name, weight, files) for name, weight in gguf_weights(gguf).items()}


def _entry(name: str, weight: GgufWeight, files: Mapping[Path, int]) -> Entry:
    first = weight.parts[0]
    if first.type.name in _PLAIN and not weight.is_changed:
        return StoredTensor(first.path, files[first.path], first.type.name, weight.shape, first.start, first.stop)
    parts = {part: _bytes(tensor, files) for part, tensor in zip((_FIRST, _SECOND), weight.parts, strict=False)}
    types = dict(zip(parts, (tensor.type for tensor in weight.parts), strict=True))
    return GgufPacked(
        name=name,
        parts=parts,
        shape=weight.shape,
        read_by_rows=frozenset() if weight.is_transposed or weight.is_joined else frozenset(parts),
        row_multiple=_row_multiple(name, weight),
        types=types,
        weight=weight,
    )


def _bytes(tensor: GgufTensor, files: Mapping[Path, int]) -> StoredTensor:
    """Return a tensor as rows of bytes. The rows of a vector are its numbers."""
    *rows, columns = tensor.shape if len(tensor.shape) > 1 else (*tensor.shape, 1)
    shape = (*rows, tensor.type.row_bytes(columns))
    return StoredTensor(tensor.path, files[tensor.path], "U8", shape, tensor.start, tensor.stop)


def _row_multiple(name: str, weight: GgufWeight) -> int:
    """Return the multiple of rows that is dequantised at once: heads, all rows, or blocks that are transposed."""
    if weight.is_transposed:
        return max(tensor.type.block_elements for tensor in weight.parts)
    rows = weight.shape[0]
    if weight.row_order is not None:
        return rows
    if not weight.heads:
        return 1
    if rows % (2 * weight.heads):
        raise ModelLoadError(
            f"{shown(name)} of '{weight.parts[0].path}' has {rows} rows, which {weight.heads} heads do not divide; "
            "download the file again"
        )
    return rows // weight.heads
