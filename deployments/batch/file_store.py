"""FileStore: the files of the Files API, in a directory that all ingresses share.

A file is two: ``ID.data``, the content, and ``ID.json``, what is known of it, which is created last and removed first.
The output of a batch exists once the end of its batch names it. Methods block; call them in a thread.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deployments.batch.disk import Disk, read_json
from deployments.batch.options import MAX_FILES, BatchOptions

__all__ = ["FileStore", "StorageFullError", "StoredFile", "Upload", "new_id"]

_ID = re.compile(r"file-[0-9a-f]{32}")
_ABANDONED_S = 86_400.0  # an upload without an end for so long


class StorageFullError(Exception):
    """The limit on all files together is reached."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """What is known of a file; times are Unix seconds.

    Attributes:
        owner: of the API key that made it; empty without keys.
        batch: the id of the batch whose output it is; empty for an upload.
    """

    id: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    expires_at: int | None
    owner: str = ""
    batch: str = ""

    def described(self) -> dict[str, Any]:
        """Return the FileObject of the OpenAI API."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class FileStore:
    """Keeps files.

    Args:
        disk: writes.
        options: the directory and its limits.
        is_output: whether the end of a batch (its id) names a file (its id) as its output.
        clock: returns Unix seconds.
    """

    def __init__(
        self,
        disk: Disk,
        options: BatchOptions,
        is_output: Callable[[str, str], bool],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.directory = options.directory / "files"
        self._disk = disk
        self._options = options
        self._is_output = is_output
        self._clock = clock

    def begin(self, *, is_limited: bool = True) -> Upload:
        """Start an upload, or, without limits, the output of a batch.

        Raises:
            StorageFullError: there is no room for another file.
        """
        self._disk.make_directory(self.directory)
        path = self.directory / f"{new_id('file-')}.part"
        if not is_limited:
            return Upload(self._disk, path, sys.maxsize)
        if sum(1 for name in os.listdir(self.directory) if name.endswith(".json")) >= MAX_FILES:
            raise StorageFullError(f"{MAX_FILES} files are kept already, the most that there can be")
        return Upload(self._disk, path, self.num_free_bytes())

    def keep(
        self,
        upload: Upload,
        filename: str,
        purpose: str,
        *,
        ttl_s: float | None = None,
        owner: str = "",
        batch: str = "",
    ) -> StoredFile:
        """Make an upload a durable file.

        Raises:
            StorageFullError: others have taken the room meanwhile.
        """
        upload.finish()
        if not batch and self.num_free_bytes() < 0:
            raise StorageFullError(self._too_much())
        created = int(self._clock())
        expires = created + int(self._options.file_ttl_s if ttl_s is None else ttl_s)
        file = StoredFile(upload.id, filename, purpose, upload.num_bytes, created, expires, owner, batch)
        self._disk.rename(upload.path, self._data(file.id))
        self._disk.create(self._json(file.id), json.dumps(asdict(file)).encode())
        return file

    def get(self, file_id: str) -> StoredFile | None:
        """Return a file; None if there is none with this id."""
        content = read_json(self._json(file_id)) if _ID.fullmatch(file_id) else None
        if content is None:
            return None
        file = StoredFile(**content)
        if file.expires_at is not None and file.expires_at <= self._clock():
            return None
        return None if file.batch and not self._is_output(file.batch, file.id) else file

    def all(self) -> list[StoredFile]:
        """Return all files, the oldest first."""
        files = [file for file_id in self._ids() if (file := self.get(file_id)) is not None]
        return sorted(files, key=lambda file: file.id)

    def path(self, file: StoredFile) -> Path:
        """Return where the content is."""
        return self._data(file.id)

    def delete(self, file_id: str) -> None:
        """Remove a file."""
        self._disk.unlink(self._json(file_id))
        self._disk.unlink(self._data(file_id))

    def num_free_bytes(self) -> int:
        """Return how many bytes more may be kept; negative if there are too many."""
        used = sum(_size(path) for path in self._entries() if path.suffix != ".json")
        with suppress(FileNotFoundError):
            used += sum(map(_size, (self._options.directory / "batches").glob("*/results-*.jsonl")))
        return self._options.max_total_bytes - used

    def sweep(self) -> None:
        """Remove what has expired, and what crashes have left."""
        now = self._clock()
        for file_id in self._ids():
            content = read_json(self._json(file_id))
            if content is None:
                continue
            has_expired = content["expires_at"] is not None and content["expires_at"] <= now
            is_abandoned = content["batch"] and content["created_at"] < now - _ABANDONED_S
            if has_expired or (is_abandoned and not self._is_output(content["batch"], file_id)):
                self.delete(file_id)
        known = set(self._ids())
        for path in self._entries():
            if path.suffix in (".part", ".data") and path.stem not in known and _age(path, now) > _ABANDONED_S:
                self._disk.unlink(path)

    def _too_much(self) -> str:
        return f"all files together exceed {self._options.max_total_bytes} bytes"

    def _ids(self) -> Iterator[str]:
        return (path.stem for path in self._entries() if path.suffix == ".json" and _ID.fullmatch(path.stem))

    def _entries(self) -> list[Path]:
        return list(self.directory.iterdir()) if self.directory.is_dir() else []

    def _json(self, file_id: str) -> Path:
        return self.directory / f"{file_id}.json"

    def _data(self, file_id: str) -> Path:
        return self.directory / f"{file_id}.data"


class Upload:
    """A file that is being written.

    Args:
        disk: writes.
        path: of the content; its name begins with the id.
        max_bytes: that there is room for.
    """

    def __init__(self, disk: Disk, path: Path, max_bytes: int) -> None:
        self.path = path
        self.id = path.stem
        self.num_bytes = 0
        self._disk = disk
        self._max_bytes = max_bytes
        self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)

    def write(self, data: bytes) -> None:
        """Add to the content.

        Raises:
            StorageFullError: there is no room for it.
        """
        assert self._descriptor is not None
        if self.num_bytes + len(data) > self._max_bytes:
            raise StorageFullError(f"only {max(0, self._max_bytes)} bytes are left for files")
        self._disk.write(self._descriptor, data)
        self.num_bytes += len(data)

    def finish(self) -> None:
        """Make the content durable."""
        assert self._descriptor is not None
        self._disk.sync(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = None

    def discard(self) -> None:
        """Remove what was written, unless it has become a file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._disk.unlink(self.path)


def new_id(prefix: str) -> str:
    """Return an id that nothing else has; ids sort by the time at which they were made."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(8)}"


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def _age(path: Path, now: float) -> float:
    with suppress(FileNotFoundError):
        return now - path.stat().st_mtime
    return 0.0
