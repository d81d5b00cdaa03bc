"""gather_pages and scatter_pages: copies of pages of a pool to and from staging memory, in one launch.

A page's parts, its keys and its values in each layer, are gigabytes apart in the pool. In the staging memory they are
one piece, which one copy moves to or from the host.
"""

from __future__ import annotations

import torch

__all__ = ["gather_pages", "scatter_pages"]


def gather_pages(pool: torch.Tensor, page_ids: torch.Tensor, staging: torch.Tensor) -> None:
    """Copy pages of ``pool`` [num_parts, num_pages, words] to the beginning of ``staging`` [n, num_parts, words].

    Args:
        pool: integers, contiguous.
        page_ids: int64 [n or fewer], contiguous; they may be there twice.
        staging: of the pool's dtype; the parts of a page are contiguous.
    """
    if pool.device.type == "cpu":
        staging[: len(page_ids)] = pool[:, page_ids].transpose(0, 1)
    else:
        from kernels.cache.triton.pages import copy_pages_triton

        copy_pages_triton(pool, page_ids, staging, to_staging=True)


def scatter_pages(staging: torch.Tensor, page_ids: torch.Tensor, pool: torch.Tensor) -> None:
    """Copy the beginning of ``staging`` to pages of ``pool``, all of them different; shapes as of ``gather_pages``."""
    if pool.device.type == "cpu":
        pool[:, page_ids] = staging[: len(page_ids)].transpose(0, 1)
    else:
        from kernels.cache.triton.pages import copy_pages_triton

        copy_pages_triton(pool, page_ids, staging, to_staging=False)
