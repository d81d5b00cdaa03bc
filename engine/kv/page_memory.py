"""PageMemory: pages of one size in a pool on the device, and in one on the host for swapped-out ones; copies of them.

A page is a block's keys and values, or the states of a sequence. It consists of parts, one tensor of each layer; those
of one shape are one tensor of the device pool, so that one operation copies them. Most models have one shape.

    device pool   [num_parts, num_pages, *shape] for each shape    a layer's keys, or its values, are one part
    host pool     [num_host_pages, bytes_per_page]                 a page is one piece of memory, see shared_host.py

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
from engine.kv.host.page_staging import PageStaging
from engine.kv.page_copies import PageCopies
from engine.kv.pinned_memory import pin, pinned_zeros, unpin
from engine.kv.shared_host import HostShare
from kernels.cpu.memory import huge_zeros
from kernels.cpu.prefaulter import Prefaulter
from kernels.device_copy import to_device

__all__ = ["PageMemory"]

Array = npt.NDArray[np.signedinteger | np.unsignedinteger]

_HOST_BYTES_AHEAD = 128 * 2**20


class PageMemory:
    """The pages of one kind that one rank has.

    On a GPU every operation is queued on the current stream and returns at once, so it runs after the steps launched
    before it and before those launched later. Only code that reads the host pool itself must synchronize.

    Args:
        name: what a page is called in errors, with the noun at the end: "KV block".
        shapes: of a page's parts.
        num_pages: pages of the device pool.
        dtype: of every part.
        device: on which kernels read them.
        num_host_pages: pages of the host pool; pinned memory if ``device`` is a GPU.
        remedy: what to do if the memory for the device pool cannot be allocated.
        rank: whose part of the pages this is.
        share: the host pool that all ranks share; None: this rank has its own.

    Attributes:
        parts: each part, ``[num_pages, *shape]``; views.

    Raises:
        ConfigError: if the memory for a pool cannot be allocated.
    """

    def __init__(
        self,
        name: str,
        shapes: Sequence[tuple[int, ...]],
        *,
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_pages: int = 0,
        remedy: str = "",
        rank: int = 0,
        share: HostShare | None = None,
    ) -> None:
        self._noun = name.rpartition(" ")[2]
        self.num_pages, self.num_host_pages = num_pages, num_host_pages
        self.device = device
        self.bytes_per_page = sum(map(math.prod, shapes)) * dtype.itemsize
        with _explained(f"{num_pages} {name}s on {device}", self.num_bytes, remedy):
            pools = {
                shape: _zeros((num_parts, num_pages, *shape), dtype, device)
                for shape, num_parts in Counter(shapes).items()
            }
        with _explained(f"{num_host_pages} swapped {name}s on the host", self.num_host_bytes, "lower swap_space_gib"):
            self._host_pages = self._make_host_pool(share)  # [num_host_pages, bytes of a page's part of all ranks]
        first_byte = rank * self.bytes_per_page if share else 0
        self._host = self._host_pages[:, first_byte : first_byte + self.bytes_per_page]
        parts = {shape: iter(pool) for shape, pool in pools.items()}
        self.parts = [next(parts[shape]) for shape in shapes]
        self._prefaulter: Prefaulter | None = None
        # For each shape [num_parts, num_pages, words] on the device and [num_host_pages, num_parts, words] there.
        self._words = _as_words([pool.flatten(2) for pool in pools.values()])
        self._host_words = _split_host_pool(self._host, self._words)
        self._copied = _as_arrays(self._words, self._host_words) if device.type == "cpu" else []
        self._host_prefaulter: Prefaulter | None = None
        has_staging = device.type != "cpu" and self.num_host_bytes > 0
        self._staging = PageStaging(self._words, self._host) if has_staging else None

    def prefault_host(self) -> None:
        """Keep some unused pages of a CPU's host pool ready: to allocate one takes longer than to copy it."""
        if self.num_host_pages and self.bytes_per_page and self.device.type == "cpu":
            self._host_prefaulter = Prefaulter([self._host_pages], _HOST_BYTES_AHEAD // self.host_page_bytes)
            self._host_prefaulter.use(0)

    def expect_on_host(self, host_id: int) -> None:
        """Prefault the pages of the host pool up to one that is about to be written, and some after it."""
        if self._host_prefaulter is not None:
            self._host_prefaulter.use(host_id)

    def _make_host_pool(self, share: HostShare | None) -> torch.Tensor:
        shape = (self.num_host_pages, self.bytes_per_page)
        if self.device.type == "cpu" or not self.num_host_bytes:  # the system allocates it on first use
            return huge_zeros(shape, torch.uint8) if share is None else share.map(*shape)
        pool = pinned_zeros(shape, torch.uint8) if share is None else pin(share.map(*shape))
        weakref.finalize(self, unpin, pool, self.device)  # which keeps the memory until it is unlocked
        return pool

    def prefault(self, num_ahead: int) -> None:
        """From now on have this many pages after those in use prefaulted; needs the CPU kernels."""
        if num_ahead and self.num_bytes:
            self._prefaulter = Prefaulter(self.parts, num_ahead)
            self._prefaulter.use(0)

    def expect(self, page_id: int) -> None:
        """Prefault the pages after one that the next step writes; returns at once."""
        if self._prefaulter is not None:
            self._prefaulter.use(page_id)

    @property
    def num_bytes(self) -> int:
        """Bytes of the device pool."""
        return self.num_pages * self.bytes_per_page

    @property
    def num_host_bytes(self) -> int:
        """Bytes of the host pool."""
        return self.num_host_pages * self.bytes_per_page

    @property
    def host_page_bytes(self) -> int:
        """Bytes of a page of the host pool, with the parts of all ranks that share it."""
        return self._host_pages.shape[1]

    @property
    def host_bytes(self) -> memoryview:
        """The memory of the host pool, ``num_host_pages * host_page_bytes``, for threads that read or write pages.

        On a GPU, copies to it are made when the step that they belong to is finished.
        """
        return self._host_pages.numpy().reshape(-1).data

    def make(self, copies: PageCopies) -> None:
        """Make the copies of a step, in their order.

        Raises:
            KVCacheError: as the three methods.
        """
        if copies.swap_out:
            self.swap_out(copies.swap_out)
        if copies.swap_in:
            self.swap_in(copies.swap_in)
        if copies.on_device:
            self.copy(copies.on_device)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy pages ``(source, target)`` on the device, as if all at the same time.

        On a GPU, or where a source is a target too, this needs as much extra memory as the sources have. Use it for few
        pages, as copy-on-write does.

        Raises:
            KVCacheError: for a page that does not exist or is a target twice; nothing has been copied then.
        """
        sources, targets = self._check_pairs(pairs, self._on_device, self._on_device)
        self.expect(max(targets, default=-1))
        if self.device.type == "cpu" and set(sources).isdisjoint(targets):
            # Extra memory is new to the process each time: its pages would cost more than the copies.
            for array, _ in self._copied:
                for source, target in pairs:
                    array[:, target] = array[:, source]
        elif pairs:
            source_index, target_index = self._index(sources), self._index(targets)
            for words in self._words:
                words.index_copy_(1, target_index, words.index_select(1, source_index))

    def swap_out(self, pairs: list[tuple[int, int]]) -> None:
        """Copy pages ``(page, host page)`` to the host pool.

        On a GPU the next launched operation may overwrite the pages, and ``swap_in`` may follow at once.

        Raises:
            KVCacheError: for a page that does not exist or is a target twice; nothing has been copied then.
        """
        _, targets = self._check_pairs(pairs, self._on_device, self._on_host)
        self.expect_on_host(max(targets, default=0))
        for array, host_array in self._copied:
            for page_id, host_id in pairs:
                host_array[host_id] = array[:, page_id]
        if self._staging is not None:
            self._staging.swap_out(pairs)

    def swap_in(self, pairs: list[tuple[int, int]]) -> None:
        """Copy pages ``(host page, page)`` back to the device; the host pages keep their content.

        On a GPU the next ``swap_out`` may reuse the host pages at once: it is queued after the reads.

        Raises:
            KVCacheError: for a page that does not exist or is a target twice; nothing has been copied then.
        """
        self._check_pairs(pairs, self._on_host, self._on_device)
        for array, host_array in self._copied:
            for host_id, page_id in pairs:
                array[:, page_id] = host_array[host_id]
        if self._staging is not None:
            self._staging.swap_in(pairs)

    @property
    def _on_device(self) -> tuple[str, int]:
        return self._noun, self.num_pages

    @property
    def _on_host(self) -> tuple[str, int]:
        return f"host {self._noun}", self.num_host_pages

    def _index(self, page_ids: list[int]) -> torch.Tensor:
        return to_device(page_ids, torch.int64, self.device)

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
    num_bytes = math.gcd(*(pool.shape[-1] * pool.dtype.itemsize for pool in pools))  # 0 if there are no pools
    widest = next(
        dtype for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8) if num_bytes % dtype.itemsize == 0
    )
    return [pool.view(widest) for pool in pools]


def _as_arrays(words: list[torch.Tensor], host_words: list[torch.Tensor]) -> list[tuple[Array, Array]]:
    """Return the pools of a CPU as NumPy sees them, which copies a page with this thread alone.

    Torch copies it with all threads, and waits for each of them. Where another program has a core, the wait takes
    longer than fifty copies.
    """
    return [(ours.numpy(), on_host.numpy()) for ours, on_host in zip(words, host_words, strict=True)]


def _split_host_pool(host: torch.Tensor, pools: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of the host pool [num_host_blocks, num_parts, words] with the parts and words of each pool."""
    if not pools:
        return []
    shapes = [(pool.shape[0], pool.shape[2]) for pool in pools]
    sections = torch.split(host.view(pools[0].dtype), [math.prod(shape) for shape in shapes], dim=1)
    return [section.view(len(host), *shape) for section, shape in zip(sections, shapes, strict=True)]
