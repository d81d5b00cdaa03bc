"""TieredLoad: a random load on an engine with storage, whose reads and writes end when the driver says so.

What threads do at their own time happens here in a random order that a seed repeats: a step at a time, reads before
writes or after them, long after a request has given up, or never before the engine restarts.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.kv.tiers.disk.disk_tier import DiskTier
from engine.kv.tiers.disk.slot_header import SlotHeader
from engine.kv.tiers.shared.shared_tier import SharedTier
from engine.kv.tiers.source import ArrivalSink
from engine.kv.tiers.tiers import Tiers
from engine.observability.metrics import Metric
from tests.engine.random_load import RandomLoad, act
from tests.engine.random_requests import Arrival, random_arrival, random_options
from tests.engine.shadow import check_integrity

__all__ = ["ManualThread", "TieredLoad", "drive_with_tiers", "tiered_options"]


class ManualThread:
    """Stands for a thread: runs what was submitted, in order, when it is told to."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def submit(self, call: Callable[..., None], *args: Any) -> None:
        self.calls.append(lambda: call(*args))

    def shutdown(self) -> None:
        self.run(len(self.calls))

    def run(self, count: int) -> None:
        for _ in range(min(count, len(self.calls))):
            self.calls.pop(0)()


class AtOnce(Executor):
    """Stands for threads: runs what is submitted at once."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args, **options))
        except Exception as error:
            future.set_exception(error)
        return future


class LaggingSink:
    """What a source sees that is in the middle of a read when a request gives up: it goes on to write."""

    def __init__(self, sink: ArrivalSink, rng: random.Random) -> None:
        self._sink = sink
        self._rng = rng

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    @property
    def is_cancelled(self) -> bool:
        return self._sink.is_cancelled and self._rng.random() < 0.5


class TieredLoad(RandomLoad):
    """An engine with a storage under load.

    Args:
        directory: of the storage.
        seed: of what happens to the storage.
        storage: ``disk`` or ``shared``.
        ids: prefixes of an engine that has used this directory before.
        options: as of RandomLoad.
    """

    def __init__(self, directory: Path, seed: int, ids: Any = None, storage: str = "disk", **options: Any) -> None:
        size = 32 * 2**10 * 16 / 2**30
        super().__init__(**{f"{storage}_cache_path": str(directory), f"{storage}_cache_gib": size}, **options)
        if ids is not None:
            self.runner.ids = ids
        self.disk_rng = random.Random(seed)
        tiers = self.engine.tiers
        assert tiers is not None
        self.tiers: Tiers = tiers
        (self.disk,) = tiers._storage
        self.reader, self.writer = ManualThread(), ManualThread()
        self.disk._reader.shutdown()
        self.disk._writer.shutdown()
        self.disk._reader, self.disk._writer = self.reader, self.writer  # type: ignore[assignment]
        for part in (tiers.inbox, tiers.departures, tiers.fetching):
            part._clock = lambda: 0.0  # type: ignore[attr-defined]  # no deadline passes of its own accord
        tiers.fetching._prefill_rate = lambda: 0.0
        tiers.meter._sink = self  # counts
        fetch = self.disk.fetch
        self.disk.fetch = lambda wanted, sink: fetch(wanted, LaggingSink(sink, self.disk_rng))  # type: ignore[method-assign]
        if isinstance(self.disk, SharedTier):
            tiers.inbox.run()  # takes in the first listing
            self.disk._objects.shutdown()
            self.disk._objects = AtOnce()  # type: ignore[assignment]
        self.counts["found on the disk"] += self.disk.num_blocks

    def step(self) -> None:
        """Let something happen to the disk, then make a step if there is anything to compute."""
        self.disturb()
        while not self.engine.can_step and self.tiers.num_waiting:
            self.counts["steps that wait for the disk"] += 1
            self.run_threads(1, 1)
        if self.engine.can_step:
            super().step()
        self.check()

    def disturb(self) -> None:
        """Let reads and writes end, a request give up, or a bit flip."""
        event = self.disk_rng.random()
        if event < 0.4:
            self.run_threads(self.disk_rng.randrange(3), self.disk_rng.randrange(3))
        elif event < 0.43:
            for fetch in list(self.tiers.fetching._fetches.values()):
                self.tiers.fetching._give_up(fetch, "late")
                self.counts["late"] += 1
        elif event < 0.45:
            self.flip_a_bit()
        elif event < 0.46 and self.tiers.departures._held:
            self.tiers.departures._end(next(iter(self.tiers.departures._held)))
            self.counts["leases expired"] += 1
        elif event < 0.5 and isinstance(self.disk, SharedTier):
            if event < 0.48:
                self.disk._list()
            else:
                self.delete_an_object(self.disk)

    def delete_an_object(self, tier: SharedTier) -> None:
        """Let another engine delete an object."""
        if names := list(tier._indices[0]._names.values()):
            tier._store.delete(self.disk_rng.choice(names))
            self.counts["vanished"] += 1

    def flip_a_bit(self) -> None:
        """Damage the page or the header of a slot that is used and not being written."""
        if isinstance(self.disk, SharedTier):
            self.flip_a_bit_of_an_object(self.disk)
            return
        assert isinstance(self.disk, DiskTier)
        file, index = self.disk._file, self.disk._indices[0]
        if not len(index):
            return
        slot = self.disk_rng.choice(list(index._slots.values()))
        region, in_header = file.regions[0], self.disk_rng.random() < 0.3
        size = SlotHeader.num_bytes(file._format.block_size) if in_header else region.page_bytes
        start = file._offset(0, slot) + (0 if in_header else region.header_bytes)
        position = start + self.disk_rng.randrange(size)
        data = os.pread(file._descriptor, 1, position)
        os.pwrite(file._descriptor, bytes([data[0] ^ (1 << self.disk_rng.randrange(8))]), position)
        self.counts["bits flipped"] += 1

    def flip_a_bit_of_an_object(self, tier: SharedTier) -> None:
        paths = [Path(tier._store._path(name)) for name in tier._indices[0]._names.values()]
        if not (paths := [path for path in paths if path.exists()]):
            return
        path = self.disk_rng.choice(paths)
        data = bytearray(path.read_bytes())
        data[self.disk_rng.randrange(len(data))] ^= 1 << self.disk_rng.randrange(8)
        path.write_bytes(data)
        self.counts["bits flipped"] += 1

    def run_threads(self, num_reads: int, num_writes: int) -> None:
        """Make some of the reads and writes that were submitted, and take in what they post."""
        self.reader.run(num_reads)
        self.writer.run(num_writes)
        self.tiers.inbox.run()

    def check(self) -> None:
        """Check the invariants of the tiers."""
        check_integrity(self.engine)
        self.disk.check_integrity()
        waiting = set(self.tiers.fetching._fetches) | set(self.tiers.fetching._followed)
        assert waiting <= self.requests.keys(), "a request that has left waits for pages"
        assert set(self.tiers.fetching._kept) <= self.requests.keys(), "pages are kept for a request that has left"
        self.counts["waits"] += len(waiting)

    def finish(self) -> None:
        for _ in range(20_000):  # steps that only copy pages count too
            if self.requests:
                self.step()
            elif self.reader.calls or self.writer.calls or self.engine.can_step:
                self.run_threads(1, 1)
                if self.engine.can_step:
                    super().step()
            else:
                break
        super().finish()
        assert not self.tiers.is_saving, "the disk waits for ever"
        assert not self.tiers.departures._held, "a lease is never released"
        assert not self.tiers.arrivals._reserved, "reserved pages are never released"
        assert all(not pool.pinned for pool in self.tiers.pages.pools), "a page stays pinned"
        self.check()
        self.counts["saved"] += self.disk.num_blocks

    def close(self) -> None:
        self.tiers.close()

    # --- a sink of metrics --------------------------------------------------------------------------------------

    def increment(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        self.counts[" ".join((metric.name, *labels.values()))] += int(amount)

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Discard the value."""

    def observe(self, metric: Metric, value: float, count: int = 1, **labels: str) -> None:
        """Discard the value."""


def tiered_options(rng: random.Random) -> dict[str, Any]:
    """Draw options of an engine whose pools are scarce, on the host and on the disk too."""
    options: dict[str, Any] = random_options(rng)
    options |= {"enable_prefix_caching": True, "num_host_blocks": rng.choice([4, 8, 24, 80])}
    return options


def returning_arrival(rng: random.Random) -> Arrival:
    """Draw a request whose prompt mostly begins with an earlier text."""
    arrival = random_arrival(rng)
    return replace(arrival, extends=rng.randrange(30)) if rng.random() < 0.6 else arrival


def drive_with_tiers(
    seed: int,
    directory: Path,
    num_steps: int = 120,
    draw: Callable[[random.Random], Arrival] = returning_arrival,
    num_runs: int = 2,
    storage: str = "disk",
    **options: Any,
) -> Counter[str]:
    """Put a random load on an engine with a disk cache, then on others that find what it has left there."""
    rng = random.Random(seed)
    drawn = tiered_options(rng) | {"async_scheduling": seed % 3 == 2} | options
    counts: Counter[str] = Counter()
    ids, texts = None, None
    for run in range(num_runs):
        load = TieredLoad(directory, seed + run, ids, storage, **drawn)
        ids = load.runner.ids
        if texts is not None:
            load._texts = texts
        texts = load._texts
        try:
            _drive(load, rng, num_steps, draw)
        finally:
            load.close()
        counts += load.counts
    return counts


def _drive(load: TieredLoad, rng: random.Random, num_steps: int, draw: Callable[[random.Random], Arrival]) -> None:
    for _ in range(num_steps):
        if len(load.requests) < 10 and rng.random() < 0.4:
            arrival = draw(rng)
            for _ in range(rng.choice([1, 1, 1, 2, 3])):
                load.add(arrival)
        if load.requests:
            act(load, rng)
        if load.requests:
            load.step()
    load.finish()
