"""KVCache: the keys and values of one rank, in a pool on the device and a pool on the host for swapped-out blocks.

It copies blocks by id. The block manager decides which block belongs to which sequence, and which may be overwritten.
Each layer declares what it caches (layer_cache.py). Keys and values of one shape are one tensor of the device pool, so
that one operation copies them; most models have one shape.

    device pool   [num_parts, num_blocks, block_size, heads, dim] for each shape    a layer's keys are one part
    host pool     [num_host_blocks, bytes_per_block]                                a block is one piece of memory

Copies preserve every bit, also the payload of a NaN, because they use integer views of both pools.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import ConfigError, KVCacheError
from engine.kv.layer_cache import KeyValue, bytes_per_token
from engine.kv.pinned_memory import pinned_zeros, unpin
from kernels.cpu.memory import huge_zeros
from kernels.cpu.prefaulter import Prefaulter
from kernels.device_copy import to_device

__all__ = ["KVCache"]


class KVCache:
    """The paged keys and values of every layer that one rank computes.

    On a GPU every operation is queued on the current stream and returns at once, so it runs after the steps launched
    before it and before those launched later. Only code that reads the host pool itself must synchronize.

    Args:
        layers: what each layer caches.
        num_blocks: blocks of the device pool.
        block_size: tokens per block.
        dtype: dtype of keys and values.
        device: device on which attention reads them.
        num_host_blocks: blocks of the host pool; pinned memory if ``device`` is a GPU.
        num_blocks_ahead: blocks to prefault before they are used; only with CPU kernels.

    Attributes:
        layers: each layer's (keys, values), ``[num_blocks, block_size, heads, key_dim or value_dim]``; views.

    Raises:
        ConfigError: if the memory for a pool cannot be allocated.
    """

    def __init__(
        self,
        layers: Sequence[KeyValue],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int = 0,
        num_blocks_ahead: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = block_size
        self.device = device
        self.bytes_per_block = block_size * bytes_per_token(layers, dtype.itemsize)
        shapes = [(layer.heads, dim) for layer in layers for dim in (layer.key_dim, layer.value_dim)]
        remedy = "lower num_blocks, kv_cache_memory or gpu_memory_utilization"
        with _explained(f"{num_blocks} KV blocks on {device}", self.num_bytes, remedy):
            pools = {
                shape: _zeros((num_parts, num_blocks, block_size, *shape), dtype, device)
                for shape, num_parts in Counter(shapes).items()
            }
        with _explained(
            f"{num_host_blocks} swapped KV blocks on the host", self.num_host_bytes, "lower swap_space_gib"
        ):
            self._host = self._make_host_pool((num_host_blocks, self.bytes_per_block))
        parts = {shape: iter(pool) for shape, pool in pools.items()}
        views = [next(parts[shape]) for shape in shapes]
        self.layers = list(zip(views[::2], views[1::2], strict=True))
        self._prefaulter = None
        if num_blocks_ahead:
            self._prefaulter = Prefaulter(views, num_blocks_ahead)
            self._prefaulter.use(0)
        # For each shape [num_parts, num_blocks, words] on the device and [num_host_blocks, num_parts, words] there.
        self._words = _as_words([pool.flatten(2) for pool in pools.values()])
        self._host_words = _split_host_pool(self._host, self._words)

    def _make_host_pool(self, shape: tuple[int, int]) -> torch.Tensor:
        if self.device.type == "cpu" or not self.num_host_blocks:
            return torch.empty(shape, dtype=torch.uint8)
        pool = pinned_zeros(shape, torch.uint8)
        weakref.finalize(self, unpin, pool, self.device)  # which keeps the memory until it is unlocked
        return pool

    # --- size ---------------------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Bytes of the device pool."""
        return self.num_blocks * self.bytes_per_block

    @property
    def num_host_bytes(self) -> int:
        """Bytes of the host pool."""
        return self.num_host_blocks * self.bytes_per_block

    @property
    def num_tokens(self) -> int:
        """Tokens that the device pool holds."""
        return self.num_blocks * self.block_size

    def expect(self, slot_mapping: npt.NDArray[np.int64]) -> None:
        """Prefault the blocks after those that the next step writes; returns at once."""
        if self._prefaulter is not None:
            self._prefaulter.use(int(slot_mapping.max()) // self.block_size)

    # --- copies -------------------------------------------------------------------------------------------------

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks ``(source, target)`` on the device, in all layers, as if all at the same time.

        The copy needs as much extra memory as the sources have. Use it for few blocks, as copy-on-write does.

        Raises:
            KVCacheError: for a block that does not exist or is a target twice; nothing has been copied then.
        """
        sources, targets = self._check_pairs(pairs, ("block", self.num_blocks), ("block", self.num_blocks))
        if pairs:
            source_index, target_index = self._index(sources), self._index(targets)
            for words in self._words:
                words.index_copy_(1, target_index, words.index_select(1, source_index))

    def swap_out(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks ``(device block, host block)`` to the host pool.

        On a GPU the next launched operation may overwrite the device blocks, and ``swap_in`` may follow at once.

        Raises:
            KVCacheError: for a block that does not exist or is a target twice; nothing has been copied then.
        """
        self._check_pairs(pairs, ("block", self.num_blocks), ("host block", self.num_host_blocks))
        # One block at a time: staging memory for all blocks would not fit on a full GPU.
        for block_id, host_id in pairs:
            for words, host_words in zip(self._words, self._host_words, strict=True):
                host_words[host_id].copy_(words[:, block_id], non_blocking=True)

    def swap_in(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks ``(host block, device block)`` back to the device; the host blocks keep their content.

        On a GPU the next ``swap_out`` may reuse the host blocks at once: it is queued after the reads.

        Raises:
            KVCacheError: for a block that does not exist or is a target twice; nothing has been copied then.
        """
        self._check_pairs(pairs, ("host block", self.num_host_blocks), ("block", self.num_blocks))
        for host_id, block_id in pairs:
            for words, host_words in zip(self._words, self._host_words, strict=True):
                words[:, block_id].copy_(host_words[host_id], non_blocking=True)

    def _index(self, block_ids: list[int]) -> torch.Tensor:
        return to_device(block_ids, torch.int64, self.device)

    @staticmethod
    def _check_pairs(
        pairs: list[tuple[int, int]], source_pool: tuple[str, int], target_pool: tuple[str, int]
    ) -> tuple[list[int], list[int]]:
        sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
        _check_ids(source_pool[0], sources, source_pool[1])
        _check_ids(target_pool[0], targets, target_pool[1])
        if len(set(targets)) < len(targets):
            twice = next(target for target in targets if targets.count(target) > 1)
            raise KVCacheError(f"{target_pool[0]} {twice} is written twice in one call; name every target once")
        return sources, targets


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros: a NaN in uninitialized memory would survive masking. On a CPU, pages are zeroed on first use."""
    return huge_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)


@contextmanager
def _explained(what: str, num_bytes: int, remedy: str) -> Iterator[None]:
    """Turn a failed allocation into a ConfigError that names its size and the option to change."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one, and a CPU raises no other
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{what} take {num_bytes / 2**30:.2f} GiB, which cannot be allocated; {remedy} ({reason})"
        ) from error


def _check_ids(kind: str, ids: Iterable[int], count: int) -> None:
    for number in ids:
        if not 0 <= number < count:
            valid = f"0 to {count - 1}" if count else "none: the pool is empty"
            raise KVCacheError(f"{kind} {number} is out of range; valid are {valid}")


def _as_words(pools: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of the last dimensions as the widest integers that divide all of them: these copy fastest."""
    num_bytes = math.gcd(*(pool.shape[-1] * pool.dtype.itemsize for pool in pools))
    widest = next(
        dtype for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8) if num_bytes % dtype.itemsize == 0
    )
    return [pool.view(widest) for pool in pools]


def _split_host_pool(host: torch.Tensor, pools: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of the host pool [num_host_blocks, num_parts, words] with the parts and words of each pool."""
    shapes = [(pool.shape[0], pool.shape[2]) for pool in pools]
    sections = torch.split(host.view(pools[0].dtype), [math.prod(shape) for shape in shapes], dim=1)
    return [section.view(len(host), *shape) for section, shape in zip(sections, shapes, strict=True)]
