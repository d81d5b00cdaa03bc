"""KVCache: what the layers of one rank cache, in pools of pages on the device and on the host.

Each layer declares what it caches (layer_cache.py). Layers whose pages live equally long share a pool:

    blocks    the keys and values of ``block_size`` tokens, or their latents, in the layers that attend to everything
    windows   the same of the layers with one window, sliding or a chunk: a pool for each window
    slots     the states of one sequence, in the recurrent layers

It copies pages by id. The block manager decides which page belongs to which sequence, and which may be overwritten.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.kv.layer_cache import LayerCache, SharedWith, State, TokenCache, dtype_of, windows_of
from engine.kv.page_memory import PageMemory
from engine.kv.pool_sizes import PoolSizes
from engine.kv.shared_host import HostShare
from engine.kv.tiers.host_memory import HostMemory
from engine.kv.tiers.page_format import PageKind
from kernels.attention.window import Window
from kernels.cache.fp8 import FP8

__all__ = ["CachedLayers", "KVCache"]

_SLOTS_AHEAD = 4  # to prefault; the states of a sequence take many megabytes
_REMEDY = "lower num_blocks, kv_cache_memory or gpu_memory_utilization"


@dataclass(frozen=True)
class CachedLayers:
    """The caches of one of the models that share a KVCache.

    Attributes:
        layers: as those of KVCache, of this model's declarations only.
        block_size: tokens per block.
    """

    layers: list[tuple[torch.Tensor, ...]]
    block_size: int


class KVCache:
    """The caches of every layer that one rank computes.

    Args:
        layers: what each layer caches.
        sizes: the number of pages of each pool.
        block_size: tokens per block, and per page of a window.
        dtype: the model's, of keys, values and latents unless a layer declares FP8; states are float32.
        device: device on which kernels read them.
        rank: whose part of the pages this is.
        shares: the host pools that all ranks share, in the order of ``pools``; empty: this rank has its own.
        num_blocks_ahead: blocks, and pages of each window, to prefault before they are used, and a few pages of the
            host pools; only with CPU kernels.

    Attributes:
        layers: each declaration's tensors: (keys, values), ``[num_pages, block_size, heads, key_dim or value_dim]``,
            (latents,), ``[num_pages, block_size, rank + rope_dim]``, (index keys,), ``[num_pages, block_size, dim]``,
            (hidden states,), ``[num_pages, block_size, size]``, (marks,), ``[num_pages, block_size, 8 bytes]``,
            or the states, ``[num_slots, *shape]``; of a SharedWith those of the declaration that it names.
        blocks: pages of the layers that attend to everything.
        windows: pages of the layers with each window, in the order of ``windows_of``.
        slots: states.

    Raises:
        ConfigError: if the memory for a pool cannot be allocated.
    """

    def __init__(
        self,
        layers: Sequence[LayerCache],
        sizes: PoolSizes,
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_blocks_ahead: int = 0,
        rank: int = 0,
        shares: Sequence[HostShare] = (),
    ) -> None:
        unused = iter(shares)
        self.sizes, self.block_size = sizes, block_size

        def pages(name: str, shapes: list[tuple[int, ...]], count: int, **options: Any) -> PageMemory:
            share = next(unused, None)
            options = {"device": device, "remedy": _REMEDY, "rank": rank, "share": share, **options}
            return PageMemory(name, shapes, num_pages=count, **options)

        def pages_of(window: Window | None, name: str, count: int, num_on_host: int) -> PageMemory:
            options = {"dtype": FP8 if dtype_of(layers, window) == "fp8" else dtype, "num_host_pages": num_on_host}
            return pages(name, _shapes(layers, window, block_size), count, **options)

        self.blocks = pages_of(None, "KV block", sizes.num_blocks, sizes.num_host_blocks)
        on_host = sizes.num_host_window_pages or (0,) * len(sizes.num_window_pages)
        self.windows = {
            window: pages_of(window, "KV page", count, num_on_host)
            for window, count, num_on_host in zip(windows_of(layers), sizes.num_window_pages, on_host, strict=True)
        }
        states = [shape for layer in layers if isinstance(layer, State) for shape in layer.shapes]
        options = {"dtype": torch.float32, "num_host_pages": sizes.num_host_slots}
        self.slots = pages("state slot", states, sizes.num_slots, **options)
        own = list(self._tensors(layers))
        self.layers = [own[layer.index if isinstance(layer, SharedWith) else i] for i, layer in enumerate(layers)]
        if num_blocks_ahead:
            for pool in (self.blocks, *self.windows.values()):
                pool.prefault(num_blocks_ahead)
            self.slots.prefault(_SLOTS_AHEAD)
            for pool in self.pools:
                pool.prefault_host()

    def _tensors(self, layers: Sequence[LayerCache]) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield each declaration's own tensors: the parts of the pools, in the order of their shapes."""
        parts: dict[Window | None, Iterator[torch.Tensor]] = {None: iter(self.blocks.parts)}
        parts |= {window: iter(pool.parts) for window, pool in self.windows.items()}
        slots = iter(self.slots.parts)
        for layer in layers:
            if isinstance(layer, TokenCache):
                yield tuple(islice(parts[layer.window], len(layer.token_shapes)))
            else:
                yield tuple(islice(slots, len(layer.shapes) if isinstance(layer, State) else 0))

    def part(self, first: int, end: int) -> CachedLayers:
        """Return the caches of the declarations from index ``first`` to ``end``."""
        return CachedLayers(self.layers[first:end], self.block_size)

    @property
    def pools(self) -> list[PageMemory]:
        """The pools: of blocks, of each window, and of slots."""
        return [self.blocks, *self.windows.values(), self.slots]

    @property
    def host_memory(self) -> HostMemory:
        """The bytes of the host pools: of blocks, of each window, and of slots if there are any."""
        pools = [("blocks", self.blocks), *((f"window {window}", pool) for window, pool in self.windows.items())]
        if self.sizes.num_slots:
            pools.append(("states", self.slots))
        kinds = [PageKind(name, pool.host_page_bytes) for name, pool in pools]
        expect = [pool.expect_on_host for _, pool in pools]
        return HostMemory(kinds, [pool.host_bytes for _, pool in pools], expect)

    @property
    def num_bytes(self) -> int:
        """Bytes of the pools on the device."""
        return sum(pool.num_bytes for pool in self.pools)

    @property
    def num_tokens(self) -> int:
        """Tokens that the blocks hold."""
        return self.sizes.num_blocks * self.block_size

    def expect(self, slot_mapping: npt.NDArray[np.int64], of_windows: Iterable[npt.NDArray[np.int64]] = ()) -> None:
        """Prefault the blocks and pages after those that the next step writes; returns at once.

        Slots of states are expected by the copies to them, and by ``expect_slots``.
        """
        for pool, mapping in zip((self.blocks, *self.windows.values()), (slot_mapping, *of_windows), strict=False):
            pool.expect(int(mapping.max()) // self.block_size)

    def expect_slots(self, slots: npt.NDArray[np.int32]) -> None:
        """Prefault the slots after those that the next step writes; returns at once."""
        if len(slots):
            self.slots.expect(int(slots.max()))


def _shapes(layers: Sequence[LayerCache], window: Window | None, block_size: int) -> list[tuple[int, ...]]:
    """Return the shapes of what a page holds, in the layers with this window."""
    return [
        (block_size, *shape)
        for layer in layers
        if isinstance(layer, TokenCache) and layer.window == window
        for shape in layer.token_shapes
    ]
