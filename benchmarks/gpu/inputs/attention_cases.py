"""The batches on which attention kernels are checked: shapes that are served, and odd ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.gpu.inputs.paged_batch import PADDING, HeadShape, Lengths

__all__ = ["ODD_BATCHES", "ODD_SHAPES", "Case", "serving_cases"]


@dataclass(frozen=True)
class Case:
    """A batch, and the sliding windows to check it with."""

    name: str
    lengths: Lengths
    windows: tuple[int | None, ...] = (None,)


def serving_cases(context: int) -> list[Case]:
    """Return decodes, mixed steps and prefills with contexts up to ``context`` tokens, of uneven lengths."""
    whole, half, eighth = context, context // 2, context // 8
    windowed = (None, eighth)
    return [
        Case("one long decode", [(1, whole)], windowed),
        Case("two decodes", [(1, half + 7), (1, eighth)], windowed),
        Case("uneven decodes", [(1, whole - 1), (1, 1), (1, eighth + 3), PADDING, (1, 257), (1, half)], windowed),
        Case("16 decodes", [(1, eighth + 13 * i) for i in range(16)]),
        Case("64 decodes", [(1, 1 + eighth * i // 64) for i in range(64)]),
        Case("a prefill", [(eighth, eighth)], windowed),
        Case("a chunk after a long prefix", [(eighth // 4 + 1, whole)], windowed),
        Case("prefills of uneven lengths", [(eighth // 2 - 5, eighth // 2 - 5), (3, 3), (eighth // 3, eighth // 3)]),
        Case("mixed", [(1, whole // 4), (eighth // 8, eighth // 8), (1, 3), (eighth // 16, half), PADDING], windowed),
        Case("drafts", [(5, eighth + i) for i in range(8)]),
    ]


ODD_SHAPES = {
    "no groups": HeadShape(3, 3, 32, 16),
    "pairs": HeadShape(4, 2, 32, 4),
    "groups of 4, width 80": HeadShape(8, 2, 80, 16),
    "groups of 7": HeadShape(14, 2, 16, 1),
    "one KV head, width 96, large blocks": HeadShape(4, 1, 96, 256),
    "width 256": HeadShape(4, 2, 256, 16),
}
ODD_BATCHES = [
    Case("one prompt", [(17, 17)], (None, 5)),
    Case("decodes around a block's edge", [(1, 15), (1, 16), (1, 17), (1, 1), (1, 33)]),
    Case("chunks after a prefix", [(5, 21), (16, 32), (2, 2)]),
    Case("padded mixed", [(1, 20), PADDING, (4, 10), PADDING]),
    Case("uneven splits", [(1, 600), (1, 1), (1, 65), PADDING, (1, 257)], (None, 300)),
]
ODD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
