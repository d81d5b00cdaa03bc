"""Copies of pages as a Triton kernel: torch launches tens for parts that are gigabytes apart.

The contract is `kernels.cache.pages`'s.
"""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["copy_pages_triton"]

_BLOCK = 1024


# Which pages are copied is new in each step, and a step must not wait for a compilation.
@triton.jit(do_not_specialize_on_alignment=["page_ids"])
def copy_pages_kernel(
    pool,  # [num_parts, num_pages, num_words]
    page_ids,
    staging,  # [number of page_ids or more, num_parts, num_words]
    part_stride,  # of the pool
    page_stride,  # of the staging memory
    num_words,
    TO_STAGING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy BLOCK words of one part of a page; the grid is [pages, parts, blocks]."""
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = word < num_words
    in_pool = pool + part * part_stride + tl.load(page_ids + index) * num_words + word
    in_staging = staging + index * page_stride + part * num_words + word
    if TO_STAGING:
        tl.store(in_staging, tl.load(in_pool, mask=mask), mask=mask)
    else:
        tl.store(in_pool, tl.load(in_staging, mask=mask), mask=mask)


def copy_pages_triton(pool: torch.Tensor, page_ids: torch.Tensor, staging: torch.Tensor, *, to_staging: bool) -> None:
    """Launch ``kernels.cache.pages.gather_pages``, or ``scatter_pages`` unless ``to_staging``."""
    num_parts, _, num_words = pool.shape
    assert pool.is_contiguous()
    assert staging.stride()[1:] == (num_words, 1)
    assert staging.shape[0] >= len(page_ids)
    if len(page_ids) and num_parts:
        copy_pages_kernel[len(page_ids), num_parts, triton.cdiv(num_words, _BLOCK)](
            pool,
            page_ids,
            staging,
            pool.stride(0),
            staging.stride(0),
            num_words,
            TO_STAGING=to_staging,
            BLOCK=_BLOCK,
            enable_fp_fusion=False,
        )
