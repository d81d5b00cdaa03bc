"""Random paged batches, made on the device: contexts of 32k tokens would take seconds each on the host.

As in the kernels' tests, blocks are scattered over the cache, and slots that hold no live token are NaN, so that a
kernel which reads one it must not read shows it in its output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from kernels.attention import reference
from kernels.attention.base import AttentionInputs
from kernels.attention_metadata import AttentionMetadata, leading_decodes
from kernels.cache.fp8 import to_fp8

__all__ = ["PADDING", "HeadShape", "Lengths", "chunked_reference", "make_inputs", "worst_error"]

Lengths = list[tuple[int, int]]  # (query_len, seq_len) of each sequence
PADDING = (1, 0)
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # see worst_error
KEY_SCALE, VALUE_SCALE = 0.37, 1.9  # of a cache in FP8
SCORES_BYTES = 2**30  # of the reference's float64 scores, at most


@dataclass(frozen=True)
class HeadShape:
    """The part of a model and an engine that attention sees."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype = torch.bfloat16
    is_fp8: bool = False  # whether keys and values are cached in FP8

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.num_kv_heads * self.head_dim * (1 if self.is_fp8 else self.dtype.itemsize)


def make_inputs(
    lengths: Lengths, shape: HeadShape, device: torch.device, *, window: int | None = None, seed: int = 0
) -> AttentionInputs:
    """Return random queries and a random cache for sequences of these lengths."""
    generator = torch.Generator(device).manual_seed(seed)
    counts = [-(-seq_len // shape.block_size) for _, seq_len in lengths]
    num_blocks = sum(counts) + 3
    shuffled = torch.randperm(num_blocks, generator=generator, device=device).to(torch.int32)
    tables = torch.full((len(lengths), max(counts) + 1), -1, dtype=torch.int32, device=device)
    used = torch.zeros(num_blocks, shape.block_size, dtype=torch.bool, device=device)
    for row, (first, end), (_, seq_len) in zip(tables, pairwise([0, *accumulate(counts)]), lengths, strict=True):
        row[: end - first] = shuffled[first:end]
        last = torch.arange((end - first) * shape.block_size, device=device).view(-1, shape.block_size)
        used[shuffled[first:end].long()] = last < seq_len
    cache_shape = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)

    def random_cache() -> torch.Tensor:
        cache = torch.randn(cache_shape, generator=generator, device=device, dtype=shape.dtype)
        return cache.masked_fill_(~used[:, :, None, None], math.nan)

    num_tokens = sum(query_len for query_len, _ in lengths)
    query_shape = (num_tokens, shape.num_heads, shape.head_dim)
    inputs = AttentionInputs(
        query=torch.randn(query_shape, generator=generator, device=device, dtype=shape.dtype),
        key_cache=random_cache(),
        value_cache=random_cache(),
        metadata=_metadata(lengths, tables),
        scale=1.5 / math.sqrt(shape.head_dim),  # not the default of torch or flash-attn
        window=window,
    )
    return _in_fp8(inputs) if shape.is_fp8 else inputs


def _in_fp8(inputs: AttentionInputs) -> AttentionInputs:
    """Return the inputs with a cache in FP8; slots that were NaN hold the largest numbers, since codes have no NaN."""
    return replace(
        inputs,
        key_cache=to_fp8(inputs.key_cache, KEY_SCALE),
        value_cache=to_fp8(inputs.value_cache, VALUE_SCALE),
        key_scale=KEY_SCALE,
        value_scale=VALUE_SCALE,
    )


def _metadata(lengths: Lengths, tables: torch.Tensor) -> AttentionMetadata:
    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=tables.device)

    num_tokens = sum(query_len for query_len, _ in lengths)
    return AttentionMetadata(
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=tables.device),  # attention stores nothing
        cu_seqlens_q=tensor([0, *accumulate(query_len for query_len, _ in lengths)]),
        seq_lens=tensor([seq_len for _, seq_len in lengths]),
        block_tables=tables,
        num_decodes=leading_decodes(query_len for query_len, _ in lengths),
        max_query_len=max(query_len for query_len, _ in lengths),
        max_seq_len=max(seq_len for _, seq_len in lengths),
    )


def chunked_reference(inputs: AttentionInputs, scores_bytes: int = SCORES_BYTES) -> torch.Tensor:
    """Compute kernels/attention/reference.py in slices of queries, so that its float64 scores fit into memory."""
    return torch.cat([reference.attention(part) for part in _slices(inputs, scores_bytes)])


def _slices(inputs: AttentionInputs, scores_bytes: int) -> Iterator[AttentionInputs]:
    """Yield each sequence's queries, a few at a time, as a batch of one sequence that ends at the last of them."""
    metadata = inputs.metadata
    bounds = pairwise(metadata.cu_seqlens_q.tolist())
    for index, ((start, end), seq_len) in enumerate(zip(bounds, metadata.seq_lens.tolist(), strict=True)):
        at_once = max(1, scores_bytes // (8 * inputs.num_heads * max(seq_len, 1)))
        for first in range(start, end, at_once):
            last = min(first + at_once, end)
            tables = metadata.block_tables[index : index + 1]
            part = _metadata([(last - first, max(seq_len - (end - last), 0))], tables)
            yield replace(inputs, query=inputs.query[first:last], metadata=part)


def worst_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest error as a share of the dtype's tolerance; NaN counts as infinite.

    The error of one head's output is the norm of the difference over that of the reference. An absolute one would mean
    nothing here: after a long context, outputs are averages of many values, and tiny.
    """
    difference = (actual.double() - expected.double()).norm(dim=-1)
    error = difference / expected.double().norm(dim=-1).clamp(min=1e-6)  # padding must be zero
    return float(error.nan_to_num(nan=math.inf).max()) / TOLERANCES[expected.dtype]
