"""SharedTier: KV pages on storage that several engines use, as the last source of prefixes.

What the others have written, an engine learns from listings, which its writer's thread makes now and then: it needs no
other connection to them. The same thread deletes the oldest objects if all together take more than their limit. So
engines agree without talking, and what another engine deletes is missed when it is read, which costs a computation.

An error of the storage turns the tier off for a while, which doubles with every further one. Then a listing tries it
again.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

from engine.config import EngineConfig
from engine.kv.events import BlockSaved, BlockUnsaved, EventLog
from engine.kv.tiers.digests import TokenChain
from engine.kv.tiers.disk.slot_header import SlotHeader
from engine.kv.tiers.inbox import StepInbox
from engine.kv.tiers.page_format import PageFormat
from engine.kv.tiers.reading import PageReader, Slots
from engine.kv.tiers.shared.object_index import ObjectIndex
from engine.kv.tiers.shared.object_name import ObjectName
from engine.kv.tiers.shared.object_store import ObjectStore
from engine.kv.tiers.shared.read_ahead import ReadAhead
from engine.kv.tiers.shared.retirement import StoredObject, retired
from engine.kv.tiers.storage_tier import StorageTier
from engine.kv.tiers.tier_meter import TierMeter

__all__ = ["SharedTier"]

logger = logging.getLogger(__name__)

LIST_EVERY_S = 30.0
_LISTING_SHARE = 0.02  # of the time, at most: a listing takes the interpreter's lock from the steps
FIRST_PAUSE_S = 5.0  # after an error
_LONGEST_PAUSE_S = 300.0
_NUM_READERS = 4  # prefixes that are read at a time
_NUM_AHEAD = 8  # objects of one prefix that are read at a time
_NUM_THREADS = 16  # that read objects


@dataclass(frozen=True, slots=True)
class _Listing:
    """What a listing has found, of this engine's format."""

    names: list[ObjectName] = field(default_factory=list)
    num_deleted: int = 0
    seconds: float = 0.0


class SharedTier(StorageTier[ObjectName]):
    """The shared cache, as one engine sees it; a page is in an object. It is off until the first listing.

    Args:
        store: the objects.
        max_bytes: of all objects below the URL, those of other models too; None: this engine deletes nothing.
        page_format, inbox, meter, events, on_changed: as of ``StorageTier``.
    """

    name = "shared"
    _indices: Sequence[ObjectIndex]

    def __init__(
        self,
        store: ObjectStore,
        max_bytes: int | None,
        page_format: PageFormat,
        inbox: StepInbox,
        meter: TierMeter,
        events: EventLog,
        on_changed: Callable[[], None],
    ) -> None:
        super().__init__(page_format, inbox, meter, events, on_changed, _NUM_READERS)
        self.is_on = False
        self._store = store
        self._max_bytes = max_bytes
        self._pause_s = FIRST_PAUSE_S
        self._has_ended = False
        self._num_timers = 0
        self._warned_of_times = False
        self._objects = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="kv-shared-object")
        if max_bytes is not None:
            meter.has_room_for(self.name, self.max_blocks)
        self._list()

    @classmethod
    def open(
        cls,
        config: EngineConfig,
        page_format: PageFormat,
        inbox: StepInbox,
        meter: TierMeter,
        events: EventLog,
        on_changed: Callable[[], None],
    ) -> SharedTier:
        """Open the shared cache that the options describe; whether it can be used, the first listing shows.

        Raises:
            ConfigError: if its protocol is not known.
        """
        assert config.shared_cache_path is not None
        store = ObjectStore(config.shared_cache_path, page_format)
        size = config.shared_cache_gib
        return cls(store, None if size is None else int(size * 2**30), page_format, inbox, meter, events, on_changed)

    @property
    def max_blocks(self) -> int:
        """Blocks that the storage has room for, if they are all of this engine's format."""
        return sys.maxsize if self._max_bytes is None else self._max_bytes // self._store.num_bytes(0)

    # --- listings -----------------------------------------------------------------------------------------------

    def _list(self) -> None:
        """Begin a listing."""
        for index in self._indices:
            index.listing_begins()
        self._writer.submit(self._list_in_thread, self._epoch)

    def _list_later(self, seconds: float) -> None:
        """Begin a listing after some time, and not when it was planned before."""
        self._num_timers += 1
        tier, number = weakref.ref(self), self._num_timers

        def list_now() -> None:
            if (self := tier()) is not None and not self._has_ended and self._num_timers == number:
                self._list()

        self._inbox.post_at(monotonic() + seconds, list_now)

    def _list_in_thread(self, epoch: int) -> None:
        """List the objects, and delete the oldest; in the writer's thread."""
        started = monotonic()
        try:
            self._store.prepare()
            objects = self._store.list(all_formats=self._max_bytes is not None)
            gone = self._retire(objects)
        except OSError as problem:
            self._inbox.post(partial(self._list_failed, problem, epoch))
            return
        names = [item.name for item in objects if item.name not in gone and self._store.is_ours(item)]
        self._inbox.post(partial(self._listed, _Listing(names, len(gone), monotonic() - started), epoch))

    def _retire(self, objects: Sequence[StoredObject]) -> set[ObjectName]:
        """Delete the oldest objects, if all take more than the limit; return the names of what was deleted."""
        if self._max_bytes is None:
            return set()
        if not all(item.written_at for item in objects):
            if not self._warned_of_times:
                logger.warning("The shared cache %s does not say how old objects are: none is deleted", self._store)
            self._warned_of_times = True
            return set()
        gone = {item.name for item in retired(objects, self._max_bytes)}
        list(self._objects.map(self._store.delete, gone))
        return gone

    def _listed(self, listing: _Listing, epoch: int) -> None:
        """Take in a listing."""
        if self._has_ended or epoch != self._epoch:  # an error since has planned the next one
            return
        self._list_later(max(LIST_EVERY_S, listing.seconds / _LISTING_SHARE))
        by_kind: list[list[ObjectName]] = [[] for _ in self._indices]
        for name in listing.names:
            by_kind[name.kind].append(name)
        for kind, (index, names) in enumerate(zip(self._indices, by_kind, strict=True)):
            new, gone = index.listed(names)
            for event, hashes in ((BlockSaved, new), (BlockUnsaved, gone)):
                for block_hash in hashes if not kind else ():
                    self._events.record(event(block_hash, self.name))
        if not self.is_on:
            logger.info("Shared cache %s: %d blocks of this model found", self._store, self.num_blocks)
        elif listing.num_deleted:
            logger.info("Shared cache %s: %d old objects deleted", self._store, listing.num_deleted)
        self.is_on = True
        self._pause_s = FIRST_PAUSE_S
        self._meter.holds(self.name, self.num_blocks)
        self._on_changed()

    def _list_failed(self, problem: OSError, epoch: int) -> None:
        if self.is_on:
            self._turn_off(problem, self._epoch)
        elif not self._has_ended:
            self._log_off(problem)
            self._meter.failed(self.name, "io")
            self._pause()

    def _turn_off(self, problem: OSError, epoch: int) -> None:
        was_on = self.is_on
        super()._turn_off(problem, epoch)
        if was_on and not self.is_on:
            self._pause()

    def _pause(self) -> None:
        self._list_later(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    # --- what a storage does ------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the threads after what they have begun."""
        self._has_ended = True
        super().close()
        self._objects.shutdown()

    def _drop(self, digest: bytes, epoch: int) -> None:
        """Forget the pages of a block, and delete what is left of them: they would be listed again."""
        if epoch == self._epoch:
            names = [name for index in self._indices if (name := index.pin(digest)) is not None]
            self._writer.submit(self._delete, names, epoch)
        super()._drop(digest, epoch)

    def _delete(self, names: Sequence[ObjectName], epoch: int) -> None:
        try:
            for name in names:
                self._store.delete(name)
        except OSError as problem:
            self._inbox.post(partial(self._turn_off, problem, epoch))

    def _new_indices(self) -> Sequence[ObjectIndex]:
        return [ObjectIndex() for _ in self._format.kinds]

    def _begin(self, chain: TokenChain, index: int, kind: int) -> tuple[ObjectName, int | None] | None:
        digest, parent = chain.digest(index), chain.digest(index - 1)
        name = self._store.name(kind, digest, parent, chain.block_hash(index, self._block_size), index)
        self._indices[kind].begin(name)
        return name, None

    def _page_reader(self, slots: Slots[ObjectName]) -> PageReader[ObjectName]:
        return ReadAhead(self._store, self._objects, slots, self._block_size, _NUM_AHEAD)

    def _write_page(self, kind: int, slot: ObjectName, header: SlotHeader, page: memoryview) -> None:
        self._store.write(slot, header, page)

    def _weights_changed(self) -> None:
        """Neither read nor write any object until the engine is started again.

        Names stand for the weights that were loaded. Pages of others would be wrong for the engines that have these.
        """
        self.is_on, self._has_ended = False, True
        logger.info("The shared cache %s is off until the engine restarts: the prefix cache was reset", self._store)

    def _log_off(self, problem: OSError) -> None:
        logger.warning("The shared cache %s is off for %.0f s: %s", self._store, self._pause_s, problem)
