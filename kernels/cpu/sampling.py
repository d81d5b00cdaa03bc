"""Sampling kernels in C (csrc/sampling.h) as functions of tensors; callers ask ``can_sample`` first."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu.library import library, pointer, require

__all__ = ["can_sample", "draw", "top_candidates", "top_k"]


def can_sample(rows: torch.Tensor) -> bool:
    """Return whether the kernels can read ``rows`` [num_rows, width], and are to be had on this machine."""
    is_readable = rows.device.type == "cpu" and rows.dtype == torch.float32 and rows.stride(1) == 1
    return is_readable and library() is not None


def top_k(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k highest of ``scores`` [rows, width] in order, and their places, int64; both [rows, min(k, width)].

    Of equal scores the one that comes first goes first.
    """
    highest, places, _ = _top_k(scores, None, k)
    return highest, places


def top_candidates(
    logits: torch.Tensor, temperatures: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the k likeliest tokens of each row of ``logits`` [rows, vocab_size] in order, without another copy of it.

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
    scores, places = torch.empty(num_rows, k), torch.empty(num_rows, k, dtype=torch.int64)
    log_totals = torch.empty(num_rows, 1)
    require().pagoda_top_k(
        pointer(scores),
        pointer(places),
        pointer(log_totals),
        pointer(rows),
        pointer(temperatures),
        ctypes.c_int64(num_rows),
        ctypes.c_int64(width),
        ctypes.c_int64(rows.stride(0)),
        ctypes.c_int64(k),
    )
    return scores, places, log_totals


def draw(
    logits: torch.Tensor, temperatures: torch.Tensor, floors: torch.Tensor | None, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token for each row of ``logits`` [rows, vocab_size].

    Args:
        logits: float32.
        temperatures: float32 [rows, 1].
        floors: float32 [rows, 1]: a token whose score, (logit - the row's largest) / temperature, is less is left out.
        keys: int32 [rows, 2], of the noise.

    Returns:
        The tokens' noisy scores, which are finite unless nothing can be drawn, and their ids, int64; both [rows].
    """
    values, tokens = torch.empty(len(logits)), torch.empty(len(logits), dtype=torch.int64)
    assert keys.is_contiguous()
    require().pagoda_draw(
        pointer(values),
        pointer(tokens),
        pointer(logits),
        pointer(temperatures),
        pointer(floors),
        pointer(keys),
        ctypes.c_int64(len(logits)),
        ctypes.c_int64(logits.shape[1]),
        ctypes.c_int64(logits.stride(0)),
    )
    return values, tokens
