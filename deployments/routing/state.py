"""RoutingState: the caches and loads of a deployment's replicas, as their messages report them.

    KV events, snapshots --> KVIndex       which replica holds which blocks
                             StateIndex    after which of them a hit may resume, where a model has states
                             StorageIndex  which blocks it can read from its disk, and from the shared cache
    load reports         --> ReplicaTable  how busy each replica is

It owns the lock for all: the event subscriber's thread calls it, while ClusterView reads and updates the same objects
for the requests. It knows neither Ray nor sockets nor what the time is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import inf
from threading import Lock

from deployments.routing.cost import PromptBlocks
from deployments.routing.held_blocks import HeldBlocks
from deployments.routing.kv_index import KVIndex
from deployments.routing.options import RoutingOptions
from deployments.routing.replica_table import ReplicaTable
from deployments.routing.state_index import StateIndex
from deployments.routing.storage_index import StorageIndex
from engine.kv.events import StorageName
from engine.observability.load import EngineLoad

__all__ = ["RoutingState"]

_SLICE = 4096  # blocks of a snapshot that are applied under one hold of the lock
_DEFAULT_CACHE_BLOCKS = 65_536  # assumed size of a replica's KV cache until it reports it


class RoutingState:
    """The replicas' caches and loads; times are monotonic seconds.

    Attributes:
        lock: held while an index or the table is read or changed.
        index: the blocks that each replica holds.
        storage: the blocks that each replica can read from each kind of storage.
        states: the blocks after which a hit on a replica may resume, if its model has states.
        table: the load of each replica.
        block_size: tokens per block.
    """

    def __init__(self, options: RoutingOptions) -> None:
        self.lock = Lock()
        self.index = KVIndex()
        self.states = StateIndex()
        self.storage: dict[StorageName, StorageIndex] = {"disk": StorageIndex(), "shared": StorageIndex()}
        self.table = ReplicaTable(options)
        self.block_size = 16

    # --- for ClusterView, which holds the lock ------------------------------------------------------------------------

    def set_replicas(self, names: Collection[str]) -> None:
        """Replace the set of replicas; forget everything about those that are gone."""
        for gone in self.table.by_name.keys() - set(names):
            self.table.remove(gone)
            self.index.remove_replica(gone)
            self.states.remove_replica(gone)
            self._forget_storage(gone)
        self.add_unknown(names)

    def add_unknown(self, names: Collection[str]) -> None:
        """Add those of the replicas that are not known yet."""
        for name in names:
            if name not in self.table.by_name:
                self.table.add(name, self.index.add_replica(name))

    def num_cached_blocks(self, prompt: PromptBlocks) -> HeldBlocks | dict[str, int]:
        """Return how many leading blocks of a prompt each replica need not compute; absent means none."""
        num_blocks = self.index.num_cached_blocks(prompt.hashes)
        if not self.states:
            return num_blocks
        max_blocks = max(0, prompt.num_tokens - 1) // prompt.block_size
        return self.states.resumable(prompt.hashes, num_blocks, max_blocks, self.index.is_assumed)

    def assume(self, replica: str, hashes: Sequence[int], now: float) -> None:
        """Assume that a replica will hold ``hashes``, the blocks of a prompt that it is going to compute."""
        if (known := self.table.by_name.get(replica)) is None:
            return
        self.index.assume(replica, hashes, now + self.table.options.assume_s if known.has_events else inf)
        if not known.has_events:
            report = known.load.report
            self.index.trim(replica, report.num_blocks if report is not None else _DEFAULT_CACHE_BLOCKS)

    # --- messages from replicas: the interface of kv_events.feed.Listener; unknown replicas are ignored ---------------

    def stored(self, replica: str, hashes: Iterable[int]) -> None:
        """Record that a replica holds ``hashes``."""
        with self.lock:
            self.index.stored(replica, hashes)

    def removed(self, replica: str, hashes: Iterable[int]) -> None:
        """Record that a replica has evicted ``hashes``."""
        with self.lock:
            self.index.removed(replica, hashes)

    def cleared(self, replica: str) -> None:
        """Record that a replica holds nothing: its cache was reset or its engine restarted."""
        with self.lock:
            self.index.cleared(replica)
            self.states.cleared(replica)
            self._forget_storage(replica)
            self._confirm(replica)

    def states_stored(self, replica: str, hashes: Iterable[int]) -> None:
        """Record that a hit on a replica may resume after these blocks."""
        with self.lock:
            if replica in self.table.by_name:
                self.states.stored(replica, hashes)

    def states_removed(self, replica: str, hashes: Iterable[int]) -> None:
        """Record that a hit on a replica may no longer resume after these blocks."""
        with self.lock:
            if replica in self.table.by_name:
                self.states.removed(replica, hashes)

    def saved(self, replica: str, hashes: Iterable[int], storage: StorageName = "disk") -> None:
        """Record that a replica can read ``hashes`` from storage."""
        with self.lock:
            if replica in self.table.by_name:
                self.storage[storage].saved(replica, hashes)

    def unsaved(self, replica: str, hashes: Iterable[int], storage: StorageName = "disk") -> None:
        """Record that a replica can no longer read ``hashes`` from storage."""
        with self.lock:
            self.storage[storage].unsaved(replica, hashes)

    def replaced(
        self,
        replica: str,
        hashes: Iterable[int],
        states: Iterable[int] | None = None,
        saved: Iterable[int] = (),
        shared: Iterable[int] = (),
    ) -> None:
        """Record that a replica holds exactly ``hashes``: a snapshot, which later events continue.

        A hit may resume after ``states`` only; None: the replica's model has no states. Its disk holds exactly
        ``saved``, and of the shared cache it knows exactly ``shared``. The blocks are applied in slices, with decisions
        in between: a million of them take a quarter of a second.
        """
        held = list(hashes)
        with self.lock:
            self._confirm(replica)
            self.states.remove_replica(replica)
            self._forget_storage(replica)
            gone = list(self.index.blocks(replica).difference(held))
        for change, blocks in ((self.index.removed, gone), (self.index.stored, held)):
            for start in range(0, len(blocks), _SLICE):
                with self.lock:
                    change(replica, blocks[start : start + _SLICE])
        if states is not None:
            self.states_stored(replica, states)
        if on_disk := list(saved):
            self.saved(replica, on_disk)
        if on_shared := list(shared):
            self.saved(replica, on_shared, "shared")

    def events_lost(self, replica: str) -> None:
        """Record that a replica's events are missing: until a snapshot comes, model its cache as an LRU cache."""
        with self.lock:
            if (known := self.table.by_name.get(replica)) is not None:
                known.has_events = False
                self.index.mark_unconfirmed(replica)

    def awaited(self, replica: str, hashes: Sequence[int], *, now: float) -> None:
        """Assume that a replica will hold ``hashes``: a request that needs them has joined its queue.

        Replicas announce the requests of all ingresses, so that a burst of one new prompt through many ingresses lands
        on one replica. Without the announcement an ingress would see the blocks only once they are computed.
        """
        with self.lock:
            self.assume(replica, hashes, now)

    def report(self, replica: str, load: EngineLoad, *, now: float) -> None:
        """Apply a replica's load report, which arrives at ``now``."""
        with self.lock:
            self.index.expire(now)
            if replica in self.table.by_name:
                self.table.report(replica, load, now)

    def _forget_storage(self, replica: str) -> None:
        for index in self.storage.values():
            index.remove_replica(replica)

    def _confirm(self, replica: str) -> None:
        """End the LRU model of a replica's cache: from now on its events say what it holds."""
        known = self.table.by_name.get(replica)
        if known is not None and not known.has_events:
            known.has_events = True
            self.index.trim(replica, 0)
