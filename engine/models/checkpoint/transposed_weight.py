"""transposed: a weight whose matrices are stored the other way round, as [columns, rows]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.errors import ModelLoadError
from engine.models.checkpoint.files.safetensors_header import StoredTensor
from engine.models.checkpoint.packed_weight import PackedWeight
from kernels.dequant.transposed import TURNED_ELEMENTS, write_transposed

__all__ = ["transposed", "transposed_packed"]


@dataclass(frozen=True, kw_only=True, eq=False)
class _TransposedWeight(PackedWeight):
    """A quantised weight whose matrices are stored as [columns, rows]. A matrix is read at once."""

    inner: PackedWeight

    def __post_init__(self) -> None:
        """Take the format's name, which is the class's own elsewhere."""
        object.__setattr__(self, "format", self.inner.format)

    def prepared(self, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the parts of one matrix, prepared."""
        return self.inner.prepared(parts)

    def are_bounded(self, parts: Mapping[str, torch.Tensor]) -> bool:
        """Whether the parts show that all numbers are finite."""
        return self.inner.are_bounded(parts)

    def dequantise(
        self, parts: Mapping[str, torch.Tensor], rows: range, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the rows of one matrix."""
        num_stored, columns = self.inner.matrix_shape
        out = torch.empty(columns, num_stored) if out is None else out
        if self.inner.write_transposed(parts, out):
            return out
        multiple = self.inner.row_multiple
        step = max(1, TURNED_ELEMENTS // (columns or 1) // multiple) * multiple
        scratch = out.new_empty(min(step, num_stored), columns)
        for start in range(0, num_stored, step):
            stored = range(start, min(start + step, num_stored))
            own = {
                name: part[self.inner.index_of_rows(stored, len(part))] if name in self.inner.read_by_rows else part
                for name, part in parts.items()
            }
            values = self.inner.dequantise(own, stored, scratch[: len(stored)])
            write_transposed(out[:, stored.start : stored.stop], values)
        return out  # all rows: see row_multiple


def transposed(weight: StoredTensor | PackedWeight) -> StoredTensor | PackedWeight:
    """Return a weight with the shape that its matrices have when they are transposed."""
    *stacked, columns, rows = weight.shape
    if isinstance(weight, PackedWeight):
        return transposed_packed(weight)
    return weight._replace(shape=(*stacked, rows, columns), is_transposed=not weight.is_transposed)


def transposed_packed(weight: PackedWeight) -> PackedWeight:
    """Return a quantised weight with the shape that its matrices have when they are transposed."""
    *stacked, columns, rows = weight.shape
    if weight.is_tall and stacked:
        raise ModelLoadError(
            f"'{weight.name}' of '{weight.path}' is stored as {list(weight.shape)}, transposed, which {weight.format} "
            "does not allow; give the checkpoint in another format"
        )
    return _TransposedWeight(
        name=weight.name,
        parts=weight.parts,
        shape=(*stacked, rows, columns),
        shared=weight.shared,
        row_multiple=rows,
        inner=weight,
    )
