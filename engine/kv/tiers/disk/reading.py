"""Reading blocks from the disk cache into reserved host pages, in the reader's thread."""

from __future__ import annotations

from engine.kv.tiers.digests import TokenChain
from engine.kv.tiers.disk.slot_file import SlotFile
from engine.kv.tiers.disk.slot_index import SlotIndex
from engine.kv.tiers.source import ArrivalSink

__all__ = ["read_blocks", "unpin_slots"]

Slots = list[list[int | None]]  # of each block, the slot of each kind of page that is wanted


def read_blocks(file: SlotFile, chain: TokenChain, slots: Slots, sink: ArrivalSink) -> tuple[str | None, int]:
    """Read blocks, in order, until one is damaged or no one waits for them any longer.

    Returns:
        Why it ended early, as ``ArrivalSink.finished`` takes it, and the block after those that were read.

    Raises:
        OSError: if the disk cannot be read.
    """
    block = sink.first_block
    for of_block in slots:
        if sink.is_cancelled:
            return "cancelled", block
        if not sink.block_done(block, _read_block(file, chain, block, of_block, sink.page_buffers(block))):
            return "checksum", block
        block += 1
    return None, block


def _read_block(
    file: SlotFile, chain: TokenChain, block: int, slots: list[int | None], buffers: list[memoryview | None]
) -> list[int | None]:
    """Read the pages of one block; return their checksums, None for those whose slot holds something else."""
    digest, tokens, checksums = chain.digest(block), chain.packed(block), list[int | None]()
    for kind, (slot, buffer) in enumerate(zip(slots, buffers, strict=True)):
        header = None if slot is None or buffer is None else file.read(kind, slot, buffer)
        is_right = header is not None and header.digest == digest and header.tokens == tokens
        checksums.append(header.page_checksum if header is not None and is_right else None)
    return checksums


def unpin_slots(indices: list[SlotIndex], slots: Slots) -> None:
    """Record, in the engine's thread, that slots were read."""
    for of_block in slots:
        for index, slot in zip(indices, of_block, strict=True):
            if slot is not None:
                index.unpin(slot)
