"""PageFormat: what the bytes of a page mean, so that only engines whose pages are interchangeable share them."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from xxhash import xxh3_64_intdigest

__all__ = ["FORMAT_VERSION", "PageFormat", "PageKind", "checksum"]

FORMAT_VERSION = 1  # of the layout of pages; another version shares nothing with this one


@dataclass(frozen=True, slots=True)
class PageKind:
    """The pages of one pool.

    Attributes:
        name: ``blocks``, ``window <tokens>`` or ``states``.
        num_bytes: of a page; 0 where no layer attends to everything, and a block is only a name for its tokens.
    """

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PageFormat:
    """What pages depend on beside their tokens.

    Attributes:
        model_digest: of the weights and of all that changes what a layer caches: see model_digest.py.
        block_size: tokens per block.
        kinds: of pages, as the pools are ordered: blocks, each window, then states if the model has any.
        num_ranks: whose parts follow each other in a page. They also round other sums, so KV depends on their number.
    """

    model_digest: bytes
    block_size: int
    kinds: tuple[PageKind, ...]
    num_ranks: int = 1

    @property
    def digest(self) -> bytes:
        """16 bytes; engines with equal ones can exchange pages."""
        text = repr((FORMAT_VERSION, self.model_digest, self.block_size, [(k.name, k.num_bytes) for k in self.kinds]))
        if self.num_ranks > 1:
            text += f" of {self.num_ranks} ranks"
        return blake2b(text.encode(), digest_size=16).digest()


def checksum(page: memoryview) -> int:
    """Return the 64 bits that a page is verified by after each copy to or from elsewhere (XXH3)."""
    return xxh3_64_intdigest(page)
