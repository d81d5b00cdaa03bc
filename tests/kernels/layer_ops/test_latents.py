"""The norm, rotation and cache write of latents against the reference. Slots that are not written keep their NaN."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.layer_ops import reference
from kernels.layer_ops.base import LatentCache, LayerOps, Rotation
from tests.kernels.layer_ops.tensors import TOLERANCES, Random, assert_close
from tests.kernels.layer_ops.test_rotate_and_store import _rotation

SLOTS = [9, -1, 4, 17, 0]
SHAPES = {"DeepSeek V3": (4, 512, 64), "MiniCPM 3": (5, 256, 32), "odd": (3, 40, 10)}  # query heads, rank, rope_dim


def _cache(random: Random, width: int, slots: list[int]) -> LatentCache:
    latents = torch.full((5, 4, width), math.nan, dtype=random.dtype, device=random.device)
    return LatentCache(latents, torch.tensor(slots, dtype=torch.int64, device=random.device))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_queries_are_completed_and_latents_are_stored(
    ops: LayerOps, dtype: torch.dtype, rotates: bool, shape: tuple[int, int, int], device: torch.device
) -> None:
    """Of slices of a projection, whose rows are longer."""
    random, (heads, rank, rope_dim) = Random(dtype, device), shape
    query, cache = random(len(SLOTS), heads, rank + rope_dim), _cache(random, rank + rope_dim, SLOTS)
    rotated = random(len(SLOTS), heads, rope_dim + 6)[..., 6:]
    latent = random(len(SLOTS), 9 + rank + rope_dim)[:, 9:]
    norm, rotation = random.norm(rank), _rotation(random, len(SLOTS), rope_dim) if rotates else None
    expected_query, expected = query.clone(), LatentCache(cache.latents.clone(), cache.slot_mapping)
    reference.rotate_and_store_latents(expected_query, rotated, latent, norm, rotation, expected)
    ops.rotate_and_store_latents(query, rotated, latent, norm, rotation, cache)
    assert_close(query, expected_query)
    assert_close(cache.latents, expected.latents)
    assert not torch.equal(expected_query[..., rank:], rotated) or not rotates


def test_no_token(ops: LayerOps, device: torch.device) -> None:
    random = Random(torch.float32, device)
    cache = _cache(random, 12, [])
    rotation = Rotation(
        torch.ones(1, 2, 2, device=device), torch.empty(0, dtype=torch.int64, device=device), random.dtype
    )
    ops.rotate_and_store_latents(random(0, 2, 12), random(0, 2, 4), random(0, 12), random.norm(8), rotation, cache)
    assert cache.latents.isnan().all()
