"""Pages that are gathered in staging memory and scattered again, by torch and by Triton, against loops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.cache.pages import gather_pages, scatter_pages

Copy = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


@pytest.fixture(params=["torch", "triton"])
def copies(request: pytest.FixtureRequest) -> tuple[Copy, Copy]:
    """Return how pages are gathered and scattered, both with the arguments (pool, page ids, staging)."""
    if request.param == "torch":
        return gather_pages, lambda pool, page_ids, staging: scatter_pages(staging, page_ids, pool)
    request.getfixturevalue("kernel_device")
    from kernels.cache.triton.pages import copy_pages_triton

    return (
        lambda *tensors: copy_pages_triton(*tensors, to_staging=True),
        lambda *tensors: copy_pages_triton(*tensors, to_staging=False),
    )


def random_words(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.randint(0, 120, shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)


@pytest.mark.parametrize("num_words", [1024, 1, 37, 2500])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int32])
def test_pages_are_copied_and_nothing_else(copies: tuple[Copy, Copy], dtype: torch.dtype, num_words: int) -> None:
    gather, scatter = copies
    pool = random_words(dtype, 3, 7, num_words)
    # The second of two sections of each staged page, as where parts have two shapes.
    whole = random_words(dtype, 5, 11 + 3 * num_words)
    staging = whole[:, 11:].unflatten(1, (3, num_words))
    for page_ids in ([4], [6, 0, 2], []):
        ids = torch.tensor(page_ids, dtype=torch.int64, device=pool.device)
        before, expected = whole.clone(), staging.clone()
        for index, page_id in enumerate(page_ids):
            expected[index] = pool[:, page_id]
        gather(pool, ids, staging)
        assert torch.equal(staging, expected)
        assert torch.equal(whole[:, :11], before[:, :11])
        staging += 1
        wanted = pool.clone()
        for index, page_id in enumerate(page_ids):
            wanted[:, page_id] = staging[index]
        scatter(pool, ids, staging)
        assert torch.equal(pool, wanted)
