"""StorageTier: KV pages on storage, as a source of prefixes that other runs of an engine find again.

The engine's thread keeps the indices, which say where each page is. Threads copy pages between host memory and the
storage. Every page is read with its header, which must name the block that is wanted; its checksum is compared by the
sink. What is damaged is dropped, page by page, and computed again.

An error of the storage turns the tier off with one warning. No request fails because of it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from engine.kv.events import BlockSaved, BlockUnsaved, EventLog, StorageName
from engine.kv.tiers.departures import Lease, LeaseExpiredError
from engine.kv.tiers.digests import TokenChain
from engine.kv.tiers.disk.slot_header import SlotHeader
from engine.kv.tiers.inbox import StepInbox
from engine.kv.tiers.page_format import PageFormat
from engine.kv.tiers.reading import PageReader, Slots, read_blocks, unpin_slots
from engine.kv.tiers.source import ArrivalSink, WantedPrefix
from engine.kv.tiers.tier_meter import TierMeter
from engine.observability.load import SourceRate
from engine.request import KVSource

__all__ = ["PageIndex", "StorageTier"]

logger = logging.getLogger(__name__)

S = TypeVar("S")  # where a page is: a slot of a file, the name of an object


class PageIndex(Protocol[S]):
    """Where the pages of one kind are. The engine's thread calls it; see ``SlotIndex`` for what its methods do."""

    def __len__(self) -> int: ...
    def __contains__(self, digest: bytes) -> bool: ...
    @property
    def hashes(self) -> list[int]: ...
    def is_writing(self, digest: bytes) -> bool: ...
    def commit(self, digest: bytes, block_hash: int) -> None: ...
    def abandon(self, digest: bytes) -> None: ...
    def drop(self, digest: bytes) -> int | None: ...
    def pin(self, digest: bytes) -> S | None: ...
    def unpin(self, slot: S) -> None: ...
    def touch(self, digests: Iterable[bytes], retention: int = 0) -> None: ...
    def check_integrity(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Write(Generic[S]):
    """A page that is being written."""

    block: int  # of the lease
    kind: int
    slot: S
    digest: bytes


class StorageTier(ABC, Generic[S]):
    """Pages on one storage. The engine's thread calls all methods, ``fetch`` and ``save`` return at once.

    Args:
        page_format: of the pages.
        inbox: of the engine's thread.
        meter: counts what is read and written.
        events: which blocks are saved, for routers.
        on_changed: called after events were recorded between two steps.
        num_readers: prefixes that are read at a time.

    Attributes:
        name: label of metrics.
        is_on: False after an error of the storage.
    """

    name: StorageName

    def __init__(
        self,
        page_format: PageFormat,
        inbox: StepInbox,
        meter: TierMeter,
        events: EventLog,
        on_changed: Callable[[], None],
        num_readers: int = 1,
    ) -> None:
        self.is_on = True
        self._format = page_format
        self._block_size = page_format.block_size
        self._inbox, self._meter, self._events, self._on_changed = inbox, meter, events, on_changed
        self._epoch = 0  # counts resets: what was begun before does not count
        self._reader = ThreadPoolExecutor(num_readers, thread_name_prefix=f"kv-{self.name}-reader")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix=f"kv-{self.name}-writer")
        self._indices: Sequence[PageIndex[S]] = self._new_indices()
        self._generation = 0

    # --- what a storage does ------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def max_blocks(self) -> int:
        """Blocks that the storage has room for."""

    @abstractmethod
    def _new_indices(self) -> Sequence[PageIndex[S]]:
        """Return the index of each kind of page, without any."""

    @abstractmethod
    def _begin(self, chain: TokenChain, index: int, kind: int) -> tuple[S, int | None] | None:
        """Choose where a page is written to.

        Returns:
            Where, and the hash of the page that was dropped for it, if there was one. None: there is no room.
        """

    @abstractmethod
    def _page_reader(self, slots: Slots[S]) -> PageReader[S]:
        """Return what reads these pages, in the reader's thread, which then calls its ``close``."""

    @abstractmethod
    def _write_page(self, kind: int, slot: S, header: SlotHeader, page: memoryview) -> None:
        """Write a page, in the writer's thread.

        Raises:
            OSError: if it cannot be written.
        """

    @abstractmethod
    def _weights_changed(self) -> None:
        """Make sure that what was saved so far is not read any longer; all was just forgotten."""

    @abstractmethod
    def _log_off(self, problem: OSError) -> None:
        """Log that the storage is not used, and for how long."""

    @property
    def num_blocks(self) -> int:
        """Blocks that the storage holds."""
        return len(self._indices[0])

    # --- reading ------------------------------------------------------------------------------------------------

    def may_help(self, source: KVSource | None) -> bool:
        """Whether the storage holds anything."""
        return self.is_on and len(self._indices[0]) > 0

    def has(self, wanted: WantedPrefix, index: int, kind: int) -> bool:
        """Whether the storage holds a page."""
        return wanted.chain.digest(index) in self._indices[kind]

    def seconds(self, num_tokens: int) -> float | None:
        """Return how long reading takes: see ``PrefixSource``."""
        return self._meter.rate(self.name).expected_seconds(num_tokens)

    def rates(self) -> Sequence[SourceRate]:
        """Return the rate of reads as the requests that waited have seen it; nothing before the first one."""
        rate = self._meter.rate(self.name)
        return (SourceRate(self.name, 0.0, rate.tokens_per_s, rate.num_transfers),) if rate.num_transfers else ()

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
        slots: Slots[S],
        sink: ArrivalSink,
        epoch: int,
        unpin: Callable[[], None],
    ) -> None:
        """Read blocks, in the reader's thread."""
        error: str | None = "io"
        try:
            reader = self._page_reader(slots)
            try:
                error, block = read_blocks(reader, chain, slots, sink)
            finally:
                reader.close()
            if error in ("checksum", "gone"):
                self._inbox.post(partial(self._drop, chain.digest(block), epoch))
        except OSError as problem:
            self._inbox.post(partial(self._turn_off, problem, epoch))
        finally:
            self._inbox.post(unpin)
            sink.finished(error)

    def _drop(self, digest: bytes, epoch: int) -> None:
        """Forget the pages of a block that was damaged, or is gone."""
        if epoch == self._epoch:
            for kind, index in enumerate(self._indices):
                self._report_unsaved(kind, index.drop(digest))
            self._on_changed()

    # --- writing ------------------------------------------------------------------------------------------------

    def lacks(self, chain: TokenChain, block: int, kind: int) -> bool:
        """Whether a page is neither on the storage nor on its way there."""
        digest = chain.digest(block)
        return digest not in self._indices[kind] and not self._indices[kind].is_writing(digest)

    def next_generation(self) -> int:
        """Return the number of another text that is saved."""
        self._generation += 1
        return self._generation

    def save(self, lease: Lease, generation: int, on_done: Callable[[], None]) -> None:
        """Begin to write the pages of a lease that the storage lacks; release it and call ``on_done`` at the end.

        Args:
            lease: pages of a text.
            generation: of the text: see ``next_generation``.
            on_done: called in this thread.
        """
        chain, writes = lease.chain, list[_Write[S]]()
        for block, pages in enumerate(lease.pages):
            for kind, page in enumerate(pages):
                index = lease.first_block + block
                if page is None or not self.lacks(chain, index, kind):
                    continue
                if (begun := self._begin(chain, index, kind)) is None:
                    continue
                slot, dropped = begun
                self._report_unsaved(kind, dropped)
                writes.append(_Write(block, kind, slot, chain.digest(index)))
        self._writer.submit(self._write, lease, writes, generation, self._epoch, on_done)

    def _write(
        self, lease: Lease, writes: Sequence[_Write[S]], generation: int, epoch: int, on_done: Callable[[], None]
    ) -> None:
        """Write pages, in the writer's thread."""
        done = 0
        try:
            for write in writes:
                page = lease.pages[write.block][write.kind]
                assert page is not None
                self._write_page(write.kind, write.slot, self._header(lease, write, generation), page)
                if not lease.is_valid:  # the page may have changed while it was written
                    break
                done += 1
        except LeaseExpiredError:
            pass
        except OSError as problem:
            self._inbox.post(partial(self._turn_off, problem, epoch))
        finally:
            lease.release()
            self._inbox.post(partial(self._written, lease.chain, lease.first_block, writes, done, epoch, on_done))

    def _header(self, lease: Lease, write: _Write[S], generation: int) -> SlotHeader:
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
        writes: Sequence[_Write[S]],
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
                num_bytes += self._format.kinds[write.kind].num_bytes
                if not write.kind:
                    num_blocks += 1
                    self._events.record(BlockSaved(block_hash, self.name))
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
            keeps_content: the storage still holds what it says; otherwise the weights have changed.
        """
        if self.is_on and keeps_content:
            self._report_all()
        elif not keeps_content:
            self._forget()
            self._weights_changed()

    def close(self) -> None:
        """End the threads after what they have begun."""
        self._reader.shutdown()
        self._writer.shutdown()

    def check_integrity(self) -> None:
        """Assert that each page is in one state."""
        for index in self._indices:
            index.check_integrity()

    def _forget(self) -> None:
        """Forget all pages; what was begun before does not count."""
        self._epoch += 1
        self._indices = self._new_indices()
        self._meter.holds(self.name, 0)

    def _turn_off(self, problem: OSError, epoch: int) -> None:
        """Do not use the storage any longer."""
        if not self.is_on or epoch != self._epoch:
            return
        self.is_on = False
        self._log_off(problem)
        self._meter.failed(self.name, "io")
        for block_hash in self._indices[0].hashes:
            self._events.record(BlockUnsaved(block_hash, self.name))
        self._forget()
        self._on_changed()

    def _report_all(self) -> None:
        for block_hash in self._indices[0].hashes:
            self._events.record(BlockSaved(block_hash, self.name))
        self._meter.holds(self.name, self.num_blocks)

    def _report_unsaved(self, kind: int, block_hash: int | None) -> None:
        if not kind and block_hash is not None:
            self._events.record(BlockUnsaved(block_hash, self.name))
