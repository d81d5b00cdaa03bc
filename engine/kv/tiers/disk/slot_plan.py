"""How the disk cache is divided into slots, and in which order the pages of a file that was found were used."""

from __future__ import annotations

from dataclasses import replace

from engine.config import EngineInfo
from engine.errors import ConfigError
from engine.kv.tiers.disk.slot_file import Region
from engine.kv.tiers.disk.slot_header import SlotHeader
from engine.kv.tiers.page_format import PageFormat

__all__ = ["by_use", "plan_regions"]


def plan_regions(size_gib: float, info: EngineInfo, page_format: PageFormat) -> list[Region]:
    """Return the slots of each kind of page, in the proportions of the host pools.

    Raises:
        ConfigError: if there is not a slot for a single block.
    """
    one_each = [Region.of(1, kind.num_bytes, page_format.block_size) for kind in page_format.kinds]
    num_pages = [info.num_host_blocks, *info.num_host_window_pages]
    num_pages += [info.num_host_slots] * (len(one_each) - len(num_pages))
    total = sum(count * region.slot_bytes for count, region in zip(num_pages, one_each, strict=True))
    share = size_gib * 2**30 / total
    regions = [replace(region, num_slots=int(count * share)) for count, region in zip(num_pages, one_each, strict=True)]
    if not regions[0].num_slots:
        raise ConfigError(
            f"holds no block, which takes {one_each[0].slot_bytes / 2**20:.2f} MiB",
            param="disk_cache_gib",
            value=size_gib,
            remedy="raise it, or set disk_cache_path to null",
        )
    return regions


def by_use(headers: list[tuple[int, SlotHeader]]) -> list[tuple[int, SlotHeader]]:
    """Return slots in the order of their last use; a block was used when a block after it was."""
    last_use = {header.digest: header.generation for _, header in headers}
    for _, header in sorted(headers, key=lambda item: -item[1].index):
        if header.parent in last_use:
            last_use[header.parent] = max(last_use[header.parent], last_use[header.digest])
    return sorted(headers, key=lambda item: (last_use[item[1].digest], -item[1].index))
