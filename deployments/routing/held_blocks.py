"""HeldBlocks: how many leading blocks of a prompt each replica holds, as sets of replicas in the bits of integers.

A popular prefix is held by most replicas, and a decision needs the numbers of all of them: as an array they take
microseconds, however many there are. As a mapping, it is for those that look at few replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["HeldBlocks"]


class HeldBlocks(Mapping[str, int]):
    """Maps replicas to numbers of blocks, in ascending order of the numbers; replicas that hold none are absent.

    Args:
        groups: (the slots of replicas as a bit mask, how many blocks they hold), in ascending order of the numbers; no
            slot is in two of them.
        names: the replica of each slot; None: of none. It is not copied.
    """

    __slots__ = ("_by_name", "_groups", "_names")

    def __init__(self, groups: Sequence[tuple[int, int]], names: Sequence[str | None]) -> None:
        self._groups = groups
        self._names = names
        self._by_name: dict[str, int] | None = None

    @property
    def most(self) -> int:
        """The most blocks that a replica holds."""
        return self._groups[-1][1] if self._groups else 0

    def by_slot(self, num_slots: int) -> npt.NDArray[np.float64]:
        """Return the number of each slot, 0 for those that hold none; shape [num_slots], all replicas' slots."""
        groups, held = self._groups, np.zeros(num_slots)
        if groups and len(self) == num_slots:  # all hold some, such as a system prompt
            held.fill(groups[0][1])
            groups = groups[1:]
        for mask, number in groups:
            if mask & (mask - 1):
                bits = np.frombuffer(mask.to_bytes((num_slots + 7) // 8, "little"), np.uint8)
                held[np.unpackbits(bits, count=num_slots, bitorder="little").view(np.bool_)] = number
            else:  # one replica, as for most of the blocks of a conversation
                held[mask.bit_length() - 1] = number
        return held

    def deepest(self) -> Iterator[tuple[str, int]]:
        """Yield replicas and their numbers, the highest number first; it need not be read to the end."""
        for mask, number in reversed(self._groups):
            for name in self._names_of(mask):
                yield name, number

    def _names_of(self, mask: int) -> Iterator[str]:
        while mask:
            lowest = mask & -mask
            name = self._names[lowest.bit_length() - 1]
            assert name is not None
            yield name
            mask ^= lowest

    def _mapping(self) -> dict[str, int]:
        if self._by_name is None:
            self._by_name = {name: number for mask, number in self._groups for name in self._names_of(mask)}
        return self._by_name

    def __getitem__(self, name: str) -> int:
        return self._mapping()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._mapping())

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __len__(self) -> int:
        return sum(mask.bit_count() for mask, _ in self._groups)
