"""Paged attention on a CPU: the C kernel where there is one, else torch's own operators.

The C kernel (kernels/cpu/attention.py) reads the cache in place. Without a compiler, and for what it does not support,
the keys and values of a sequence are gathered and given to SDPA.

torch's CPU SDPA is a FlashAttention-2 kernel (Dao, 2023) that keeps scores and sums in float32. Query heads that share
a KV head are given to it as one longer query (decode) or as a broadcast view (prefill), so no head is ever copied.
What to gather is decided in cpu_plan.py, once a step.
"""

from __future__ import annotations

from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention.base import AttentionBackend, AttentionMetadata
from kernels.attention.cpu_plan import QUERIES_PER_TILE, CpuPlan, DecodeGroup, Prefill, make_plan
from kernels.cpu.attention import is_supported, paged_attention


class CpuBackend(AttentionBackend):
    """The backend of a machine without a GPU: float32, bfloat16 and float16, any block size. Used by one thread.

    With `use_c_kernel` False everything is computed by torch's operators.
    """

    name: ClassVar[str] = "cpu"
    default_block_size: ClassVar[int] = 16

    def __init__(self, *, use_c_kernel: bool = True) -> None:
        self._use_c_kernel = use_c_kernel
        # A step's layers share a plan unless they differ in their sliding window; it lives as long as the metadata.
        self._plans: WeakKeyDictionary[AttentionMetadata, dict[tuple[int, int | None], CpuPlan]] = WeakKeyDictionary()
        self._gathered = _GatherBuffers()
        self._bands: dict[tuple[int | None, torch.dtype], torch.Tensor] = {}

    def check_block_size(self, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size={block_size} holds no token; the cpu attention backend needs 1 or more")

    def forward(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        if self._use_c_kernel and is_supported(key_cache.dtype, key_cache.shape[3]):
            return paged_attention(query, key_cache, value_cache, metadata, scale=scale, sliding_window=sliding_window)
        return self._forward_in_torch(
            query, key_cache, value_cache, metadata, scale=scale, sliding_window=sliding_window
        )

    def _forward_in_torch(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        plan = self._plan(metadata, key_cache.shape[1], sliding_window)
        output = query.new_empty(query.shape) if plan.covers_all_rows else query.new_zeros(query.shape)
        for group in plan.decode_groups:
            keys, values = self._gathered.read(key_cache, value_cache, group.slots)
            output[group.query_rows] = _decode(query[group.query_rows], keys, values, group, scale)
        for prefill in plan.prefills:
            keys, values = self._gathered.read(key_cache, value_cache, prefill.slots)
            self._prefill(query, keys, values, prefill, output, scale, sliding_window)
        return output

    def _plan(self, metadata: AttentionMetadata, block_size: int, sliding_window: int | None) -> CpuPlan:
        plans = self._plans.setdefault(metadata, {})
        if (block_size, sliding_window) not in plans:
            plans[block_size, sliding_window] = make_plan(metadata, block_size, sliding_window)
        return plans[block_size, sliding_window]

    def _prefill(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        prefill: Prefill,
        output: torch.Tensor,
        scale: float,
        sliding_window: int | None,
    ) -> None:
        for tile in prefill.tiles:
            rows = query[tile.query_rows]
            mask = None
            if not prefill.is_causal:
                mask = self._band(rows.shape[0], tile.keys.stop - tile.keys.start, sliding_window, query.dtype)
            output[tile.query_rows] = _attend_tile(rows, keys[tile.keys], values[tile.keys], mask, scale)

    def _band(self, num_rows: int, num_keys: int, sliding_window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return the [num_rows, num_keys] mask, added to scores, of a tile whose last query's key is the last key.

        Which keys a query sees depends only on how far they are from the last row and column, so every tile of every
        sequence is the lower right corner of one band, which only grows.
        """
        band = self._bands.get((sliding_window, dtype))
        if band is None or band.shape[1] < num_keys:
            band = _make_band(1 << (num_keys - 1).bit_length(), sliding_window, dtype)
            self._bands[sliding_window, dtype] = band
        return band[band.shape[0] - num_rows :, band.shape[1] - num_keys :]


class _GatherBuffers:
    """Memory that gathered keys and values are copied to: fresh memory for every layer would cost its page faults."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def read(
        self, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values at `slots`, [len(slots), num_kv_heads, head_dim], valid until the next call."""
        shape = (slots.shape[0], *key_cache.shape[2:])
        size = shape[0] * shape[1] * shape[2]
        if not self._buffers or self._buffers[0].numel() < size or self._buffers[0].dtype != key_cache.dtype:
            with torch.inference_mode(False):  # else a later call outside inference mode could not write to them
                self._buffers = [torch.empty(size, dtype=key_cache.dtype) for _ in range(2)]
        keys, values = (buffer[:size].view(shape) for buffer in self._buffers)
        torch.index_select(key_cache.view(-1, *shape[1:]), 0, slots, out=keys)
        torch.index_select(value_cache.view(-1, *shape[1:]), 0, slots, out=values)
        return keys, values


def _make_band(num_keys: int, sliding_window: int | None, dtype: torch.dtype) -> torch.Tensor:
    rows_behind_last = torch.arange(QUERIES_PER_TILE - 1, -1, -1)[:, None]
    keys_behind_last = torch.arange(num_keys - 1, -1, -1)[None, :]
    distance = keys_behind_last - rows_behind_last  # query's position - key's position
    hidden = distance < 0
    if sliding_window is not None:
        hidden |= distance >= sliding_window
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


def _decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: DecodeGroup, scale: float
) -> torch.Tensor:
    """Attend from one query a sequence, [num_seqs, num_heads, head_dim]; the heads of a group act as its length."""
    num_seqs, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    grouped = query.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    keys = keys.view(num_seqs, -1, num_kv_heads, head_dim).transpose(1, 2)
    values = values.view(num_seqs, -1, num_kv_heads, head_dim).transpose(1, 2)
    attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=group.visible, scale=scale)
    return attended.reshape(query.shape)


def _attend_tile(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Attend from [num_rows, num_heads, head_dim] under `mask`, or without one under a plain causal triangle."""
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    group_size = num_heads // num_kv_heads
    grouped = query.view(num_rows, num_kv_heads, group_size, head_dim).permute(1, 2, 0, 3)
    keys = keys.transpose(0, 1)[:, None].expand(-1, group_size, -1, -1)
    values = values.transpose(0, 1)[:, None].expand(-1, group_size, -1, -1)
    attended = scaled_dot_product_attention(
        grouped, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale
    )  # [num_kv_heads, group_size, num_rows, head_dim]
    return attended.permute(2, 0, 1, 3).reshape(query.shape)
