"""Tiers: the places outside memory from which KV comes and to which it goes, for one engine.

It joins the parts of this folder, and passes on to them what happens in the engine. A disk is one such place, and
storage that several engines share another; the transport of a deployment adds a third, which reads from other engines
and serves leases to them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig, EngineInfo
from engine.errors import OverloadedError
from engine.kv.block_manager import BlockManager
from engine.kv.tiers.arrivals import Arrivals
from engine.kv.tiers.copies import Copies
from engine.kv.tiers.copy_pace import CopyPace
from engine.kv.tiers.departures import Departures
from engine.kv.tiers.digests import TokenChain
from engine.kv.tiers.disk.disk_tier import DiskTier
from engine.kv.tiers.fetching import Fetching
from engine.kv.tiers.host_memory import HostMemory
from engine.kv.tiers.host_pages import HostPages
from engine.kv.tiers.inbox import StepInbox
from engine.kv.tiers.model_digest import model_digest
from engine.kv.tiers.page_format import PageFormat
from engine.kv.tiers.saver import Saver
from engine.kv.tiers.source import PrefixSource
from engine.kv.tiers.step_clock import StepClock
from engine.kv.tiers.storage_tier import StorageTier
from engine.kv.tiers.tier_meter import TierMeter
from engine.observability.load import MAX_SOURCE_RATES, SourceRate
from engine.observability.metrics import MetricSink
from engine.observability.observer import EngineObserver
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.scheduler_output import SchedulerOutput, StepTimes
from engine.sequence import Sequence, SequenceGroup

if TYPE_CHECKING:
    from engine.kv.tiers.shared.shared_tier import SharedTier

__all__ = ["Tiers"]

logger = logging.getLogger(__name__)

_BYTES_WHEN_IDLE = 8 * 2**20  # 2 ms at 4 GB/s, for which a request that comes would wait


class Tiers(EngineObserver):
    """The tiers of one engine. The engine's thread calls all methods.

    Args:
        config: the engine's options.
        info: the model and the engine's sizes.
        blocks: the block manager.
        scheduler: queues the requests whose pages have come.
        memory: of the host pools.
        prefill_rate: returns the tokens a second that the engine computes; 0: not measured yet.
        sink: stores the values of metrics.
        on_changed: called after something has changed between two steps.

    Attributes:
        inbox: of the engine's thread, for background threads.
        steps: of the engine.
        arrivals, departures: pages that come and go.
        fetching: requests that wait for pages; its ``sources`` can be extended.
        copies: pages of other engines that no request waits for.
        meter: what has moved, and how fast.
        disk: the disk cache; None: there is none.
        shared: the shared cache; None: there is none.
    """

    def __init__(
        self,
        config: EngineConfig,
        info: EngineInfo,
        blocks: BlockManager,
        scheduler: Scheduler,
        memory: HostMemory,
        prefill_rate: Callable[[], float],
        sink: MetricSink | None,
        on_changed: Callable[[], None],
    ) -> None:
        self._config, self._info = config, info
        self._memory = memory
        self.inbox = StepInbox()
        self.steps = StepClock()
        self.pages = HostPages(blocks, memory.kinds)
        self.meter = TierMeter(sink)
        self.meter.has_room_for("host", info.num_host_blocks)
        self.arrivals = Arrivals(self.pages, memory, self.inbox)
        self.departures = Departures(self.pages, memory, self.inbox, self.steps, report=self.meter.lends)
        self.fetching = Fetching(
            self.pages,
            self.arrivals,
            self.inbox,
            self.steps,
            lambda group: self.chain(group.sequences[0].token_ids, group.request.cache_key),
            scheduler.add,
            prefill_rate,
            self.meter,
        )
        self.copies = Copies(self.pages, self.arrivals, self.steps, self.chain, self.meter, on_changed)
        self._scheduler = scheduler
        self.disk: DiskTier | None = None
        self.shared: SharedTier | None = None
        self._pace = CopyPace()
        events = blocks.prefix_cache.events
        if config.disk_cache_path is not None:
            self.disk = DiskTier.open(config, info, self.format, self.inbox, self.meter, events, on_changed)
        if config.shared_cache_path is not None:
            from engine.kv.tiers.shared.shared_tier import SharedTier  # imports fsspec

            self.shared = SharedTier.open(config, self.format, self.inbox, self.meter, events, on_changed)
        self._storage: list[StorageTier[Any]] = [tier for tier in (self.disk, self.shared) if tier is not None]
        self._savers = [Saver(tier, self.pages, self.departures, self._bytes_to_save) for tier in self._storage]
        self.fetching.sources.extend(self._storage)

    @cached_property
    def format(self) -> PageFormat:
        """What the bytes of this engine's pages mean. The first access reads all weights."""
        digest, num_ranks = model_digest(self._config, self._info), self._config.tensor_parallel_size
        return PageFormat(digest, self._info.block_size, self._memory.kinds, num_ranks)

    def chain(self, token_ids: list[int], cache_key: str) -> TokenChain:
        """Return the blocks of a text, with their names."""
        return TokenChain(
            token_ids,
            self._info.block_size,
            cache_key=cache_key,
            model=self._info.model,
            format_digest=self.format.digest,
        )

    def add_peers(self, peers: PrefixSource) -> None:
        """Let requests and copies read from other engines; of equal prefixes, before the shared cache."""
        self.fetching.sources.insert(0 if self.disk is None else 1, peers)
        self.copies.peers = peers

    def publish_running(self) -> None:
        """Publish the blocks that running answers have filled, which decodes do only now and then."""
        blocks = self.pages.blocks
        if blocks.enable_prefix_caching:
            for sequence in self._scheduler.running:
                blocks.prefix_cache.publish(sequence, sequence.num_computed_tokens)

    # --- what the engine asks -----------------------------------------------------------------------------------

    @property
    def needs_step(self) -> bool:
        """Whether a step has pages to copy."""
        return self.pages.has_copies

    @property
    def num_waiting(self) -> int:
        """Requests that wait for pages."""
        return self.fetching.num_waiting

    @property
    def is_saving(self) -> bool:
        """Whether blocks are still to be written to storage."""
        return any(saver.is_busy for saver in self._savers)

    def run_calls(self, *, wait: bool) -> None:
        """Make the calls of background threads, where no AsyncEngine does that.

        Args:
            wait: nothing can be computed before a call comes.
        """
        if wait and self.num_waiting:
            self.inbox.wait()
        else:
            self.inbox.run()

    def source_rates(self) -> tuple[SourceRate, ...]:
        """Return how fast pages have come from each source lately, for load reports."""
        return tuple(rate for source in self.fetching.sources for rate in source.rates())[:MAX_SOURCE_RATES]

    def _bytes_to_save(self) -> int:
        """Return how many bytes the next step may copy for one storage."""
        max_bytes = self._pace.max_bytes() if self._scheduler.has_unfinished else _BYTES_WHEN_IDLE
        return max_bytes // len(self._storage)

    def reset(self, *, step_failed: bool) -> None:
        """Follow a reset of the prefix cache.

        Args:
            step_failed: what storage holds stays valid; otherwise the weights have changed.
        """
        if step_failed:
            self.steps.failed()
        self.departures.reset()
        self.arrivals.cancel()  # before calls that wait for a step are made: it may still read a reserved page
        self.steps.reset()
        for saver in self._savers:
            saver.reset()
        for tier in self._storage:
            tier.reset(keeps_content=step_failed)

    def close(self) -> None:
        """End the threads; what is not written yet is lost."""
        for tier in self._storage:
            tier.close()
        self.inbox.close()

    # --- what happens in the engine -----------------------------------------------------------------------------

    def step_scheduled(self, output: SchedulerOutput) -> None:
        if not output.is_empty:
            self._count_copies(output)
            self.steps.launched(output)
        if output.admitted:
            self.fetching.started(output.admitted)

    def step_finished(self, output: SchedulerOutput, updated: Iterable[Sequence], times: StepTimes) -> None:
        if output.num_tokens:
            self._pace.step_finished(times.total)
        self.steps.finished(output)

    def _count_copies(self, output: SchedulerOutput) -> None:
        """Count what a step copies from and to the host pools."""
        sizes, blocks = [kind.num_bytes for kind in self._memory.kinds], output.block_copies
        for direction, of_blocks, copies in (
            ("in", blocks.swap_in, [pool.swap_in for pool in output.copies]),
            ("out", blocks.swap_out, [pool.swap_out for pool in output.copies]),
        ):
            num_bytes = sum(len(pairs) * size for pairs, size in zip(copies, sizes, strict=False))
            self.meter.copied(direction, len(of_blocks) * self._info.block_size, num_bytes)

    def request_left(self, group: SequenceGroup, rejection: OverloadedError | None) -> None:
        self.fetching.started([group])
        for saver in self._savers if rejection is None else ():
            for sequence in group.sequences:
                saver.add(self.chain(sequence.token_ids, sequence.cache_key), group.request.retention)
