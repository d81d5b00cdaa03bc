"""Random paged batches for the kernel tests, and the tolerances they are compared with.

A batch's blocks are scattered over the cache in random order, and every slot that no live token owns holds NaN: a
kernel that reads one it must not read shows it in its output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from kernels.attention import reference
from kernels.attention.base import AttentionBackend, AttentionInputs
from kernels.attention.window import Chunk, Window, first_key
from kernels.attention_metadata import AttentionMetadata, leading_decodes

TOLERANCES = {  # (absolute, relative), against the float64 reference of the same inputs
    torch.float32: (2e-5, 1e-5),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1e-2, 1.6e-2),
}

PADDING = (1, 0)
BATCHES = {  # (query_len, seq_len) of each sequence
    "one token": [(1, 1)],
    "one prompt": [(17, 17)],
    "decodes around a block's edge": [(1, 15), (1, 16), (1, 17), (1, 1), (1, 33)],
    "chunks after a prefix": [(5, 21), (16, 32), (2, 2)],
    "mixed": [(1, 40), (9, 9), (1, 3), (7, 30)],
    "decodes, then chunks": [(1, 40), (1, 700), (1, 3), (9, 9), (70, 130), (1, 30)],
    "padded decodes": [(1, 20), (1, 5), PADDING, PADDING],
    "padded mixed": [(1, 20), PADDING, (4, 10), PADDING],
    "padding alone": [PADDING, PADDING],
}
WINDOWS: list[Window | None] = [None, 1, 5, 100, Chunk(1), Chunk(6), Chunk(32)]
OPTIONS = [("softcap",), ("sinks",), ("softcap", "sinks")]


@dataclass(frozen=True)
class Shape:
    """The part of a model and an engine that attention sees."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.float32


SHAPES = {
    "no groups": Shape(num_heads=3, num_kv_heads=3),
    "pairs": Shape(num_heads=4, num_kv_heads=2, block_size=4),
    "groups of 4, width 80": Shape(num_heads=8, num_kv_heads=2, head_dim=80),
    "groups of 7": Shape(num_heads=14, num_kv_heads=2, head_dim=16, block_size=1),
    "one KV head, width 96, large blocks": Shape(num_heads=4, num_kv_heads=1, head_dim=96, block_size=256),
}


@dataclass(frozen=True)
class Batch:
    """One layer's paged cache and queries, for any window."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    metadata: AttentionMetadata

    @property
    def scale(self) -> float:
        return 1.5 / math.sqrt(self.query.shape[-1])  # not the default of torch or flash-attn

    def inputs(self, window: Window | None = None, *options: str) -> AttentionInputs:
        """Return a layer's inputs, with the options of registry.py that are named."""
        layer = AttentionInputs(self.query, self.key_cache, self.value_cache, self.metadata, self.scale, window)
        sinks = torch.linspace(-1.0, 3.0, self.query.shape[1], device=self.query.device)
        return replace(
            layer, softcap=1.3 if "softcap" in options else None, sinks=sinks if "sinks" in options else None
        )

    def run(self, backend: AttentionBackend, window: Window | None = None, *options: str) -> torch.Tensor:
        return backend.forward(self.inputs(window, *options))

    def expected(self, window: Window | None = None, *options: str) -> torch.Tensor:
        return reference.attention(self.inputs(window, *options))

    def one_sequence(self, index: int) -> Batch:
        """Return the batch of this sequence alone, in the same cache."""
        start, end = self.metadata.cu_seqlens_q[index : index + 2].tolist()
        seq_lens = self.metadata.seq_lens[index : index + 1]
        metadata = AttentionMetadata(
            slot_mapping=self.metadata.slot_mapping[start:end],
            cu_seqlens_q=self.metadata.cu_seqlens_q[index : index + 2] - start,
            seq_lens=seq_lens,
            block_tables=self.metadata.block_tables[index : index + 1],
            num_decodes=leading_decodes([end - start]),
            max_query_len=end - start,
            max_seq_len=int(seq_lens),
        )
        return replace(self, query=self.query[start:end], metadata=metadata)

    def last_queries(self, count: int) -> Batch:
        """Return a batch of one sequence whose last chunk of the prompt has so many tokens, maybe one."""
        metadata = replace(
            self.metadata,
            slot_mapping=self.metadata.slot_mapping[-count:],
            cu_seqlens_q=self.metadata.cu_seqlens_q.clamp(max=count),
            num_decodes=0,
            max_query_len=count,
        )
        return replace(self, query=self.query[-count:], metadata=metadata)


def make_batch(
    lengths: list[tuple[int, int]], shape: Shape, *, seed: int = 0, device: torch.device | None = None
) -> Batch:
    """Make a batch of sequences given as (query_len, seq_len); PADDING makes a sequence without a block."""
    generator = torch.Generator().manual_seed(seed)
    tables, num_blocks = _block_tables([seq_len for _, seq_len in lengths], shape.block_size, generator)
    caches = [torch.full((num_blocks * shape.block_size, shape.num_kv_heads, shape.head_dim), math.nan) for _ in "kv"]
    slot_mapping: list[int] = []
    for table, (query_len, seq_len) in zip(tables, lengths, strict=True):
        slots = [int(table[p // shape.block_size]) * shape.block_size + p % shape.block_size for p in range(seq_len)]
        for cache in caches:
            cache[slots] = torch.randn(seq_len, shape.num_kv_heads, shape.head_dim, generator=generator)
        slot_mapping += slots[seq_len - query_len :] if seq_len else [-1] * query_len
    query = torch.randn(len(slot_mapping), shape.num_heads, shape.head_dim, generator=generator)
    key_cache, value_cache = (
        cache.view(num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim).to(device, shape.dtype)
        for cache in caches
    )
    metadata = _metadata(lengths, tables, slot_mapping, device)
    return Batch(query.to(device, shape.dtype), key_cache, value_cache, metadata)


def with_latents(batch: Batch, value_dim: int) -> Batch:
    """Return the batch with values that are the beginnings of its keys, as those of latents are."""
    return replace(batch, value_cache=batch.key_cache[..., :value_dim])


def expanded(batch: Batch, key_dim: int, value_dim: int) -> AttentionInputs:
    """Return inputs with keys and values as expanded latents have them.

    Args:
        batch: whose keys have the elements of a key and a value of its head, and then those that all heads share.
        key_dim: elements of a head's own key.
        value_dim: those of its value, which follow.
    """
    own, rest = batch.key_cache[..., : key_dim + value_dim].contiguous(), batch.key_cache[..., key_dim + value_dim :]
    rope_cache = torch.nn.functional.pad(rest[..., :1, :], (24, 0))[..., 24:]  # after a latent
    return AttentionInputs(
        batch.query[..., value_dim:],  # after what completes a query of latents
        own[..., :key_dim],
        own[..., key_dim:],
        batch.metadata,
        batch.scale,
        rope_cache=rope_cache,
    )


def with_padding_of_length_one(batch: Batch) -> Batch:
    """Return the same batch with the other kind of padding sequence: one token long, yet without a block."""
    return replace(batch, metadata=replace(batch.metadata, seq_lens=batch.metadata.seq_lens.clamp(min=1)))


def without_blocks_before(batch: Batch, window: Window) -> Batch:
    """Return the batch as an engine leaves it that frees blocks no query's window reaches: NaN, and -1 in the table."""
    block_size = batch.key_cache.shape[1]
    tables, key_cache = batch.metadata.block_tables.clone(), batch.key_cache.clone()
    query_lens = batch.metadata.cu_seqlens_q.diff()
    for table, seq_len, query_len in zip(tables, batch.metadata.seq_lens, query_lens, strict=True):
        num_freed = first_key(window, int(seq_len - query_len)) // block_size
        key_cache[table[:num_freed].long()] = math.nan
        table[:num_freed] = -1
    return replace(batch, key_cache=key_cache, metadata=replace(batch.metadata, block_tables=tables))


def assert_matches(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare with the reference, within the tolerance of its dtype."""
    absolute, relative = TOLERANCES[expected.dtype]
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert not expected.isnan().any()
    torch.testing.assert_close(actual, expected, atol=absolute, rtol=relative)


def _metadata(
    lengths: list[tuple[int, int]], tables: torch.Tensor, slot_mapping: list[int], device: torch.device | None
) -> AttentionMetadata:
    bounds = torch.tensor([0, *(query_len for query_len, _ in lengths)]).cumsum(0)
    return AttentionMetadata(
        slot_mapping=torch.tensor(slot_mapping, dtype=torch.int64, device=device),
        cu_seqlens_q=bounds.to(device, torch.int32),
        seq_lens=torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        num_decodes=leading_decodes(query_len for query_len, _ in lengths),
        max_query_len=max((query_len for query_len, _ in lengths), default=0),
        max_seq_len=max((seq_len for _, seq_len in lengths), default=0),
    )


def _block_tables(seq_lens: list[int], block_size: int, generator: torch.Generator) -> tuple[torch.Tensor, int]:
    """Return int32 [num_seqs, max_blocks] tables of shuffled blocks, and how many blocks there are, some unused."""
    counts = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = sum(counts) + 3
    shuffled = torch.randperm(num_blocks, generator=generator).tolist()
    width = max(counts, default=0) + 1  # at least one -1 after every table
    rows = []
    for count in counts:
        rows.append(shuffled[:count] + [-1] * (width - count))
        del shuffled[:count]
    return torch.tensor(rows, dtype=torch.int32).view(len(rows), width), num_blocks
