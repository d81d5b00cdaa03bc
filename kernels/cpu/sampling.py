"""Choosing tokens from logits in C (csrc/sampling/top_k.h, csrc/sampling/draw.h, csrc/sampling/truncated_draw.h).

Callers check ``can_sample`` first.
"""

from __future__ import annotations

import torch

from kernels.cpu.bindings import CLimits, address
from kernels.cpu.library import library, require
from kernels.sampling.base import Limits

__all__ = ["can_sample", "draw", "top_k", "truncated_draw"]


def can_sample(rows: torch.Tensor) -> bool:
    """Return whether the kernels can read ``rows`` [num_rows, width] and are available on this machine."""
    is_readable = rows.device.type == "cpu" and rows.dtype == torch.float32 and rows.stride(1) == 1
    return is_readable and library() is not None


def top_k(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k highest of ``scores`` [rows, width] in order, and their indices, int64; both [rows, min(k, width)].

    Equal scores are ordered by index.
    """
    num_rows, width = scores.shape
    k = min(k, width)
    highest, indices = torch.empty(num_rows, k), torch.empty(num_rows, k, dtype=torch.int64)
    pointers = (tensor.data_ptr() for tensor in (highest, indices, scores))
    require().pagoda_top_k(*pointers, num_rows, width, scores.stride(0), k)
    return highest, indices


def draw(
    logits: torch.Tensor, temperatures: torch.Tensor, floors: torch.Tensor | None, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token for each row of ``logits`` [rows, vocab_size].

    Args:
        logits: float32.
        temperatures: float32 [rows, 1].
        floors: float32 [rows, 1]: tokens whose score, (logit - the row's largest) / temperature, is less are excluded.
        keys: int32 [rows, 2], of the noise.

    Returns:
        The tokens' noisy logits, which are finite unless nothing can be drawn, and their ids, int64; both [rows].
    """
    num_rows, width = logits.shape
    values, tokens = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
    assert all(tensor is None or tensor.is_contiguous() for tensor in (temperatures, floors, keys))
    require().pagoda_draw(
        values.data_ptr(),
        tokens.data_ptr(),
        logits.data_ptr(),
        temperatures.data_ptr(),
        address(floors),
        keys.data_ptr(),
        num_rows,
        width,
        logits.stride(0),
    )
    return values, tokens


def truncated_draw(
    logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor, limits: Limits
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token for each row of ``logits`` [rows, vocab_size], from those within the limits.

    Arguments and results are those of ``draw``.
    """
    num_rows, width = logits.shape
    values, tokens = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
    columns = (limits.top_k, limits.top_p, limits.floors)
    assert all(tensor.is_contiguous() for tensor in (temperatures, keys, *columns))
    require().pagoda_truncated_draw(
        values.data_ptr(),
        tokens.data_ptr(),
        logits.data_ptr(),
        temperatures.data_ptr(),
        keys.data_ptr(),
        CLimits(*(column.data_ptr() for column in columns)),
        num_rows,
        width,
        logits.stride(0),
    )
    return values, tokens
