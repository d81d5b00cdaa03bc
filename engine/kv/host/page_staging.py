"""PageStaging: memory of a GPU through which the pages of a pool pass on their way to the host and back.

A page of the host pool is one piece; on the device its parts are gigabytes apart. A kernel gathers a batch of pages in
one launch, and each run of neighbours in the host pool is one copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kernels.cache.pages import gather_pages, scatter_pages
from kernels.device_copy import to_device

__all__ = ["PageStaging"]

_BYTES = 16 * 2**20  # at most, or one page


class PageStaging:
    """The staging memory of one pool. Its constructor compiles the kernels.

    Args:
        pools: the pool's words, ``[num_parts, num_pages, words]`` for each shape of parts.
        host: the host pool, pinned: uint8 ``[num_host_pages, bytes_per_page]``, a page's parts in the order of
            ``pools``.
    """

    def __init__(self, pools: Sequence[torch.Tensor], host: torch.Tensor) -> None:
        self._pools, self._host, self._device = pools, host, pools[0].device
        num_host_pages, bytes_per_page = host.shape
        self.num_pages = max(1, min(num_host_pages, _BYTES // bytes_per_page))
        self._staging = torch.empty(self.num_pages, bytes_per_page, dtype=torch.uint8, device=self._device)
        words = self._staging.view(pools[0].dtype)
        sections = torch.split(words, [pool.shape[0] * pool.shape[2] for pool in pools], dim=1)
        self._parts = [
            section.view(self.num_pages, pool.shape[0], pool.shape[2])
            for section, pool in zip(sections, pools, strict=True)
        ]
        if pools[0].shape[1]:
            self._gather([0])
            self._scatter([0])

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Queue copies of pages ``(page, host page)`` to the host pool."""
        for batch in self._batches(pairs):
            self._gather([page_id for page_id, _ in batch])
            for staged, in_host in self._runs([host_id for _, host_id in batch]):
                self._host[in_host].copy_(self._staging[staged], non_blocking=True)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Queue copies of pages ``(host page, page)`` to the device."""
        for batch in self._batches(pairs):
            for staged, in_host in self._runs([host_id for host_id, _ in batch]):
                self._staging[staged].copy_(self._host[in_host], non_blocking=True)
            self._scatter([page_id for _, page_id in batch])

    def _gather(self, page_ids: list[int]) -> None:
        on_device = to_device(page_ids, torch.int64, self._device)
        for pool, parts in zip(self._pools, self._parts, strict=True):
            gather_pages(pool, on_device, parts)

    def _scatter(self, page_ids: list[int]) -> None:
        on_device = to_device(page_ids, torch.int64, self._device)
        for pool, parts in zip(self._pools, self._parts, strict=True):
            scatter_pages(parts, on_device, pool)

    def _batches(self, pairs: Sequence[tuple[int, int]]) -> Iterator[Sequence[tuple[int, int]]]:
        for start in range(0, len(pairs), self.num_pages):
            yield pairs[start : start + self.num_pages]

    def _runs(self, host_ids: list[int]) -> Iterator[tuple[slice, slice]]:
        """Yield pages of the staging memory, and those of the host pool that they belong to, as pieces of memory."""
        first = 0
        for index in range(1, len(host_ids) + 1):
            is_next = index < len(host_ids) and host_ids[index] == host_ids[index - 1] + 1
            if not (is_next and self._host.is_contiguous()):
                yield slice(first, index), slice(host_ids[first], host_ids[first] + index - first)
                first = index
