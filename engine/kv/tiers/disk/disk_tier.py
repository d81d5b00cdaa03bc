"""DiskTier: KV pages on a disk, as a source of prefixes that a restarted engine finds again.

The engine's thread keeps the index and gives out slots. Two threads, one for reads and one for writes, copy pages
between host memory and the file. Every page is read with its header, which must name the block that is wanted; its
checksum is compared by the sink. What is damaged is dropped, page by page, and computed again.

An error of the disk, or a full one, turns the tier off with one warning. No request fails because of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.config import EngineConfig, EngineInfo
from engine.errors import ConfigError
from engine.kv.events import BlockSaved, BlockUnsaved, EventLog
from engine.kv.tiers.departures import Lease, LeaseExpiredError
from engine.kv.tiers.digests import TokenChain
from engine.kv.tiers.disk.reading import read_blocks, unpin_slots
from engine.kv.tiers.disk.slot_file import SlotFile
from engine.kv.tiers.disk.slot_header import SlotHeader
from engine.kv.tiers.disk.slot_index import SlotIndex
from engine.kv.tiers.disk.slot_plan import by_use, plan_regions
from engine.kv.tiers.inbox import StepInbox
from engine.kv.tiers.page_format import PageFormat
from engine.kv.tiers.source import ArrivalSink, WantedPrefix
from engine.kv.tiers.tier_meter import TierMeter
from engine.observability.load import SourceRate
from engine.request import KVSource

__all__ = ["DiskTier"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Write:
    """A page that is being written."""

    block: int  # of the lease
    kind: int
    slot: int
    digest: bytes


class DiskTier:
    """The disk cache of one engine. The engine's thread calls all methods, ``fetch`` and ``save`` return at once.

    Args:
        file: the slots.
        page_format: of the pages.
        inbox: of the engine's thread.
        meter: counts what is read and written.
        events: which blocks are saved, for routers.
        on_changed: called after events were recorded between two steps.

    Attributes:
        name: label of metrics.
        is_on: False after an error of the disk.
    """

    name = "disk"

    def __init__(
        self,
        file: SlotFile,
        page_format: PageFormat,
        inbox: StepInbox,
        meter: TierMeter,
        events: EventLog,
        on_changed: Callable[[], None],
    ) -> None:
        self.is_on = True
        self._file = file
        self._block_size = page_format.block_size
        self._inbox, self._meter, self._events, self._on_changed = inbox, meter, events, on_changed
        self._epoch = 0  # counts resets: what was begun before does not count
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="kv-disk-reader")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kv-disk-writer")
        self._indices = [SlotIndex(region.num_slots) for region in file.regions]
        self._generation = 0
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
    def num_blocks(self) -> int:
        """Blocks that the disk holds."""
        return len(self._indices[0])

    @property
    def max_blocks(self) -> int:
        """Blocks that the disk has room for."""
        return self._indices[0].num_slots

    # --- reading ------------------------------------------------------------------------------------------------

    def may_help(self, source: KVSource | None) -> bool:
        """Whether the disk holds anything."""
        return self.is_on and len(self._indices[0]) > 0

    def has(self, wanted: WantedPrefix, index: int, kind: int) -> bool:
        """Whether the disk holds a page."""
        return wanted.chain.digest(index) in self._indices[kind]

    def seconds(self, num_tokens: int) -> float | None:
        """Return how long reading takes: see ``PrefixSource``."""
        return self._meter.rate(self.name).expected_seconds(num_tokens)

    def rates(self) -> Sequence[SourceRate]:
        """Return the rate of reads as the requests that waited have seen it; nothing before the first one."""
        rate = self._meter.rate(self.name)
        return (SourceRate("", 0.0, rate.tokens_per_s, rate.num_transfers),) if rate.num_transfers else ()

    def fetch(self, wanted: WantedPrefix, sink: ArrivalSink) -> None:
        """Begin to read pages: see ``PrefixSource``."""
        chain, blocks = wanted.chain, range(sink.first_block, sink.first_block + sink.num_blocks)
        slots = [
            [
                None if buffer is None else index.pin(chain.digest(block))
                for index, buffer in zip(self._indices, sink.page_buffers(block), strict=True)
            ]
            for block in blocks
        ]
        for index in self._indices:
            index.touch(chain.digest(block) for block in reversed(range(blocks.stop)))
        unpin = partial(unpin_slots, self._indices, slots)  # a reset has other indices
        self._reader.submit(self._read, chain, slots, sink, self._epoch, unpin)

    def _read(
        self,
        chain: TokenChain,
        slots: list[list[int | None]],
        sink: ArrivalSink,
        epoch: int,
        unpin: Callable[[], None],
    ) -> None:
        """Read blocks, in the reader's thread."""
        error: str | None = "io"
        try:
            error, block = read_blocks(self._file, chain, slots, sink)
            if error == "checksum":
                self._inbox.post(partial(self._drop, chain.digest(block), epoch))
        except OSError as problem:
            self._inbox.post(partial(self._turn_off, problem))
        finally:
            self._inbox.post(unpin)
            sink.finished(error)

    def _drop(self, digest: bytes, epoch: int) -> None:
        """Forget the pages of a block that was damaged."""
        if epoch == self._epoch:
            for kind, index in enumerate(self._indices):
                self._report_unsaved(kind, index.drop(digest))
            self._on_changed()

    # --- writing ------------------------------------------------------------------------------------------------

    def lacks(self, chain: TokenChain, block: int, kind: int) -> bool:
        """Whether a page is neither on the disk nor on its way there."""
        digest = chain.digest(block)
        return digest not in self._indices[kind] and not self._indices[kind].is_writing(digest)

    def next_generation(self) -> int:
        """Return the number of another text that is saved."""
        self._generation += 1
        return self._generation

    def save(self, lease: Lease, generation: int, on_done: Callable[[], None]) -> None:
        """Begin to write the pages of a lease that the disk lacks; release it and call ``on_done`` at the end.

        Args:
            lease: pages of a text.
            generation: of the text: see ``next_generation``.
            on_done: called in this thread.
        """
        chain, writes = lease.chain, list[_Write]()
        for block, pages in enumerate(lease.pages):
            for kind, page in enumerate(pages):
                digest = chain.digest(lease.first_block + block)
                if page is None or not self.lacks(chain, lease.first_block + block, kind):
                    continue
                if (begun := self._indices[kind].begin(digest)) is None:
                    continue
                slot, dropped = begun
                self._report_unsaved(kind, dropped)
                writes.append(_Write(block, kind, slot, digest))
        self._writer.submit(self._write, lease, writes, generation, self._epoch, on_done)

    def _write(
        self, lease: Lease, writes: Sequence[_Write], generation: int, epoch: int, on_done: Callable[[], None]
    ) -> None:
        """Write pages, in the writer's thread."""
        done = 0
        try:
            for write in writes:
                page = lease.pages[write.block][write.kind]
                assert page is not None
                self._file.write(write.kind, write.slot, self._header(lease, write, generation), page)
                if not lease.is_valid:  # the page may have changed while it was written
                    break
                done += 1
        except LeaseExpiredError:
            pass
        except OSError as problem:
            self._inbox.post(partial(self._turn_off, problem))
        finally:
            lease.release()
            self._inbox.post(partial(self._written, lease.chain, lease.first_block, writes, done, epoch, on_done))

    def _header(self, lease: Lease, write: _Write, generation: int) -> SlotHeader:
        index = lease.first_block + write.block
        page_checksum = lease.checksum(write.block, write.kind)
        assert page_checksum is not None
        chain = lease.chain
        return SlotHeader(
            digest=write.digest,
            parent=chain.digest(index - 1),
            block_hash=chain.block_hash(index, self._block_size),
            index=index,
            tokens=chain.packed(index),
            page_checksum=page_checksum,
            generation=generation,
        )

    def _written(
        self,
        chain: TokenChain,
        first_block: int,
        writes: Sequence[_Write],
        num_done: int,
        epoch: int,
        on_done: Callable[[], None],
    ) -> None:
        """Enter what was written into the index."""
        num_blocks = num_bytes = 0
        if epoch == self._epoch:
            for position, write in enumerate(writes):
                if position >= num_done:
                    self._indices[write.kind].abandon(write.digest)
                    continue
                block_hash = chain.block_hash(first_block + write.block, self._block_size)
                self._indices[write.kind].commit(write.digest, block_hash)
                num_bytes += self._file.regions[write.kind].page_bytes
                if not write.kind:
                    num_blocks += 1
                    self._events.record(BlockSaved(block_hash))
            self._meter.saved(self.name, num_tokens=num_blocks * self._block_size, num_bytes=num_bytes)
            self._meter.holds(self.name, self.num_blocks)
            self._on_changed()
        on_done()

    def touch(self, chain: TokenChain, retention: int) -> None:
        """Count all pages of a text as used now; they are spared as often as ``retention`` says."""
        for index in self._indices:
            index.touch((chain.digest(block) for block in reversed(range(chain.num_blocks))), retention)

    # --- the whole ----------------------------------------------------------------------------------------------

    def reset(self, *, keeps_content: bool) -> None:
        """Follow a reset of the prefix cache, whose event also says that nothing is saved.

        Args:
            keeps_content: the disk still holds what it says.
        """
        if not self.is_on:
            return
        if keeps_content:
            self._report_all()
            return
        self._epoch += 1
        self._indices = [SlotIndex(region.num_slots) for region in self._file.regions]
        self._meter.holds(self.name, 0)
        self._writer.submit(self._erase)  # after the writes that were begun

    def close(self) -> None:
        """End the threads after what they have begun, and unlock the file."""
        self._reader.shutdown()
        self._writer.shutdown()
        self._file.close()

    def check_integrity(self) -> None:
        """Assert that each slot is in one state."""
        for index in self._indices:
            index.check_integrity()

    def _erase(self) -> None:
        try:
            self._file.erase()
        except OSError as problem:
            self._inbox.post(partial(self._turn_off, problem))

    def _turn_off(self, problem: OSError) -> None:
        """Use the disk no longer."""
        if not self.is_on:
            return
        self.is_on = False
        logger.warning("The disk cache %s is off until the engine restarts: %s", self._file.path, problem)
        self._meter.failed(self.name, "io")
        self._epoch += 1
        for block_hash in self._indices[0].hashes:
            self._events.record(BlockUnsaved(block_hash))
        self._indices = [SlotIndex(region.num_slots) for region in self._file.regions]
        self._meter.holds(self.name, 0)
        self._on_changed()

    def _report_all(self) -> None:
        for block_hash in self._indices[0].hashes:
            self._events.record(BlockSaved(block_hash))
        self._meter.holds(self.name, self.num_blocks)

    def _report_unsaved(self, kind: int, block_hash: int | None) -> None:
        if not kind and block_hash is not None:
            self._events.record(BlockUnsaved(block_hash))
