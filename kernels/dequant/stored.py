"""unpacked: a coded matrix whose codes are as a file has them, with a byte a code."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.coded_weight import CodedMatrix, StoredLayout
from kernels.dequant.bit_fields import fields
from kernels.dequant.gguf import coded_gguf
from kernels.dequant.gguf_types import GGUF_TYPES
from kernels.dequant.scale_tables import scale_table

__all__ = ["BYTES", "HIGH_NIBBLES", "NIBBLES", "SIGNED_BYTES", "unpacked"]

BYTES, SIGNED_BYTES = StoredLayout("bytes"), StoredLayout("signed bytes")
NIBBLES, HIGH_NIBBLES = StoredLayout("nibbles"), StoredLayout("high nibbles")

_TYPES = {kind.name: kind for kind in GGUF_TYPES.values()}


def unpacked(matrix: CodedMatrix) -> CodedMatrix:
    """Return the same matrix without a ``layout``, on its device."""
    layout = matrix.layout
    if layout is None:
        return matrix
    if layout.codes in _TYPES:
        own = coded_gguf(matrix.codes, _TYPES[layout.codes])
        return replace(own, format=matrix.format, output_scales=matrix.output_scales)
    scales = matrix.outer_scales
    if layout.scales is not None:
        scales = scale_table(layout.scales, matrix.format.outer_dtype).to(scales.device)[scales.int()]
    codes = _codes(matrix.codes, layout)[:, : matrix.shape[1]]
    return replace(matrix, codes=codes, outer_scales=scales, layout=None, stored_inputs=0)


def _codes(octets: torch.Tensor, layout: StoredLayout) -> torch.Tensor:
    """Return codes of a byte, uint8 [num_rows, all that the bytes hold]."""
    if layout.codes == "bytes":
        return octets
    if layout.codes == "signed bytes":
        return octets ^ 128
    return fields(octets, 4, 1, is_high_first=layout.codes == "high nibbles")
