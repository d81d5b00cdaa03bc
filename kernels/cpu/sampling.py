"""Choosing tokens from logits in C (csrc/top_k.h, csrc/draw.h); callers check ``can_sample`` first."""

from __future__ import annotations

import torch

from kernels.cpu.bindings import address
from kernels.cpu.library import library, require

__all__ = ["can_sample", "draw", "top_candidates", "top_k"]


def can_sample(rows: torch.Tensor) -> bool:
    """Return whether the kernels can read ``rows`` [num_rows, width] and are available on this machine."""
    is_readable = rows.device.type == "cpu" and rows.dtype == torch.float32 and rows.stride(1) == 1
    return is_readable and library() is not None


def top_k(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k highest of ``scores`` [rows, width] in order, and their indices, int64; both [rows, min(k, width)].

    Equal scores are ordered by index.
    """
    highest, indices, _ = _top_k(scores, None, k)
    return highest, indices


def top_candidates(
    logits: torch.Tensor, temperatures: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the k most likely tokens of each row of ``logits`` [rows, vocab_size] in order, without copying it.

    Returns:
        Their scores, (logit - the row's largest) / temperature, and their ids, both [rows, min(k, vocab_size)]; and the
        logarithm of the sum of the exponentials of all scores of a row, [rows, 1].
    """
    return _top_k(logits, temperatures, k)


def _top_k(
    rows: torch.Tensor, temperatures: torch.Tensor | None, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_rows, width = rows.shape
    k = min(k, width)
    scores, indices = torch.empty(num_rows, k), torch.empty(num_rows, k, dtype=torch.int64)
    log_totals = torch.empty(num_rows, 1)
    require().pagoda_top_k(
        scores.data_ptr(),
        indices.data_ptr(),
        log_totals.data_ptr(),
        rows.data_ptr(),
        address(temperatures),
        num_rows,
        width,
        rows.stride(0),
        k,
    )
    return scores, indices, log_totals


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
        The tokens' noisy scores, which are finite unless nothing can be drawn, and their ids, int64; both [rows].
    """
    num_rows, width = logits.shape
    values, tokens = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
    assert keys.is_contiguous()
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
