"""Disk: the writes of the batch directory. Each is atomic or durable, so that a crash at any moment leaves a state to
continue from.

The directory must be on a POSIX file system with hard links: a local disk, NFS, CephFS, Lustre. It knows nothing of
files and batches.
"""

from __future__ import annotations

import json
import os
import re
import stat
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["Disk", "read_json"]

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}")  # a name of ``_temporary``


class Disk:
    """Writes files. Tests let each of its single operations fail."""

    # --- single operations --------------------------------------------------------------------------------------------

    def write(self, descriptor: int, data: bytes) -> None:
        """Write all bytes."""
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]

    def sync(self, descriptor: int) -> None:
        """Return when what was written is on the disk."""
        os.fsync(descriptor)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name; raises FileExistsError if that exists."""
        os.link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file; the target is replaced."""
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a name, if it exists."""
        path.unlink(missing_ok=True)

    def make_directory(self, path: Path) -> None:
        """Make a directory that only this user can read, if it does not exist."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    # --- what is made of them -----------------------------------------------------------------------------------------

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            self.sync(descriptor)
        finally:
            os.close(descriptor)

    def create(self, path: Path, data: bytes) -> bool:
        """Create a durable file with its whole content; returns False, and changes nothing, if the name exists.

        Of several processes that create the same name, one gets True.
        """
        temporary = self._write_temporary(path, data)
        try:
            return self.publish(temporary, path)
        finally:
            self.unlink(temporary)

    def publish(self, source: Path, target: Path) -> bool:
        """Give a durable file a second name; returns False if that exists."""
        try:
            self.link(source, target)
        except FileExistsError:
            return False
        self.sync_directory(target.parent)
        return True

    def replace(self, path: Path, data: bytes) -> None:
        """Replace a file: a reader sees the old content or the new one."""
        temporary = self._write_temporary(path, data)
        try:
            self.rename(temporary, path)
        except OSError:
            self.unlink(temporary)
            raise

    def remove_tree(self, directory: Path) -> None:
        """Remove a directory of files."""
        with suppress(FileNotFoundError):
            for path in list(directory.iterdir()):
                self.unlink(path)
            directory.rmdir()

    def _write_temporary(self, path: Path, data: bytes) -> Path:
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            self.write(descriptor, data)
            self.sync(descriptor)
        except OSError:
            self.unlink(temporary)
            raise
        finally:
            os.close(descriptor)
        return temporary

    def leftovers(self, directory: Path, before: float) -> Iterator[Path]:
        """Yield the temporary files of processes that have died; ``before`` is the time of the file system's clock."""
        for path in directory.iterdir():
            with suppress(FileNotFoundError):
                status = path.stat()
                if _TEMPORARY.fullmatch(path.name) and stat.S_ISREG(status.st_mode) and status.st_mtime < before:
                    yield path


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a file; None if there is no such file."""
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return content
