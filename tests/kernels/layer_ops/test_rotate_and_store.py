"""QK norm, RoPE and the cache write against the reference. Slots that are not written must keep their NaN."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.cache.fp8 import FP8, to_fp8
from kernels.layer_ops import reference
from kernels.layer_ops.base import LayerCache, LayerOps, Rotation
from tests.kernels.layer_ops.tensors import TOLERANCES, Random, TestNorm, assert_close

SLOTS = [9, -1, 4, 17, 0]
LENGTH = 50  # of the table
HEADS = {  # of queries, of keys and values, elements of a head
    "Qwen3": (4, 2, 16),
    "odd": (7, 1, 10),
    "three KV heads": (6, 3, 80),
    "one head": (1, 1, 2),
}


def _rotation(random: Random, num_tokens: int, head_dim: int) -> Rotation:
    angles = torch.randn(LENGTH, head_dim // 2, generator=torch.Generator().manual_seed(1))
    angles[:, head_dim // 3 :] = 0.0  # as in a partial RoPE
    table = torch.stack((angles.cos(), angles.sin()), dim=1).to(random.device)
    positions = torch.arange(num_tokens, device=random.device) * 13 % LENGTH
    return Rotation(table, positions, random.dtype)


def _cache(random: Random, num_kv_heads: int, head_dim: int, slots: list[int]) -> LayerCache:
    keys, values = torch.full((2, 5, 4, num_kv_heads, head_dim), math.nan, dtype=random.dtype, device=random.device)
    return LayerCache(keys, values, torch.tensor(slots, dtype=torch.int64, device=random.device))


def _check(
    ops: LayerOps,
    qkv: torch.Tensor,
    norms: tuple[TestNorm | None, TestNorm | None],
    rotation: Rotation | None,
    cache: LayerCache,
) -> None:
    expected_cache = LayerCache(cache.keys.clone(), cache.values.clone(), cache.slot_mapping)
    got = ops.rotate_and_store(qkv, *norms, rotation, cache)
    assert_close(got, reference.rotate_and_store(qkv, *norms, rotation, expected_cache))
    assert_close(cache.keys, expected_cache.keys)
    assert torch.equal(cache.values.nan_to_num(), expected_cache.values.nan_to_num())


@pytest.mark.parametrize("norm", ["none", "head", "head, adds one", "projection"])
@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_every_norm_shape_and_dtype(
    ops: LayerOps, norm: str, rotates: bool, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    random, (num_heads, num_kv_heads, head_dim) = Random(dtype, device), heads
    qkv = random(len(SLOTS), (num_heads + 2 * num_kv_heads) * head_dim)
    of_all_heads = norm == "projection"
    widths = (num_heads * head_dim, num_kv_heads * head_dim) if of_all_heads else (head_dim, head_dim)
    norms = [None if norm == "none" else random.norm(width, adds_one="one" in norm) for width in widths]
    rotation = _rotation(random, len(SLOTS), head_dim) if rotates else None
    _check(ops, qkv, (norms[0], norms[1]), rotation, _cache(random, num_kv_heads, head_dim, SLOTS))


@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_values_may_be_normalized(
    ops: LayerOps, has_norms: bool, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    random, (num_heads, num_kv_heads, head_dim) = Random(dtype, device), heads
    qkv = random(len(SLOTS), (num_heads + 2 * num_kv_heads) * head_dim)
    norms = [random.norm(head_dim) if has_norms else None for _ in range(2)]
    cache = _cache(random, num_kv_heads, head_dim, SLOTS)
    expected_cache = LayerCache(cache.keys.clone(), cache.values.clone(), cache.slot_mapping)
    rotation = _rotation(random, len(SLOTS), head_dim)
    got = ops.rotate_and_store(qkv, *norms, rotation, cache, 1e-5)
    assert_close(got, reference.rotate_and_store(qkv, *norms, rotation, expected_cache, 1e-5))
    assert_close(cache.keys, expected_cache.keys)
    assert_close(cache.values, expected_cache.values)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_layer_that_only_reads_its_cache_has_queries_alone(
    ops: LayerOps, dtype: torch.dtype, device: torch.device
) -> None:
    random = Random(dtype, device)
    written = _cache(random, 2, 16, SLOTS)
    cache = LayerCache(written.keys, written.values, None)
    query, norm, rotation = random(len(SLOTS), 6 * 16), random.norm(16), _rotation(random, len(SLOTS), 16)
    got = ops.rotate_and_store(query, norm, None, rotation, cache)
    assert_close(got, reference.rotate_and_store(query, norm, None, rotation, cache))
    assert got.shape == (len(SLOTS), 6, 16)
    assert cache.keys.isnan().all()
    assert cache.values.isnan().all()


@pytest.mark.parametrize("normalizes_values", [False, True])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_cache_in_fp8_has_what_another_cache_would_have_rounded(
    ops: LayerOps, normalizes_values: bool, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    random, (num_heads, num_kv_heads, head_dim) = Random(dtype, device), heads
    qkv = 100.0 * random(len(SLOTS), (num_heads + 2 * num_kv_heads) * head_dim)  # some are beyond the largest number
    rotation, scales = _rotation(random, len(SLOTS), head_dim), (0.7, 1.3)
    eps = 1e-5 if normalizes_values else None
    plain = _cache(random, num_kv_heads, head_dim, SLOTS)
    codes = torch.full((2, *plain.keys.shape), -1, dtype=torch.int8, device=device).view(FP8)
    cache = LayerCache(codes[0], codes[1], plain.slot_mapping, *scales)
    assert torch.equal(
        ops.rotate_and_store(qkv, None, None, rotation, cache, eps),
        ops.rotate_and_store(qkv, None, None, rotation, plain, eps),
    )
    for got, numbers, scale in ((cache.keys, plain.keys, scales[0]), (cache.values, plain.values, scales[1])):
        expected = to_fp8(numbers, scale).view(torch.uint8)
        expected[numbers.isnan()] = 255  # not written
        assert torch.equal(got.view(torch.uint8), expected)


@pytest.mark.parametrize("slots", [[], [3], [-1, -1]])
def test_nothing_one_token_and_padding(ops: LayerOps, slots: list[int], device: torch.device) -> None:
    random = Random(torch.float32, device)
    cache = _cache(random, 2, 8, slots)
    _check(ops, random(len(slots), 64), (None, None), _rotation(random, len(slots), 8), cache)


def test_rows_may_be_slices(ops: LayerOps, device: torch.device) -> None:
    random = Random(torch.float32, device)
    qkv = random(3, 90)[:, 5:69]
    assert qkv.stride() == (90, 1)
    _check(ops, qkv, (random.norm(8), random.norm(8)), _rotation(random, 3, 8), _cache(random, 2, 8, [3, -1, 6]))


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_token_does_not_depend_on_the_others(ops: LayerOps, dtype: torch.dtype, device: torch.device) -> None:
    random = Random(dtype, device)
    qkv, norms, rotation = random(20, 96), (random.norm(12), random.norm(12)), _rotation(random, 20, 12)
    cache = _cache(random, 2, 12, list(range(20)))
    together = ops.rotate_and_store(qkv, *norms, rotation, cache)
    for index in (0, 11, 19):
        row = slice(index, index + 1)
        its_cache = LayerCache(torch.zeros_like(cache.keys), torch.zeros_like(cache.keys), cache.slot_mapping[row])
        its_rotation = Rotation(rotation.table, rotation.positions[row], dtype)
        assert torch.equal(ops.rotate_and_store(qkv[row], *norms, its_rotation, its_cache)[0], together[index])
        assert torch.equal(its_cache.keys.view(20, 2, 12)[index], cache.keys.view(20, 2, 12)[index])
