"""DiskTier: KV pages in a file on a local disk, as a source of prefixes that a restarted engine finds again.

The index gives out slots. Two threads, one for reads and one for writes, copy pages between host memory and the file.
An error of the disk, or a full one, turns the tier off until the engine restarts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from engine.config import EngineConfig, EngineInfo
from engine.errors import ConfigError
from engine.kv.events import EventLog
from engine.kv.tiers.digests import TokenChain
from engine.kv.tiers.disk.slot_file import SlotFile
from engine.kv.tiers.disk.slot_header import SlotHeader
from engine.kv.tiers.disk.slot_index import SlotIndex
from engine.kv.tiers.disk.slot_plan import by_use, plan_regions
from engine.kv.tiers.inbox import StepInbox
from engine.kv.tiers.page_format import PageFormat
from engine.kv.tiers.reading import PageReader, Slots
from engine.kv.tiers.storage_tier import StorageTier
from engine.kv.tiers.tier_meter import TierMeter

__all__ = ["DiskTier"]

logger = logging.getLogger(__name__)


class DiskTier(StorageTier[int]):
    """The disk cache of one engine; a page is in a slot.

    Args:
        file: the slots.
        page_format, inbox, meter, events, on_changed: as of ``StorageTier``.
    """

    name = "disk"
    _indices: Sequence[SlotIndex]

    def __init__(
        self,
        file: SlotFile,
        page_format: PageFormat,
        inbox: StepInbox,
        meter: TierMeter,
        events: EventLog,
        on_changed: Callable[[], None],
    ) -> None:
        self._file = file
        super().__init__(page_format, inbox, meter, events, on_changed)
        for kind, index in enumerate(self._indices):
            headers = list(file.scan(kind))
            index.restore((slot, header.digest, header.block_hash) for slot, header in by_use(headers))
            self._generation = max([self._generation, *(header.generation for _, header in headers)])
        meter.has_room_for(self.name, self.max_blocks)
        self._report_all()

    @classmethod
    def open(
        cls,
        config: EngineConfig,
        info: EngineInfo,
        page_format: PageFormat,
        inbox: StepInbox,
        meter: TierMeter,
        events: EventLog,
        on_changed: Callable[[], None],
    ) -> DiskTier:
        """Open the disk cache that the options describe, and find what an earlier run has left there.

        Raises:
            ConfigError: if the directory cannot be used, or ``disk_cache_gib`` holds no block.
        """
        assert config.disk_cache_path is not None
        regions = plan_regions(config.disk_cache_gib, info, page_format)
        try:
            file = SlotFile.open(Path(config.disk_cache_path).expanduser(), regions, page_format)
            tier = cls(file, page_format, inbox, meter, events, on_changed)
        except OSError as error:
            raise ConfigError(
                f"cannot be read: {error}", param="disk_cache_path", value=config.disk_cache_path
            ) from error
        logger.info(
            "Disk cache %s: %d of %d blocks found, %s tokens of room in %.2f GiB",
            file.path,
            tier.num_blocks,
            regions[0].num_slots,
            f"{regions[0].num_slots * info.block_size:,}",
            sum(region.num_slots * region.slot_bytes for region in regions) / 2**30,
        )
        return tier

    @property
    def max_blocks(self) -> int:
        """Blocks that the disk has room for."""
        return self._file.regions[0].num_slots

    def close(self) -> None:
        """End the threads after what they have begun, and unlock the file."""
        super().close()
        self._file.close()

    def _new_indices(self) -> Sequence[SlotIndex]:
        return [SlotIndex(region.num_slots) for region in self._file.regions]

    def _begin(self, chain: TokenChain, index: int, kind: int) -> tuple[int, int | None] | None:
        return self._indices[kind].begin(chain.digest(index))

    def _page_reader(self, slots: Slots[int]) -> PageReader[int]:
        return _FileReader(self._file)

    def _write_page(self, kind: int, slot: int, header: SlotHeader, page: memoryview) -> None:
        self._file.write(kind, slot, header, page)

    def _weights_changed(self) -> None:
        if self.is_on:
            self._writer.submit(self._erase, self._epoch)  # after the writes that were begun

    def _erase(self, epoch: int) -> None:
        try:
            self._file.erase()
        except OSError as problem:
            self._inbox.post(partial(self._turn_off, problem, epoch))

    def _log_off(self, problem: OSError) -> None:
        logger.warning("The disk cache %s is off until the engine restarts: %s", self._file.path, problem)


class _FileReader:
    """Reads slots one after the other; the file stays open."""

    def __init__(self, file: SlotFile) -> None:
        self.read = file.read

    def close(self) -> None:
        """Nothing was begun."""
