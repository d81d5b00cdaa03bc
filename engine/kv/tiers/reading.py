"""Reading blocks from storage into reserved host pages, in a reader's thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, TypeVar

from engine.kv.tiers.digests import TokenChain
from engine.kv.tiers.disk.slot_header import SlotHeader
from engine.kv.tiers.source import ArrivalSink

__all__ = ["PageReader", "Slots", "read_blocks", "unpin_slots"]

S = TypeVar("S")
R = TypeVar("R", contravariant=True)
Slots: TypeAlias = list[list[S | None]]  # of each block, where the page of each kind that is wanted is


class PageReader(Protocol[R]):
    """Reads pages, in the order of the blocks and kinds."""

    def read(self, kind: int, slot: R, page: memoryview) -> SlotHeader | None:
        """Read a page; return its header, or None if that is damaged. The page must still be verified.

        Raises:
            FileNotFoundError: if the page is gone.
            OSError: if the storage cannot be read.
        """

    def close(self) -> None:
        """End what was begun."""


class _Unpins(Protocol[R]):
    def unpin(self, slot: R) -> None: ...


def read_blocks(reader: PageReader[S], chain: TokenChain, slots: Slots[S], sink: ArrivalSink) -> tuple[str | None, int]:
    """Read blocks, in order, until one is damaged or gone, or no one waits for them any longer.

    Returns:
        Why it ended early, as ``ArrivalSink.finished`` takes it, and the block after those that were read.

    Raises:
        OSError: if the storage cannot be read.
    """
    block = sink.first_block
    for of_block in slots:
        if sink.is_cancelled:
            return "cancelled", block
        try:
            checksums = _read_block(reader, chain, block, of_block, sink.page_buffers(block))
        except FileNotFoundError:
            return "gone", block
        if not sink.block_done(block, checksums):
            return "checksum", block
        block += 1
    return None, block


def _read_block(
    reader: PageReader[S], chain: TokenChain, block: int, slots: list[S | None], buffers: list[memoryview | None]
) -> list[int | None]:
    """Read the pages of one block; return their checksums, None for those whose slot holds something else."""
    digest, tokens, checksums = chain.digest(block), chain.packed(block), list[int | None]()
    for kind, (slot, buffer) in enumerate(zip(slots, buffers, strict=True)):
        header = None if slot is None or buffer is None else reader.read(kind, slot, buffer)
        is_right = header is not None and header.digest == digest and header.tokens == tokens
        checksums.append(header.page_checksum if header is not None and is_right else None)
    return checksums


def unpin_slots(indices: Sequence[_Unpins[S]], slots: Slots[S]) -> None:
    """Record, in the engine's thread, that slots were read."""
    for of_block in slots:
        for index, slot in zip(indices, of_block, strict=True):
            if slot is not None:
                index.unpin(slot)
