"""read_plain: reads a tensor that is not quantised, from its file to where it is wanted."""

from __future__ import annotations

import math

import torch

from engine.models.checkpoint.files.safetensors_header import StoredTensor
from engine.models.checkpoint.files.tensor_files import TensorFiles
from engine.models.checkpoint.sharding import Shard

__all__ = ["PLAIN_DTYPES", "read_plain"]

PLAIN_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}

_CONVERTED_BYTES = 2**20  # read and converted at once: few enough to stay in a processor's cache
_TRANSPOSED_BYTES = 2**17  # fewer, because the memory that is written is not contiguous


def read_plain(files: TensorFiles, stored: StoredTensor, out: torch.Tensor, shard: Shard | None) -> None:
    """Fill ``out``, contiguous and on any device, with a tensor or a ``shard`` of it, converted to its dtype.

    Raises:
        OSError: if a file cannot be read.
    """
    if stored.is_transposed:
        _read_transposed(files, stored, out, shard)
        return
    dtype = PLAIN_DTYPES[stored.dtype]
    rows = out if out.dim() else out.view(1)
    first, row_shape, columns = 0, rows.shape[1:], slice(None)
    if shard is not None and shard.dim == 0:
        first = shard.index * shard.full + shard.start
    elif shard is not None:  # columns of all rows
        first, row_shape, columns = (
            shard.index * len(rows),
            torch.Size([shard.full]),
            slice(shard.start, shard.stop),
        )
    if out.device.type == "cpu" and out.dtype == dtype and row_shape == rows.shape[1:]:
        _read_rows(files, stored, rows, first)
        return
    num_rows = max(1, _CONVERTED_BYTES // (row_shape.numel() * dtype.itemsize or 1))
    scratch = torch.empty([min(num_rows, len(rows)), *row_shape], dtype=dtype)
    for start in range(0, len(rows), num_rows):
        part = rows[start : start + num_rows]
        read = scratch[: len(part)]
        _read_rows(files, stored, read, first + start)
        part.copy_(read if row_shape == part.shape[1:] else read[:, columns])


def _read_transposed(files: TensorFiles, stored: StoredTensor, out: torch.Tensor, shard: Shard | None) -> None:
    """Fill ``out`` with matrices that are stored as [columns, rows]: all of them, or the ``shard`` of one."""
    num_rows, num_columns = stored.shape[-2:]
    rows, columns, first = slice(None), range(num_columns), 0
    if shard is not None:
        first = shard.index
        if shard.dim == 0:
            rows = slice(shard.start, shard.stop)
        else:
            columns = columns[shard.start : shard.stop]
    dtype = PLAIN_DTYPES[stored.dtype]
    at_once = max(1, _TRANSPOSED_BYTES // (num_rows * dtype.itemsize or 1))
    scratch = torch.empty([min(at_once, len(columns)), num_rows], dtype=dtype)
    for index, matrix in enumerate(out if out.dim() == 3 else out[None], first):
        for start in range(0, len(columns), at_once):
            part = matrix[:, start : start + at_once]
            read = scratch[: part.shape[1]]
            _read_rows(files, stored, read, index * num_columns + columns[start])
            part.copy_(read[:, rows].T)


def _read_rows(files: TensorFiles, stored: StoredTensor, out: torch.Tensor, first: int) -> None:
    """Fill ``out``, contiguous, on the CPU and of the stored dtype, with rows of a tensor from ``first`` on."""
    row_bytes = math.prod(out.shape[1:]) * out.itemsize
    files.read_into(out.flatten().view(torch.uint8).numpy().data, stored, first * row_bytes)
