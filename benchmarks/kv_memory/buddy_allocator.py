"""A buddy allocator of contiguous memory, as the PagedAttention paper assumes for the systems before it."""

from __future__ import annotations

__all__ = ["BuddyAllocator"]


class BuddyAllocator:
    """Allocates pieces whose sizes are powers of two; a free piece merges with its free buddy.

    A pool that is not a power of two is cut into powers of two, the largest first.
    """

    def __init__(self, size: int) -> None:
        self._free: list[set[int]] = [set() for _ in range(size.bit_length())]  # addresses by order: 2 ** order
        self._orders: dict[int, int] = {}  # of the allocated pieces
        self.num_free = size
        address = 0
        for order in reversed(range(size.bit_length())):
            if size >> order & 1:
                self._free[order].add(address)
                address += 1 << order

    def allocate(self, size: int) -> int | None:
        """Return the address of a piece of at least ``size``, or None if no piece is large enough."""
        order = (size - 1).bit_length()
        larger_order = next((larger for larger in range(order, len(self._free)) if self._free[larger]), None)
        if larger_order is None:
            return None
        address = min(self._free[larger_order])
        self._free[larger_order].remove(address)
        for smaller in range(order, larger_order):
            self._free[smaller].add(address + (1 << smaller))
        self._orders[address] = order
        self.num_free -= 1 << order
        return address

    def free(self, address: int) -> None:
        """Free a piece and merge it with its buddy, repeatedly while the buddy is free."""
        order = self._orders.pop(address)
        self.num_free += 1 << order
        while order < len(self._free) and address ^ (1 << order) in self._free[order]:
            buddy = address ^ (1 << order)
            self._free[order].remove(buddy)
            address, order = min(address, buddy), order + 1
        self._free[order].add(address)
