"""Reads and writes past the page cache bring every byte, also where a disk refuses them or transfers only a part."""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.kv.tiers.disk import block_io
from engine.kv.tiers.disk.block_io import DISK_BLOCK, BlockIO

HEAD = bytes(range(256)) * (DISK_BLOCK // 256)
SIZE = 3 * DISK_BLOCK


def page(content: bytes = b"") -> memoryview:
    """Return aligned memory."""
    memory = memoryview(mmap.mmap(-1, SIZE))
    memory[: len(content)] = content
    return memory


@pytest.fixture
def content() -> bytes:
    return random.Random(0).randbytes(SIZE)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.touch()
    return path


@pytest.fixture
def io(path: Path) -> Iterator[BlockIO]:
    descriptor = os.open(path, os.O_RDWR)
    io = BlockIO(path, descriptor)
    yield io
    io.close()
    os.close(descriptor)


def calls_of(patch: pytest.MonkeyPatch, name: str, most: int | None = None, error: int = 0) -> list[int]:
    """Return the descriptors that a system call is made with; let it transfer ``most`` bytes, or fail when direct."""
    call, descriptors = getattr(os, name), list[int]()

    def recorded(descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        descriptors.append(descriptor)
        if error and len(descriptors) == 1:
            raise OSError(error, os.strerror(error))
        first = next(part for part in parts if len(part))
        return int(call(descriptor, parts if most is None else [memoryview(first)[:most]], offset))

    patch.setattr(block_io.os, name, recorded)
    return descriptors


def assert_round_trip(io: BlockIO, content: bytes, offset: int = 5 * DISK_BLOCK) -> None:
    head, target = bytearray(len(HEAD)), page()
    io.write(HEAD, page(content), offset)
    assert io.read(head, target, offset)
    assert (bytes(head), bytes(target)) == (HEAD, content)


def test_aligned_transfers_go_past_the_page_cache(io: BlockIO, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    if not io.is_direct:
        pytest.skip("this file system has a page cache only")
    written, read = calls_of(monkeypatch, "pwritev"), calls_of(monkeypatch, "preadv")
    assert_round_trip(io, content)
    assert io.is_direct
    assert written == read == [io._direct]


def test_pages_of_other_sizes_go_through_the_page_cache(
    io: BlockIO, content: bytes, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = calls_of(monkeypatch, "pwritev")
    io.write(HEAD[:512], page(content)[:100], 512)
    assert written == [io._descriptor]
    assert path.read_bytes()[512:] == HEAD[:512] + content[:100]
    head, target = bytearray(512), page()[:100]
    assert io.read(head, target, 512)
    assert bytes(head) + bytes(target) == HEAD[:512] + content[:100]


@pytest.mark.parametrize("name", ["pwritev", "preadv"])
def test_a_disk_that_refuses_direct_transfers_is_used_without_them(
    name: str, io: BlockIO, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not io.is_direct:
        pytest.skip("this file system has a page cache only")
    descriptors = calls_of(monkeypatch, name, error=errno.EINVAL)
    assert_round_trip(io, content)
    assert not io.is_direct
    assert_round_trip(io, content[::-1])
    assert descriptors == [io._direct, io._descriptor, io._descriptor]


def test_a_file_system_without_direct_transfers_is_used_without_them(
    path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor = os.open(path, os.O_RDWR)

    def refuse(*args: Any) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    with monkeypatch.context() as patch:
        patch.setattr(block_io.os, "open", refuse)
        io = BlockIO(path, descriptor)
    assert not io.is_direct
    assert_round_trip(io, content)
    io.close()
    os.close(descriptor)


def test_errors_of_the_disk_are_raised(io: BlockIO, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    calls_of(monkeypatch, "pwritev", error=errno.ENOSPC)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        io.write(HEAD, page(content), 0)


@pytest.mark.parametrize("most", [700, DISK_BLOCK, DISK_BLOCK + 512])
def test_what_a_system_call_leaves_is_transferred_by_the_next(
    most: int, io: BlockIO, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    io.is_direct = False
    calls_of(monkeypatch, "pwritev", most)
    calls_of(monkeypatch, "preadv", most)
    assert_round_trip(io, content)


@pytest.mark.parametrize("left", [0, 100, DISK_BLOCK, DISK_BLOCK + 700, DISK_BLOCK + SIZE - 1])
def test_a_file_that_ends_before_the_page_is_noticed(left: int, io: BlockIO, path: Path, content: bytes) -> None:
    io.write(HEAD, page(content), DISK_BLOCK)
    os.truncate(path, DISK_BLOCK + left)
    assert not io.read(bytearray(len(HEAD)), page(), DISK_BLOCK)
