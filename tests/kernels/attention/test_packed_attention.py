"""Attention of whole texts without a cache equals attention in float64, and a text's bits do not depend on others."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kernels.attention.c_kernel import PackedTexts, packed_attention
from kernels.cpu.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

REACHES = [(None, None), (None, 0), (0, None), (3, 5), (64, 64), (0, 0), (127, 0)]
LENGTHS = [1, 300, 17, 64, 65, 2]


def parts(num_tokens: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(num_tokens, count, head_dim) for count in (heads[0], heads[1], heads[1])]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def expected(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, left: int | None, right: int | None, scale: float
) -> torch.Tensor:
    """Compute one text in float64."""
    distance = torch.arange(len(query))[:, None] - torch.arange(len(query))
    seen = (distance <= (len(query) if left is None else left)) & (
        -distance <= (len(query) if right is None else right)
    )
    group = query.shape[1] // key.shape[1]
    keys, values = (part.double().repeat_interleave(group, dim=1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "head_dim"), [((12, 12), 32), ((4, 2), 64), ((3, 1), 128)])
@pytest.mark.parametrize(("left", "right"), REACHES)
def test_equals_float64(
    left: int | None, right: int | None, heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    query, key, value = parts(sum(LENGTHS), heads, head_dim, dtype)
    scale = head_dim**-0.5
    output = packed_attention(query, key, value, PackedTexts.of(LENGTHS), left=left, right=right, scale=scale)
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)]
    for start, end in pairwise(starts):
        text = [part[start:end] for part in (query, key, value)]
        exact = expected(*text, left, right, scale)
        torch.testing.assert_close(
            output[start:end].double(), exact, atol=2e-6 if dtype == torch.float32 else 2e-2, rtol=0
        )
        alone = packed_attention(*text, PackedTexts.of([end - start]), left=left, right=right, scale=scale)
        assert torch.equal(alone, output[start:end])


def test_transposed_inputs() -> None:
    query, key, value = (
        part.transpose(0, 1).contiguous().transpose(0, 1) for part in parts(40, (4, 4), 32, torch.float32)
    )
    output = packed_attention(query, key, value, PackedTexts.of([15, 25]), left=None, right=None, scale=0.2)
    torch.testing.assert_close(
        output[15:].double(), expected(query[15:], key[15:], value[15:], None, None, 0.2), atol=2e-6, rtol=0
    )
