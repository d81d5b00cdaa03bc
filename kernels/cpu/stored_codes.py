"""Codes as files have them, for the C kernels (csrc/coded/stored.h): packing them, and whether they are finite."""

from __future__ import annotations

import torch

from kernels.coded_weight import CodedMatrix
from kernels.cpu.bindings import CCodeFormat, CStoredCodes, CStoredFactors
from kernels.cpu.library import library, require
from kernels.dequant.gguf_types import GGUF_TYPES, GgufType
from kernels.dequant.scale_tables import scale_table

__all__ = ["is_gguf_finite", "largest_magnitude", "largest_octet", "pack_stored"]

_LAYOUTS = {"bytes": 0, "signed bytes": 1, "nibbles": 2, "high nibbles": 3}
_NUMBERS = {kind.name: number for number, kind in GGUF_TYPES.items()}
_FIRST_TYPE = 16  # STORED_GGUF
_FACTORS = ("outer_scales", "outer_minima", "zero_points", "inner_scales", "inner_minima")
_NONE = CStoredFactors(None, 0, 0)


def pack_stored(
    octets: torch.Tensor,
    c_format: CCodeFormat,
    matrix: CodedMatrix,
    in_features: int,
    *,
    first_output: int,
    every: int,
    offset: int,
) -> None:
    """Pack a matrix of any layout as some outputs of a weight.

    Args:
        octets: the weight's panels, uint8.
        c_format: the matrix' format.
        matrix: what is packed; its order of inputs and output scales are not.
        in_features: of a panel, at least the matrix'; codes of 0 follow.
        first_output: as for `PackedLinear`.
        every: likewise.
        offset: likewise.
    """
    num_rows, num_inputs = matrix.shape
    assert num_inputs <= in_features
    parts = {
        name: part if part.stride(1) == 1 else part.contiguous()
        for name, part in matrix.parts.items()
        if part.dim() > 1
    }
    layout, table = matrix.layout, None
    if layout is not None and layout.scales is not None:
        table = scale_table(layout.scales, matrix.format.outer_dtype)
    codes = parts["codes"]
    number = 0 if layout is None else _LAYOUTS.get(layout.codes)
    require().pagoda_pack_stored(
        octets.data_ptr(),
        c_format,
        CStoredCodes(
            codes.data_ptr(),
            *(_factors(parts.get(name)) for name in _FACTORS),
            None if table is None else table.data_ptr(),
            *(codes.stride(0), num_rows, num_inputs, in_features, first_output, every, offset),
            _FIRST_TYPE + _NUMBERS[layout.codes] if layout is not None and number is None else number,
        ),
    )


def _factors(part: torch.Tensor | None) -> CStoredFactors:
    if part is None or not part.numel():
        return _NONE
    return CStoredFactors(part.data_ptr(), part.stride(0) * part.itemsize, part.shape[1])


def largest_octet(octets: torch.Tensor, mask: int) -> int:
    """Return the largest byte, or 0 without bytes; only the bits of ``mask`` count.

    Args:
        octets: of any type of one byte, contiguous.
        mask: see above.
    """
    octets = octets.view(torch.uint8)
    if octets.device.type == "cpu" and (loaded := library()) is not None:
        return int(loaded.pagoda_largest_octet(octets.data_ptr(), octets.numel(), mask))
    return int((octets & mask).max()) if octets.numel() else 0


def largest_magnitude(floats: torch.Tensor) -> float:
    """Return the largest absolute value, NaN if there is one; 0 of none.

    Threads that read weights do not divide this among others, as torch does.

    Args:
        floats: float16, bfloat16 or float32 [num_rows, any], maybe one row for all; or [any].
    """
    if floats.dim() == 2 and floats.stride(0) == 0:
        floats = floats[:1]
    if not floats.numel():
        return 0.0
    if floats.device.type != "cpu" or not floats.is_contiguous() or (loaded := library()) is None:
        return float(floats.abs().max())
    has_16_bits = floats.itemsize == 2
    bits = loaded.pagoda_largest_magnitude(floats.data_ptr(), floats.numel(), has_16_bits)
    return float(torch.tensor(bits, dtype=torch.int16 if has_16_bits else torch.int32).view(floats.dtype))


def is_gguf_finite(octets: torch.Tensor, gguf_type: GgufType) -> bool:
    """Return whether the scales in blocks are known to be finite, and small enough for all products with codes to be.

    Args:
        octets: whole blocks, uint8, contiguous.
        gguf_type: theirs.
    """
    if octets.device.type != "cpu" or (loaded := library()) is None:
        return False
    num_blocks = octets.numel() // gguf_type.block_bytes
    return bool(loaded.pagoda_gguf_is_finite(octets.data_ptr(), num_blocks, _NUMBERS[gguf_type.name]))
