"""Paged attention by torch's SDPA: gathers the keys and values of sequences and attends to them.

torch's CPU SDPA is a FlashAttention-2 kernel (Dao, 2023) that keeps scores and sums in float32. Query heads that share
a KV head become one longer query (decode) or a broadcast view (prefill), so no head is ever copied. sdpa_plan.py
decides once a step what is gathered together. Layers with a soft-cap or sinks, which SDPA lacks, use softmax.py.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention.base import AttentionInputs
from kernels.attention.sdpa_plan import QUERIES_PER_TILE, DecodeGroup, Prefill, SdpaPlan, make_plan
from kernels.attention.softmax import softmax_attention
from kernels.attention.window import Window, sliding_and_chunk
from kernels.attention_metadata import AttentionMetadata

__all__ = ["SdpaAttention"]


_Plans = dict[tuple[int, Window | None], SdpaPlan]  # by block size and window


class SdpaAttention:
    """Attention by torch's operators, for CPUs without a C compiler and for what the C kernel does not support."""

    def __init__(self) -> None:
        # A step's layers share a plan unless they differ in their window; it lives as long as the metadata.
        self._plans: WeakKeyDictionary[AttentionMetadata, _Plans] = WeakKeyDictionary()
        self._gathered = _GatherBuffers()
        self._masks = _BandMasks()

    def forward(self, inputs: AttentionInputs) -> torch.Tensor:
        """Compute `AttentionBackend.forward`."""
        query = inputs.query
        shape = (*query.shape[:2], inputs.value_dim)
        plan = self._plan(inputs.metadata, inputs.block_size, inputs.window)
        output = query.new_empty(shape) if plan.covers_all_rows else query.new_zeros(shape)
        for group in plan.decode_groups:
            keys, values = self._gathered.read(inputs, group.slots)
            output[group.query_rows] = _decode(inputs, query[group.query_rows], keys, values, group)
        for prefill in plan.prefills:
            keys, values = self._gathered.read(inputs, prefill.slots)
            self._prefill(inputs, keys, values, prefill, output)
        return output

    def _plan(self, metadata: AttentionMetadata, block_size: int, window: Window | None) -> SdpaPlan:
        plans = self._plans.setdefault(metadata, {})
        if (block_size, window) not in plans:
            plans[block_size, window] = make_plan(metadata, block_size, window)
        return plans[block_size, window]

    def _prefill(
        self,
        inputs: AttentionInputs,
        keys: torch.Tensor,
        values: torch.Tensor,
        prefill: Prefill,
        output: torch.Tensor,
    ) -> None:
        for tile in prefill.tiles:
            queries = inputs.query[tile.query_rows]
            mask = None
            if not prefill.is_causal:
                num_keys = tile.keys.stop - tile.keys.start
                sliding, _ = sliding_and_chunk(inputs.window)  # a tile's queries are in one chunk, as are its keys
                mask = self._masks.get(queries.shape[0], num_keys, sliding or None, queries.dtype)
            output[tile.query_rows] = _attend_tile(inputs, queries, keys[tile.keys], values[tile.keys], mask)


class _GatherBuffers:
    """Memory that gathered keys and values are copied to: fresh memory for every layer would cost its page faults."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def read(self, inputs: AttentionInputs, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values at `slots`, [len(slots), num_kv_heads, their dim], valid until the next call.

        The values of latents are views of the keys.
        """
        dtype, num_rows = inputs.key_cache.dtype, slots.shape[0] * inputs.num_kv_heads
        size = num_rows * max(inputs.head_dim, inputs.value_dim)
        if not self._buffers or self._buffers[0].numel() < size or self._buffers[0].dtype != dtype:
            with torch.inference_mode(False):  # else a later call outside inference mode could not write to them
                self._buffers = [torch.empty(size, dtype=dtype) for _ in range(2)]
        keys, values = (
            buffer[: num_rows * dim].view(-1, inputs.num_kv_heads, dim)
            for buffer, dim in zip(self._buffers, (inputs.head_dim, inputs.value_dim), strict=True)
        )
        torch.index_select(inputs.key_cache.view(-1, *keys.shape[1:]), 0, slots, out=keys)
        if inputs.has_latents:
            return keys, keys[..., : inputs.value_dim]
        torch.index_select(inputs.value_cache.view(-1, *values.shape[1:]), 0, slots, out=values)
        return keys, values


class _BandMasks:
    """Masks of tiles whose last query's own key is the last key.

    Which keys a query sees depends only on its distance from the last row and column. So the mask of every tile of
    every sequence is the lower right corner of one band, which only grows.
    """

    def __init__(self) -> None:
        self._bands: dict[tuple[int | None, torch.dtype], torch.Tensor] = {}

    def get(self, num_rows: int, num_keys: int, sliding_window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return a [num_rows, num_keys] mask, which is added to scores."""
        band = self._bands.get((sliding_window, dtype))
        if band is None or band.shape[1] < num_keys:
            band = _make_band(1 << (num_keys - 1).bit_length(), sliding_window, dtype)
            self._bands[sliding_window, dtype] = band
        return band[band.shape[0] - num_rows :, band.shape[1] - num_keys :]


def _make_band(num_keys: int, sliding_window: int | None, dtype: torch.dtype) -> torch.Tensor:
    rows_after = torch.arange(QUERIES_PER_TILE - 1, -1, -1)[:, None]
    keys_after = torch.arange(num_keys - 1, -1, -1)[None, :]
    distance = keys_after - rows_after  # query's position - key's position
    hidden = distance < 0
    if sliding_window is not None:
        hidden |= distance >= sliding_window
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


def _decode(
    inputs: AttentionInputs, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: DecodeGroup
) -> torch.Tensor:
    """Attend from one query a sequence, [num_seqs, num_heads, head_dim]; the heads of a group act as its length."""
    num_seqs, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    grouped = query.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    keys = keys.view(num_seqs, -1, num_kv_heads, head_dim).transpose(1, 2)
    values = values.view(num_seqs, -1, num_kv_heads, values.shape[2]).transpose(1, 2)
    sinks = None if inputs.sinks is None else inputs.sinks.view(num_kv_heads, -1, 1)
    return _attend(inputs, grouped, keys, values, group.visible, sinks).reshape(num_seqs, num_heads, -1)


def _attend_tile(
    inputs: AttentionInputs, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attend from [num_rows, num_heads, head_dim] under `mask`, or without one under a plain causal triangle."""
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    group_size = num_heads // num_kv_heads
    grouped = query.view(num_rows, num_kv_heads, group_size, head_dim).permute(1, 2, 0, 3)
    keys = keys.transpose(0, 1)[:, None].expand(-1, group_size, -1, -1)
    values = values.transpose(0, 1)[:, None].expand(-1, group_size, -1, -1)
    sinks = None if inputs.sinks is None else inputs.sinks.view(num_kv_heads, group_size, 1, 1)
    attended = _attend(inputs, grouped, keys, values, mask, sinks, is_causal=mask is None)
    # From [num_kv_heads, group_size, num_rows, value_dim].
    return attended.permute(2, 0, 1, 3).reshape(num_rows, num_heads, -1)


def _attend(
    inputs: AttentionInputs,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *,
    is_causal: bool = False,
) -> torch.Tensor:
    if inputs.softcap is None and sinks is None:
        return scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=is_causal, scale=inputs.scale
        )
    return softmax_attention(
        query,
        keys,
        values,
        mask=mask,
        is_causal=is_causal,
        scale=inputs.scale,
        softcap=inputs.softcap,
        sinks=sinks,
    )
