"""ObjectStore: pages as objects in a directory or an object store, through fsspec.

An object appears whole: object stores see to that, and in a directory it is written under another name and renamed.
Elsewhere a reader may find a part of an object, which its checksum shows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, Final
from uuid import uuid4

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from engine.errors import ConfigError
from engine.kv.tiers.disk.slot_header import SlotHeader
from engine.kv.tiers.page_format import PageFormat
from engine.kv.tiers.shared.object_name import ObjectName
from engine.kv.tiers.shared.retirement import StoredObject

__all__ = ["ObjectStore"]

_TIMES: Final = ("mtime", "LastModified", "last_modified", "updated", "created")  # each file system has another key
_PART: Final = ".part"  # of a file that is being written
_ABANDONED_S: Final = 3600.0  # after which its writer must have died


class ObjectStore:
    """The objects below one URL, of all models. Any thread may call it.

    Args:
        url: a path, or a URL of a protocol that fsspec knows.
        page_format: of the pages that are read and written.

    Raises:
        ConfigError: if no installed file system has the URL's protocol.
        OSError: if the storage fails, whatever its own error is; of all other methods too.
    """

    def __init__(self, url: str, page_format: PageFormat) -> None:
        try:
            self._fs, self._root = url_to_fs(os.path.expanduser(url), use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"cannot be used: {error}",
                param="shared_cache_path",
                value=url,
                remedy="name a directory, or a URL whose fsspec file system is installed, such as s3fs for s3://",
            ) from error
        self._root = self._root.rstrip("/")
        self._format = page_format
        self._header_bytes = SlotHeader.num_bytes(page_format.block_size)
        self._is_local = isinstance(self._fs, LocalFileSystem)

    def __str__(self) -> str:
        """Return where it is, without what a URL may say of a user."""
        protocol = self._fs.protocol if isinstance(self._fs.protocol, str) else self._fs.protocol[0]
        return f"{protocol}://{self._root}"

    def num_bytes(self, kind: int) -> int:
        """Return the size of an object of this kind of page."""
        return self._header_bytes + self._format.kinds[kind].num_bytes

    def name(self, kind: int, digest: bytes, parent: bytes, block_hash: int, index: int) -> ObjectName:
        """Return the name of a page of this format."""
        return ObjectName(self._format.digest, kind, digest, parent, block_hash, index)

    def is_ours(self, item: StoredObject) -> bool:
        """Whether an object can be a page of this format."""
        name = item.name
        return (
            name.format_digest == self._format.digest
            and name.kind < len(self._format.kinds)
            and item.num_bytes == self.num_bytes(name.kind)
        )

    def read(self, name: ObjectName) -> bytes:
        """Return an object's bytes, no more than a page of its kind has.

        Raises:
            FileNotFoundError: if it is gone.
        """
        with _os_errors():
            data = self._fs.cat_file(self._path(name), start=0, end=self.num_bytes(name.kind))
            assert isinstance(data, bytes)
            return data

    def write(self, name: ObjectName, header: SlotHeader, page: memoryview) -> None:
        """Write an object, which others see as a whole."""
        data = b"".join((header.pack(self._format.block_size), page))
        path = self._path(name)
        with _os_errors():
            if not self._is_local:
                self._fs.pipe_file(path, data)
                return
            part = f"{path}.{uuid4().hex}{_PART}"
            try:
                self._fs.pipe_file(part, data)
                os.replace(part, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(part)
                raise

    def delete(self, name: ObjectName) -> None:
        """Delete an object, unless it is gone."""
        with _os_errors(), suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def prepare(self) -> None:
        """Create the folders of this format, where folders must be created."""
        if self._fs.root_marker:  # object stores have none, and would take this for a bucket
            for kind in range(len(self._format.kinds)):
                with _os_errors():
                    self._fs.makedirs(f"{self._folder}/{kind}", exist_ok=True)

    def list(self, *, all_formats: bool) -> list[StoredObject]:
        """Return the objects of this format, or of all; what others keep below the URL is left out."""
        with _os_errors():
            try:
                self._fs.invalidate_cache()
                found: dict[str, dict[str, Any]] = self._fs.find(
                    self._root if all_formats else self._folder, detail=True
                )
            except FileNotFoundError:
                return []
        objects = []
        for path, info in found.items():
            relative = path.partition(f"{self._root}/")[2]
            if (name := ObjectName.parse(relative)) is not None:
                objects.append(StoredObject(name, int(info.get("size") or 0), _written_at(info)))
            elif path.endswith(_PART) and ObjectName.parse(relative.split(".", 1)[0]) is not None:
                self._delete_abandoned(path, _written_at(info))
        return objects

    def _delete_abandoned(self, path: str, written_at: float) -> None:
        """Delete what a writer has left that was killed."""
        if 0 < written_at < time.time() - _ABANDONED_S:
            with _os_errors(), suppress(FileNotFoundError):
                self._fs.rm_file(path)

    @property
    def _folder(self) -> str:
        return f"{self._root}/{self._format.digest.hex()}"

    def _path(self, name: ObjectName) -> str:
        return f"{self._root}/{name}"


def _written_at(info: dict[str, Any]) -> float:
    """Return when an object was written, in Unix seconds; 0: its file system does not say."""
    for key in _TIMES:
        value = info.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
        if isinstance(value, str):
            with suppress(ValueError):
                return datetime.fromisoformat(value).timestamp()
    return 0.0


@contextmanager
def _os_errors() -> Iterator[None]:
    """Turn the errors that file systems have of their own into ``OSError``."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
