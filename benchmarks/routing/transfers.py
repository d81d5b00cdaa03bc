"""Transfers: blocks that simulated replicas pull from each other.

A request that names a source is not queued before the blocks have come:

    arrives -> the source's blocks are leased, room is made -> both links are free: on the wire -> published, queued

Each replica has one link out and one link in, of ``Settings.pull_bytes_per_s`` each. A link carries one transfer after
the other, in the order in which they begin. As in the engine, a request that needs blocks which are on their way waits
for them, and none waits longer than 1.25 times what computing the blocks takes: what has come by then is used. A
transfer brings nothing if either end is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.routing.replica import Job, KVLogEntry, SimulatedReplica
from benchmarks.routing.tiers import TieredCache
from benchmarks.routing.traces import BLOCK_SIZE

__all__ = ["Transfers"]

LEAST_WAIT_S = 0.25
WAIT_FACTOR = 1.25  # times what computing takes


@dataclass(eq=False)
class _Transfer:
    source: SimulatedReplica
    target: SimulatedReplica
    caches: tuple[TieredCache, TieredCache]  # of both: another object after a restart
    blocks: tuple[int, ...]
    num_come: int  # of them, when it ends
    jobs: list[Job] = field(default_factory=list)  # that wait for it


class Transfers:
    """All transfers of a cluster.

    Args:
        replicas: by name.
        at: calls a function at a time.
        queue: puts a request into the queue of its replica.
    """

    def __init__(
        self,
        replicas: dict[str, SimulatedReplica],
        at: Callable[[float, Callable[[float], None]], None],
        queue: Callable[[Job, SimulatedReplica, float], None],
    ) -> None:
        self._replicas = replicas
        self._at = at
        self._queue = queue
        self._out: dict[str, float] = {}  # replica -> when its link out is free
        self._in: dict[str, float] = {}
        self._coming: dict[tuple[str, int], _Transfer] = {}  # (replica, block)
        self.num_tokens = 0  # that were pulled

    def arrive(self, job: Job, target: SimulatedReplica, now: float) -> bool:
        """Let a request wait for blocks that it can pull, or which are on their way; False: it waits for nothing."""
        hashes, first = job.request.hashes, target.cache.match(job.request.hashes)
        if first < len(hashes) and (coming := self._coming.get((target.name, hashes[first]))) is not None:
            coming.jobs.append(job)
            target.wait(job, now)
            return True
        source, rate = self._replicas.get(job.source), target.settings.pull_bytes_per_s
        if source is None or source is target or not rate:
            return False
        end = source.cache.match(hashes[: job.source_blocks])
        if end <= first:
            return False
        transfer = self._begin(source, target, hashes[first:end], now)
        transfer.jobs.append(job)
        source.cache.lease(transfer.blocks)
        if evicted := target.cache.reserve(len(transfer.blocks)):
            target.log_now(KVLogEntry(now, removed=tuple(evicted)))
        for block in transfer.blocks:
            self._coming[target.name, block] = transfer
        target.wait(job, now)
        return True

    def _begin(
        self, source: SimulatedReplica, target: SimulatedReplica, blocks: tuple[int, ...], now: float
    ) -> _Transfer:
        settings = target.settings
        block_s = max(1e-12, BLOCK_SIZE * settings.token_bytes / settings.pull_bytes_per_s)
        starts = max(now, self._out.get(source.name, 0.0), self._in.get(target.name, 0.0))
        wait_s = max(LEAST_WAIT_S, WAIT_FACTOR * len(blocks) * BLOCK_SIZE / settings.prefill_rate)
        ends = min(starts + len(blocks) * block_s, now + wait_s)
        num_come = max(0, int((ends - starts) / block_s + 1e-6))
        if ends > starts:
            self._out[source.name] = self._in[target.name] = ends
        if num_come:
            target.pulls.record(source.name, starts - now, block_s / BLOCK_SIZE)
        transfer = _Transfer(source, target, (source.cache, target.cache), blocks, num_come)
        self._at(ends, lambda time: self._end(transfer, time))
        return transfer

    def _end(self, transfer: _Transfer, now: float) -> None:
        source, target, blocks = transfer.source, transfer.target, transfer.blocks
        for block in blocks:
            self._coming.pop((target.name, block), None)
        transfer.caches[0].end_lease(blocks)
        if target.cache is not transfer.caches[1]:
            return  # its requests were lost with it
        came = source.cache is transfer.caches[0] and self._replicas.get(source.name) is source
        received = blocks[: transfer.num_come] if came else ()
        if stored := target.cache.receive(received, len(blocks)):
            target.log_now(KVLogEntry(now, stored=tuple(stored)))
        self.num_tokens += len(received) * BLOCK_SIZE
        for job in transfer.jobs:
            target.end_wait(job)
            if job in transfer.jobs[:1] or not self.arrive(job, target, now):
                self._queue(job, target, now)
