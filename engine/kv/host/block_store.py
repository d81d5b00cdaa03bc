"""BlockStore: the second tier of a pool of the device. It keeps by name what belongs to published blocks.

A page is what one full block has of one kind: its keys and values in the layers that attend to everything, those in the
layers with one window, or the snapshot of the states after it. Each kind has a store of its own. The name of a page is
the block's hash. The prefix cache stores a block that it must evict, and loads it again when a prompt's match continues
in the store; what hangs on the block is stored with it, or when it is evicted before the block (attached_pages.py):

    prompt  [ block 0 ][ block 1 ][ block 2 ][ block 3 ][ tail ]
              device     device     store      store      computed

The prefix cache verifies a page as it verifies a block of the device: by its tokens and its parent. A name that both
the device and the store hold has the same content in both. Only what belongs to published blocks is stored, so it is
computed and its tokens are accepted before the copy is made. A store may lose a page at any time: what it does not hold
is computed again.

A store makes no copy itself. It collects the copies of a step, which every rank makes before the step computes: first
those to the store, then those to the device. So a page that a step loads cannot be reused before the next step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from engine.kv.block_pool import Block

__all__ = ["BlockStore"]


class BlockStore(ABC):
    """Holds pages by name.

    Attributes:
        num_pages: size of the store; one without pages keeps nothing.
        by_name: the pages, one mapping for good. The caller must verify that a page holds what the caller expects.
        on_removed: called with the name of each page that the store loses of its own accord.
    """

    num_pages: int
    by_name: Mapping[int, Block]
    on_removed: Callable[[int], None]

    @abstractmethod
    def store(self, block: Block, page_id: int) -> bool:
        """Keep what a published block has on a page of the device, which this step may overwrite; False if full."""

    @abstractmethod
    def pin(self, page: Block) -> None:
        """Keep a page until it is loaded in this step, whatever is stored meanwhile."""

    @abstractmethod
    def load(self, page: Block, page_id: int) -> None:
        """Copy a pinned page of the store to a page of the device in this step."""

    @abstractmethod
    def adopt(self, page: Block) -> None:
        """Keep a page under its name, whose content came from elsewhere: from a disk, or another engine."""

    @abstractmethod
    def discard(self, block_hash: int) -> None:
        """Forget the page with this name, if there is one: other content has the name now."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every page, and the copies that this step would make."""
