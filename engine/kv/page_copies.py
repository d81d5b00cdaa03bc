"""PageCopies: the copies of one pool's pages that a step makes before it computes."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["BlockPair", "PageCopies"]

BlockPair = tuple[int, int]  # a copy's source and destination


@dataclass(slots=True)
class PageCopies:
    """Copies of blocks, of pages of a window or of states, in the order in which a rank makes them."""

    swap_out: list[BlockPair] = field(default_factory=list)  # (page, host page): of preempted sequences, and evicted
    swap_in: list[BlockPair] = field(default_factory=list)  # (host page, page): of resumed sequences, and hit
    on_device: list[BlockPair] = field(default_factory=list)  # (page, page): as if all at the same time

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.swap_in or self.on_device)
