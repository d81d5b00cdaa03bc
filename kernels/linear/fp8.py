"""Linear layers of FP8 weights and FP8 activations (W8A8), as plainly as torch allows. fp8_triton.py computes the same.

Both are E4M3. Where the weights have scales for blocks of 128 inputs, as DeepSeek's and Qwen's checkpoints, so have the
activations; else each token has one, or all tokens have that of the checkpoint:

    output = sum over blocks of inputs of (codes of x * codes of w) * scale of x * scale of w
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from kernels.cache.fp8 import LARGEST, to_fp8
from kernels.coded_weight import CodedMatrix, decode

__all__ = ["GROUP", "LEAST", "fp8_linear", "group_of", "quantize"]

GROUP = 128  # inputs with one scale, if there are groups
LEAST = 1e-30  # the largest activation of a group that has smaller ones: scales have reciprocals


def group_of(matrix: CodedMatrix) -> int | None:
    """Return of how many inputs activations have one scale; None: of all."""
    return GROUP if matrix.format.activations == "groups" else None


def quantize(x: torch.Tensor, group: int | None, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Return the codes of activations, float8 of the shape of ``x``, and their scales, float32 [num_groups, num_rows].

    An activation is wrong by at most a sixteenth of itself, or by 2**-10 of its scale if that is more.

    Args:
        x: [num_rows, num_inputs].
        group: neighbouring inputs that have a scale; None: all have one.
        scale: float32 [1], of all activations, instead of scales that follow from the largest ones.
    """
    num_rows, num_inputs = x.shape
    group = group or num_inputs
    groups = F.pad(x.float(), (0, -num_inputs % group)).view(num_rows, -1, group)
    largest = groups.abs().amax(dim=2, keepdim=True).clamp(min=LEAST)
    inverses = LARGEST / largest if scale is None else (1 / scale).expand_as(largest)
    scales = largest / LARGEST if scale is None else scale.expand_as(largest)
    codes = to_fp8(groups * inverses).view(num_rows, -1)
    return codes[:, :num_inputs].contiguous(), scales.squeeze(2).t().contiguous()


def fp8_linear(x: torch.Tensor, matrix: CodedMatrix) -> torch.Tensor:
    """Return the product of activations [num_rows, num_inputs] with FP8 weights, float32 [num_rows, num_outputs]."""
    scale = None if matrix.activation_scales is None else matrix.activation_scales.max().view(1)
    codes, scales = quantize(x, group_of(matrix), scale)
    spread = scales.t().repeat_interleave(group_of(matrix) or x.shape[1], dim=1)[:, : x.shape[1]]
    return (codes.float() * spread) @ decode(matrix).t()
