"""transposed: a weight whose matrices are stored the other way round, as [columns, rows]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.models.checkpoint.formats.table import Entry
from engine.models.checkpoint.packed_weight import PackedWeight
from kernels.dequant.transposed import transposed as matrix_transposed

__all__ = ["transposed"]


@dataclass(frozen=True, kw_only=True, eq=False)
class _TransposedWeight(PackedWeight):
    """A quantised weight whose matrices are stored as [columns, rows]. A matrix is dequantised at once."""

    inner: PackedWeight

    def __post_init__(self) -> None:
        """Take the format's name, which is the class's own elsewhere."""
        object.__setattr__(self, "format", self.inner.format)

    def dequantise(
        self, parts: Mapping[str, torch.Tensor], rows: range, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the rows of one matrix."""
        shape = self.inner.matrix_shape
        scratch = None if out is None else out.new_empty(shape)
        stored = self.inner.dequantise(parts, range(shape[0]), scratch)
        return matrix_transposed(stored, out=out)  # all rows: see row_multiple


def transposed(weight: Entry) -> Entry:
    """Return a weight with the shape that its matrices have when they are transposed."""
    *stacked, columns, rows = weight.shape
    if not isinstance(weight, PackedWeight):
        return weight._replace(shape=(*stacked, rows, columns), is_transposed=not weight.is_transposed)
    return _TransposedWeight(
        name=weight.name, parts=weight.parts, shape=(*stacked, rows, columns), row_multiple=rows, inner=weight
    )
