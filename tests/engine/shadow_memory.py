"""HostSlots: the slots of a shadow runner's host pool, in memory that other threads can read and write as bytes."""

from __future__ import annotations

import numpy as np

from engine.config import EngineInfo
from engine.kv.tiers.host_memory import HostMemory
from engine.kv.tiers.page_format import PageKind

__all__ = ["HostSlots", "shadow_host_memory"]


class HostSlots:
    """What each slot holds: the identity of a prefix, or nothing; as a dict of those that hold something.

    Args:
        num_slots: of the pool.
    """

    def __init__(self, num_slots: int) -> None:
        self._slots = np.full(num_slots, -1, dtype=np.int64)

    @property
    def memory(self) -> memoryview:
        return self._slots.view(np.uint8).data

    def get(self, slot: int) -> int | None:
        held = int(self._slots[slot])
        return None if held < 0 else held

    def pop(self, slot: int, default: None) -> None:
        self._slots[slot] = -1

    def __setitem__(self, slot: int, held: int) -> None:
        self._slots[slot] = held


def shadow_host_memory(info: EngineInfo, blocks: HostSlots, windows: list[HostSlots], states: HostSlots) -> HostMemory:
    """Return the host pools of a shadow runner as pages."""
    page = PageKind("blocks", 8 * info.block_size)
    kinds = [page, *(PageKind(f"window {window}", page.num_bytes) for window, _ in info.windows)]
    pools = [blocks.memory, *(window.memory for window in windows)]
    if info.num_slots:
        kinds.append(PageKind("states", 8))
        pools.append(states.memory)
    return HostMemory(kinds, pools)
