"""HostPool: the blocks in host memory that keep the K and V of swapped-out sequences.

It knows block numbers and reference counts. ``KVCache`` holds the memory itself and copies it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

__all__ = ["HostPool"]


class HostPool:
    """Allocates host blocks to swapped-out sequences; blocks that the sequences share stay shared.

    Args:
        num_blocks: size of the pool; 0 turns swapping off.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._ref_counts: Counter[int] = Counter()

    @property
    def num_free(self) -> int:
        """Host blocks that no sequence uses."""
        return len(self._free)

    def ref_count(self, host_id: int) -> int:
        """Return how many swapped-out sequences list this host block."""
        return self._ref_counts[host_id]

    def take(self, block_tables: Iterable[list[int]]) -> dict[int, int]:
        """Return a host block for each block of these block tables; a block that several tables list gets one."""
        host_ids: dict[int, int] = {}
        for table in block_tables:
            for block_id in table:
                if block_id not in host_ids:
                    host_ids[block_id] = self._free.popleft()
                self._ref_counts[host_ids[block_id]] += 1
        return host_ids

    def release(self, host_table: list[int]) -> None:
        """Release a sequence's host blocks; those that no other sequence lists are free again."""
        for host_id in host_table:
            self._ref_counts[host_id] -= 1
            if not self._ref_counts[host_id]:
                del self._ref_counts[host_id]
                self._free.append(host_id)

    def check_integrity(self, num_users: Counter[int]) -> None:
        """Assert that each host block is free or used, given how many host tables list each one."""
        assert num_users == self._ref_counts, "a host block has another number of users than references"
        accounted = sorted([*self._free, *num_users])
        assert accounted == list(range(self.num_blocks)), "a host block is lost, or free and used at once"
