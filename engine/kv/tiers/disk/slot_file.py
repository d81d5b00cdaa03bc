"""SlotFile: one file with fixed slots for the pages of each kind, which one engine has locked.

    [file header 4 KiB][ slots for blocks ... ][ slots for each window ... ][ slots for states ... ]
                         a slot: [slot header][page]

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
from engine.kv.tiers.disk.slot_header import SlotHeader
from engine.kv.tiers.page_format import PageFormat

__all__ = ["Region", "SlotFile"]

logger = logging.getLogger(__name__)

_MAX_FILES = 64  # of one model in a directory
_PAGE = 4096
_MAGIC = b"PGKVFILE"


@dataclass(frozen=True, slots=True)
class Region:
    """The slots of one kind of page.

    Attributes:
        num_slots: how many.
        page_bytes: of a page.
        slot_bytes: of a slot: its header and page, rounded up.
    """

    num_slots: int
    page_bytes: int
    slot_bytes: int

    @classmethod
    def of(cls, num_slots: int, page_bytes: int, block_size: int) -> Region:
        """Return a region of slots for pages of this size."""
        size = SlotHeader.num_bytes(block_size) + page_bytes
        return cls(num_slots, page_bytes, -(-size // _PAGE) * _PAGE)


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
        end = _PAGE
        for region in regions:
            self._starts.append(end)
            end += region.num_slots * region.slot_bytes
        self._end = end
        self._header_bytes = SlotHeader.num_bytes(page_format.block_size)
        if os.pread(descriptor, _PAGE, 0) != self._file_header():
            self.erase()
        os.ftruncate(descriptor, self._end)

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
        for slot in range(self.regions[kind].num_slots):
            data = os.pread(self._descriptor, self._header_bytes, self._offset(kind, slot))
            if (header := SlotHeader.unpack(data, self._format.block_size)) is not None:
                yield slot, header

    def read(self, kind: int, slot: int, page: memoryview) -> SlotHeader | None:
        """Read a slot's page; return its header, or None if that is damaged. The page must still be verified."""
        head = bytearray(self._header_bytes)
        start, done, size = self._offset(kind, slot), 0, self._header_bytes + len(page)
        while done < size:  # a read may return less than was asked for
            if done < len(head):
                count = os.preadv(self._descriptor, [memoryview(head)[done:], page], start + done)
            else:
                count = os.preadv(self._descriptor, [page[done - len(head) :]], start + done)
            if not count:  # the file was cut
                return None
            done += count
        return SlotHeader.unpack(bytes(head), self._format.block_size)

    def write(self, kind: int, slot: int, header: SlotHeader, page: memoryview) -> None:
        """Write a slot's header and page."""
        parts = [memoryview(header.pack(self._format.block_size)), page]
        offset = self._offset(kind, slot)
        while parts:
            count = os.pwritev(self._descriptor, parts, offset)
            offset += count
            while parts and count >= len(parts[0]):
                count -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][count:]

    def erase(self) -> None:
        """Forget all slots."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, self._file_header(), 0)
        os.ftruncate(self._descriptor, self._end)

    def close(self) -> None:
        """Close and unlock the file."""
        os.close(self._descriptor)

    def _offset(self, kind: int, slot: int) -> int:
        return self._starts[kind] + slot * self.regions[kind].slot_bytes

    def _file_header(self) -> bytes:
        """Return what the file begins with: its format and where its slots are, but not the end of the last ones."""
        layout = [(start, region.page_bytes) for start, region in zip(self._starts, self.regions, strict=True)]
        body = _MAGIC + self._format.digest + repr(layout).encode()
        return (struct.pack("<Q", xxh3_64_intdigest(body)) + body).ljust(_PAGE, b"\0")
