"""Host pools that the ranks of one engine share, so that a page with the parts of all ranks is one piece of memory.

    a page    [ what rank 0 has of it ][ what rank 1 has of it ] ...        tensor-parallel ranks have other heads

Each rank copies its own part of a page, with the copies of a step. The threads of rank 0 read and write whole pages.

The memory is an anonymous file of rank 0, which the others open by its number: it has no name that two engines could
both choose, and ends with the last process that maps it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from engine.errors import ConfigError

__all__ = ["HostShare", "host_shares"]


@dataclass(frozen=True, slots=True)
class HostShare:
    """One host pool of several ranks.

    Attributes:
        path: of the file, for all processes of this user.
        num_ranks: that share it.
    """

    path: str
    num_ranks: int

    def map(self, num_pages: int, bytes_per_rank: int) -> torch.Tensor:
        """Return the pool, zeros at first: ``[num_pages, num_ranks * bytes_per_rank]`` bytes.

        Raises:
            RuntimeError: if the system refuses the memory; torch raises the same.
        """
        shape = (num_pages, self.num_ranks * bytes_per_rank)
        size = shape[0] * shape[1]
        if not size:
            return torch.empty(shape, dtype=torch.uint8)
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.ftruncate(descriptor, size)  # each rank sets the same size
                memory = mmap.mmap(descriptor, size)
            finally:
                os.close(descriptor)
        except (OSError, ValueError, OverflowError) as error:
            raise RuntimeError(f"cannot share {size} bytes: {error}") from error
        with suppress(OSError, AttributeError):  # this system has no huge pages for shared memory
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8).view(shape)


@contextmanager
def host_shares(count: int, num_ranks: int) -> Iterator[list[HostShare]]:
    """Context in which the ranks map ``count`` pools; what they have mapped stays.

    Raises:
        ConfigError: if this system is not Linux.
    """
    if not hasattr(os, "memfd_create"):
        raise ConfigError(
            f"needs Linux where tensor_parallel_size={num_ranks}, to share host memory between the ranks",
            param="disk_cache_path, shared_cache_path or kv_transfer",
            remedy="set tensor_parallel_size to 1, or turn them off",
        )
    descriptors = [os.memfd_create("pagoda-host-pool") for _ in range(count)]
    try:
        yield [HostShare(f"/proc/{os.getpid()}/fd/{descriptor}", num_ranks) for descriptor in descriptors]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
