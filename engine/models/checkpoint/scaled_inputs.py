"""with_scaled_inputs: a quantised weight whose layer's inputs are multiplied by factors, as a weight of plain inputs.

ModelOpt's AWQ (INT4_AWQ, NVFP4_AWQ) stores the factors as X.pre_quant_scale [in] where it cannot multiply them into the
norm before the layer. Here the columns of the dequantised weight are multiplied: the outputs are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.models.checkpoint.files.safetensors_header import StoredTensor
from engine.models.checkpoint.packed_weight import PackedWeight

__all__ = ["with_scaled_inputs"]

_FACTORS = "input factors"


@dataclass(frozen=True, kw_only=True, eq=False)
class _ScaledWeight(PackedWeight):
    """A quantised matrix, with one part more: the factor of each column."""

    inner: PackedWeight

    def __post_init__(self) -> None:
        """Take the format's name, which is the class's own elsewhere."""
        object.__setattr__(self, "format", self.inner.format)

    def prepared(self, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the parts of the matrix, prepared."""
        return self.inner.prepared(parts)

    @property
    def why_not_coded(self) -> str:
        """Why it has no ``code_format``."""
        return "their inputs have factors"

    def dequantise(
        self, parts: Mapping[str, torch.Tensor], rows: range, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return rows of the matrix in float32."""
        return self.inner.dequantise(parts, rows).mul_(parts[_FACTORS].float())


def with_scaled_inputs(weight: PackedWeight, factors: StoredTensor) -> PackedWeight:
    """Return the matrix ``weight`` with its columns multiplied by ``factors``, one for each."""
    return _ScaledWeight(
        name=weight.name,
        parts={**weight.parts, _FACTORS: factors},
        shape=weight.shape,
        read_by_rows=weight.read_by_rows,
        row_multiple=weight.row_multiple,
        inner=weight,
    )
