"""ObjectIndex: which pages of one kind an engine knows to be on the shared storage.

It is what the last listing has found, what this engine has written since, and without what it has missed since.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.kv.tiers.shared.object_name import ObjectName

__all__ = ["ObjectIndex"]


class ObjectIndex:
    """The objects of one kind of page; a ``PageIndex``. The engine's thread calls it."""

    def __init__(self) -> None:
        self._names: dict[bytes, ObjectName] = {}  # by digest
        self._writing: dict[bytes, ObjectName] = {}
        self._written: dict[bytes, ObjectName] = {}  # since a listing was begun

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._names

    @property
    def hashes(self) -> list[int]:
        """The hashes of all pages."""
        return [name.block_hash for name in self._names.values()]

    def is_writing(self, digest: bytes) -> bool:
        """Whether a page is being written."""
        return digest in self._writing

    def begin(self, name: ObjectName) -> None:
        """Record that a page is being written."""
        self._writing[name.digest] = name

    def commit(self, digest: bytes, block_hash: int) -> None:
        """Record that a page was written."""
        self._names[digest] = self._written[digest] = self._writing.pop(digest)

    def abandon(self, digest: bytes) -> None:
        """Record that a page was not written."""
        del self._writing[digest]

    def drop(self, digest: bytes) -> int | None:
        """Forget a page; return its hash, None if it was not known."""
        self._written.pop(digest, None)
        name = self._names.pop(digest, None)
        return None if name is None else name.block_hash

    def pin(self, digest: bytes) -> ObjectName | None:
        """Return the name of a page; None if it is not known. Nothing keeps others from deleting it."""
        return self._names.get(digest)

    def unpin(self, slot: ObjectName) -> None:
        """Record that an object was read."""

    def touch(self, digests: Iterable[bytes], retention: int = 0) -> None:
        """The storage does not record uses."""

    def listing_begins(self) -> None:
        """Record that what is written from now on may be missing in the listing."""
        self._written = {}

    def listed(self, names: Iterable[ObjectName]) -> tuple[list[int], list[int]]:
        """Take in a listing; return the hashes of pages that are new, and of those that are gone."""
        before = self._names
        self._names = {name.digest: name for name in names} | self._written
        new = [name.block_hash for digest, name in self._names.items() if digest not in before]
        gone = [name.block_hash for digest, name in before.items() if digest not in self._names]
        return new, gone

    def check_integrity(self) -> None:
        """Assert that each page is in one state."""
        assert not self._names.keys() & self._writing.keys(), "a page that is there is written again"
        assert self._written.keys() <= self._names.keys(), "a page that was written is not known"
