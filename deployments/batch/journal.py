"""The journal of a batch: the durable result of each line, as one record of a segment file.

Each runner of a batch appends to a segment of its own. It begins with a claim, a file that is created once and that
lists the earlier segments with the bytes of each that count; the claim with the highest number holds. So a runner that
was taken for dead and goes on appends to a segment whose end is fixed already: nothing of that counts, and no line
gets two results. A record that a crash has cut off ends a segment.

    record:  crc32 (8 hex digits of the rest) SP line SP kind SP input SP cached SP output SP reasoning SP json LF

``kind`` is the file of the result, O (output) or E (errors); the numbers are tokens; ``json`` is the line of that file.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from deployments.batch.disk import Disk, read_json

__all__ = ["Journal", "JournalLostError", "Record", "Tokens"]

_CLAIM = re.compile(r"claim-(\d+)\.json")


class JournalLostError(Exception):
    """Another runner has claimed the batch."""


class Tokens(NamedTuple):
    """The usage of a line, or of several."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def plus(self, other: Tokens) -> Tokens:
        """Return the sum."""
        return Tokens(*(one + two for one, two in zip(self, other, strict=True)))


_NO_TOKENS = Tokens()


@dataclass(frozen=True, slots=True)
class Record:
    """The result of one line.

    Attributes:
        index: number of the line in the input, from 0.
        is_error: whether it belongs to the error file.
        text: the JSON, without a line feed.
    """

    index: int
    is_error: bool
    text: bytes
    tokens: Tokens = _NO_TOKENS

    def encoded(self) -> bytes:
        """Return the bytes of the segment."""
        rest = b"%d %s %s %s" % (
            self.index,
            b"E" if self.is_error else b"O",
            " ".join(map(str, self.tokens)).encode(),
            self.text,
        )
        return b"%08x %s\n" % (zlib.crc32(rest), rest)

    @classmethod
    def decoded(cls, line: bytes) -> Record | None:
        """Return the record; None if it is damaged."""
        crc, _, rest = line.rstrip(b"\n").partition(b" ")
        if not line.endswith(b"\n") or crc != b"%08x" % zlib.crc32(rest):
            return None
        index, kind, *numbers, text = rest.split(b" ", 6)
        return cls(int(index), kind == b"E", text, Tokens(*map(int, numbers)))


class _Location(NamedTuple):
    """Where a record is."""

    segment: int
    offset: int
    length: int
    is_error: bool


class Journal:
    """The journal of one batch, as its runner writes it. One thread at a time may use it.

    Args:
        disk: writes.
        directory: of the batch.
        lease: the number of the runner's lease, for people who read the claim.

    Attributes:
        number: of the claim.
        tokens: of all results.

    Raises:
        OSError: the directory cannot be written.
        JournalLostError: another runner claims it at the same time.
    """

    def __init__(self, disk: Disk, directory: Path, lease: int) -> None:
        self._disk = disk
        self._directory = directory
        self._results: dict[int, _Location] = {}
        self.tokens = Tokens()
        self.num_errors = 0
        last = self._last_claim()
        segments = {} if last == 0 else self._segments_of(last)
        for number, length in segments.items():
            for offset, size, record in self._records(number, length):
                self._add(record, _Location(number, offset, size, record.is_error))
        self.number = last + 1
        claim = {"lease": lease, "segments": segments}
        if not disk.create(directory / f"claim-{self.number}.json", json.dumps(claim).encode()):
            raise JournalLostError(f"claim {self.number} of {directory.name} is another runner's")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._file = os.open(self._segment(self.number), flags, 0o600)
        self._size = 0
        try:
            disk.sync_directory(directory)
        except OSError:
            self.close()
            raise

    def __contains__(self, index: int) -> bool:
        return index in self._results

    def __len__(self) -> int:
        return len(self._results)

    def append(self, records: list[Record]) -> None:
        """Make results durable. A line that has a result keeps it.

        Raises:
            OSError: nothing of it counts; the journal takes no more, so make a new one.
        """
        new = [record for record in records if record.index not in self._results]
        encoded = [record.encoded() for record in new]
        self._disk.write(self._file, b"".join(encoded))
        self._disk.sync(self._file)
        for record, data in zip(new, encoded, strict=True):
            self._add(record, _Location(self.number, self._size, len(data), record.is_error))
            self._size += len(data)

    def require_claim(self) -> None:
        """Raise JournalLostError if another runner has claimed the batch since."""
        if self._last_claim() != self.number:
            raise JournalLostError(f"another runner has claimed {self._directory.name}")

    def texts(self, *, is_error: bool) -> Iterator[bytes]:
        """Yield the results of a file, in the order of the input."""
        files: dict[int, int] = {}
        try:
            for index in sorted(self._results):
                location = self._results[index]
                if location.is_error != is_error:
                    continue
                if location.segment not in files:
                    files[location.segment] = os.open(self._segment(location.segment), os.O_RDONLY)
                record = Record.decoded(os.pread(files[location.segment], location.length, location.offset))
                assert record is not None, "a durable record has changed"
                yield record.text
        finally:
            for descriptor in files.values():
                os.close(descriptor)

    def close(self) -> None:
        """Close the segment."""
        os.close(self._file)

    def _add(self, record: Record, location: _Location) -> None:
        if record.index in self._results:
            return
        self._results[record.index] = location
        self.tokens = self.tokens.plus(record.tokens)
        self.num_errors += record.is_error

    def _last_claim(self) -> int:
        matches = (_CLAIM.fullmatch(path.name) for path in self._directory.iterdir())
        return max((int(match[1]) for match in matches if match is not None), default=0)

    def _segment(self, number: int) -> Path:
        return self._directory / f"results-{number}.jsonl"

    def _segments_of(self, claim: int) -> dict[int, int]:
        """Return the segments that count after a claim whose runner has ended: number -> bytes."""
        content = read_json(self._directory / f"claim-{claim}.json")
        assert content is not None, "a claim is never removed"
        segments = {int(number): length for number, length in content["segments"].items()}
        segments[claim] = self._valid_length(claim)
        return {number: length for number, length in segments.items() if length}

    def _valid_length(self, number: int) -> int:
        """Return the bytes of whole records, which are durable then."""
        try:
            descriptor = os.open(self._segment(number), os.O_RDWR)
        except FileNotFoundError:
            return 0
        try:
            self._disk.sync(descriptor)  # its runner may have died before it did this
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        return max((offset + length for offset, length, _ in self._records(number, size)), default=0)

    def _records(self, number: int, end: int) -> Iterator[tuple[int, int, Record]]:
        """Yield (offset, length, record) of a segment up to ``end`` bytes, or to the first damaged record."""
        offset = 0
        with self._segment(number).open("rb") as file:
            while offset < end:
                line = file.readline(end - offset)
                record = Record.decoded(line)
                if record is None:
                    return
                yield offset, len(line), record
                offset += len(line)
