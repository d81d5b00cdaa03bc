"""SlotFile: one file with fixed slots for the pages of each kind, which one engine has locked.

    [file header 4 KiB][ slots for blocks ... ][ slots for each window ... ][ slots for states ... ]
                         a slot: [slot header][page]     both of whole disk blocks, if the page is

Engines that share a directory take one file each: the first that no other engine has locked. The names of files of one
model begin with its digest, so models share a directory too. A file is sparse: it takes the space that was written.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64_intdigest

from engine.errors import ConfigError
from engine.kv.tiers.disk.block_io import DISK_BLOCK, BlockIO
from engine.kv.tiers.disk.slot_header import SlotHeader
from engine.kv.tiers.page_format import PageFormat

__all__ = ["Region", "SlotFile"]

logger = logging.getLogger(__name__)

_MAX_FILES = 64  # of one model in a directory
_MAGIC = b"PGKVFILE"


@dataclass(frozen=True, slots=True)
class Region:
    """The slots of one kind of page.

    Attributes:
        num_slots: how many.
        page_bytes: of a page.
        header_bytes: of a slot's header: a disk block, if the page consists of such blocks.
        slot_bytes: of a slot: its header and page, rounded up.
    """

    num_slots: int
    page_bytes: int
    header_bytes: int
    slot_bytes: int

    @classmethod
    def of(cls, num_slots: int, page_bytes: int, block_size: int) -> Region:
        """Return a region of slots for pages of this size."""
        header_bytes = SlotHeader.num_bytes(block_size)
        if not page_bytes % DISK_BLOCK:
            header_bytes = -(-header_bytes // DISK_BLOCK) * DISK_BLOCK
        return cls(num_slots, page_bytes, header_bytes, -(-(header_bytes + page_bytes) // DISK_BLOCK) * DISK_BLOCK)


class SlotFile:
    """Reads and writes slots. Any thread may call it; two must not use one slot at the same time.

    Args:
        path: of the file, which is created if it does not exist.
        descriptor: of the open, locked file.
        regions: of each kind of page.
        page_format: whose digest the file must have.

    Raises:
        OSError: if the file cannot be written; of all other methods too.
    """

    def __init__(self, path: Path, descriptor: int, regions: Sequence[Region], page_format: PageFormat) -> None:
        self.path = path
        self.regions = tuple(regions)
        self._descriptor = descriptor
        self._format = page_format
        self._starts: list[int] = []
        end = DISK_BLOCK
        for region in regions:
            self._starts.append(end)
            end += region.num_slots * region.slot_bytes
        self._end = end
        self._io = BlockIO(path, descriptor)
        try:
            if os.pread(descriptor, DISK_BLOCK, 0) != self._file_header():
                self.erase()
            os.ftruncate(descriptor, self._end)
        except BaseException:
            self._io.close()  # the descriptor stays the caller's
            raise

    @classmethod
    def open(cls, directory: Path, regions: Sequence[Region], page_format: PageFormat) -> SlotFile:
        """Open and lock the first file of this format that no other engine uses; create it if it does not exist.

        Raises:
            ConfigError: if the directory cannot be used, or all files are locked.
        """
        stem = page_format.digest.hex()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for number in range(_MAX_FILES):
                path = directory / f"{stem}-{number}.kv"
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return cls(path, descriptor, regions, page_format)
                except BlockingIOError:
                    os.close(descriptor)
                except BaseException:
                    os.close(descriptor)
                    raise
        except OSError as error:
            raise ConfigError(
                f"cannot be used: {error.strerror}",
                param="disk_cache_path",
                value=str(directory),
                remedy="name a directory that the engine may write to, on a disk with space",
            ) from error
        raise ConfigError(
            f"has {_MAX_FILES} files of this model, and other engines use all of them",
            param="disk_cache_path",
            value=str(directory),
            remedy="give some of the engines another directory",
        )

    def scan(self, kind: int) -> Iterator[tuple[int, SlotHeader]]:
        """Yield the slots of a kind that have an intact header; pages are not read."""
        block_size = self._format.block_size
        for slot in range(self.regions[kind].num_slots):
            data = os.pread(self._descriptor, SlotHeader.num_bytes(block_size), self._offset(kind, slot))
            if (header := SlotHeader.unpack(data, block_size)) is not None:
                yield slot, header

    def read(self, kind: int, slot: int, page: memoryview) -> SlotHeader | None:
        """Read a slot's page; return its header, or None if that is damaged. The page must still be verified."""
        head = bytearray(self.regions[kind].header_bytes)
        if not self._io.read(head, page, self._offset(kind, slot)):
            return None  # the file was cut
        return SlotHeader.unpack(bytes(head), self._format.block_size)

    def write(self, kind: int, slot: int, header: SlotHeader, page: memoryview) -> None:
        """Write a slot's header and page."""
        head = header.pack(self._format.block_size).ljust(self.regions[kind].header_bytes, b"\0")
        self._io.write(head, page, self._offset(kind, slot))

    def erase(self) -> None:
        """Forget all slots."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, self._file_header(), 0)
        os.ftruncate(self._descriptor, self._end)

    def close(self) -> None:
        """Close and unlock the file."""
        self._io.close()
        os.close(self._descriptor)

    def _offset(self, kind: int, slot: int) -> int:
        return self._starts[kind] + slot * self.regions[kind].slot_bytes

    def _file_header(self) -> bytes:
        """Return what the file begins with: its format and where its slots are, but not the end of the last ones."""
        layout = [
            (start, region.header_bytes, region.page_bytes)
            for start, region in zip(self._starts, self.regions, strict=True)
        ]
        body = _MAGIC + self._format.digest + repr(layout).encode()
        return (struct.pack("<Q", xxh3_64_intdigest(body)) + body).ljust(DISK_BLOCK, b"\0")
