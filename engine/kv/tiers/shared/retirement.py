"""Which objects of the shared cache are deleted: those whose texts were written the longest ago.

A block was used when a block after it was written: a prompt that is extended again and again stays as a whole, and of
a text the end is deleted before the beginning, without which it is worth nothing. Uses that write nothing do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.kv.tiers.shared.object_name import ObjectName

__all__ = ["StoredObject", "retired"]

_KEPT = 0.95  # of the limit, so that not every listing finds a few to delete


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as a listing shows it.

    Attributes:
        name: which page it is.
        num_bytes: its size.
        written_at: Unix seconds.
    """

    name: ObjectName
    num_bytes: int
    written_at: float


def retired(objects: Sequence[StoredObject], max_bytes: int) -> list[StoredObject]:
    """Return the objects to delete, so that the others take at most ``max_bytes``; none while all of them do."""
    excess = sum(item.num_bytes for item in objects)
    if excess <= max_bytes:
        return []
    excess -= int(_KEPT * max_bytes)
    gone = []
    for item in _by_use(objects):
        if excess <= 0:
            break
        gone.append(item)
        excess -= item.num_bytes
    return gone


def _by_use(objects: Sequence[StoredObject]) -> list[StoredObject]:
    """Return objects in the order of their last use, of one text the end first."""
    last_use: dict[bytes, float] = {}
    for item in sorted(objects, key=lambda item: -item.name.index):
        name = item.name
        used_at = last_use[name.digest] = max(item.written_at, last_use.get(name.digest, 0.0))
        last_use[name.parent] = max(used_at, last_use.get(name.parent, 0.0))
    return sorted(objects, key=lambda item: (last_use[item.name.digest], -item.name.index))
