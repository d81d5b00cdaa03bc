"""ClusterView: the replicas that Serve lists, their caches and loads, and the choice among them.

Serve's router, the thread that receives KV events, and the requests of this process share it. It chooses replicas for
requests and counts each Dispatch in the load of its replica, but it holds no request itself. It knows neither Serve
nor HTTP. Every method may be called from any thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any

from deployments.observability.ingress_metrics import (
    KV_INDEX_BLOCKS,
    REPLICAS,
    ROUTING_BEST_HIT_TOKENS,
    ROUTING_FETCHED_TOKENS,
    ROUTING_MEASURED_TTFT,
    ROUTING_PREDICTED_FETCH_TOKENS,
    ROUTING_PREDICTED_HIT_TOKENS,
    ROUTING_PREDICTED_TTFT,
    ingress_recorder,
)
from deployments.routing.cost import PromptBlocks
from deployments.routing.options import RoutingOptions
from deployments.routing.policy import Decision, RoutingPolicy
from deployments.routing.recently_routed import RecentlyRouted, RoutedRequest
from deployments.routing.source_finder import CopyTarget, Holding, SourceFinder
from deployments.routing.state import RoutingState
from deployments.transport.kv_events.subscriber import KVEventSubscriber
from deployments.transport.replica_metadata import BLOCK_SIZE, ENDPOINT
from deployments.transport.request_channel.dispatch import Dispatch
from engine.request import KVSource

__all__ = ["ClusterView", "cluster_view"]

_DEFAULTS = RoutingOptions()


def _none_is_lost(replica: str) -> bool:
    return False


class ClusterView:
    """The replicas of one deployment.

    Args:
        options: the parameters of the choice.
        clock: returns monotonic seconds; the simulator in benchmarks/routing has its own.

    Attributes:
        routing: the replicas' caches and loads. Its lock protects this object too.
    """

    def __init__(self, options: RoutingOptions = _DEFAULTS, clock: Callable[[], float] | None = None) -> None:
        self.routing = RoutingState(options)
        self._clock = clock or time.monotonic
        self._lock, self._table, self._index = self.routing.lock, self.routing.table, self.routing.index
        self._policy = RoutingPolicy(self._table)
        self._sources = SourceFinder(self.routing)
        self._recorder = ingress_recorder()
        self._recently_routed = RecentlyRouted()
        self._subscriber: KVEventSubscriber | None = None
        self._listed: dict[str, Mapping[str, Any]] = {}  # metadata of the replicas that take requests
        self._observed: dict[str, Mapping[str, Any]] = {}  # of those, and of draining ones that we still need
        self._handing_over: set[str] = set()  # draining ones that have ended our requests and serve their KV
        self._watcher: Callable[[Mapping[str, Mapping[str, Any]]], None] = lambda metadata: None

    # --- the replicas -------------------------------------------------------------------------------------------------

    @property
    def replicas(self) -> frozenset[str]:
        """The replicas that take requests."""
        return frozenset(self._listed)

    def set_replicas(self, metadata: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the set of replicas that take requests: name -> the metadata that the replica reported.

        A replica that is no longer listed but still runs requests of this process stays observed until they end, so
        that a hang is noticed while it drains. One that has handed them over stays while it reports its load, because
        it serves their KV as long as it can. The others are forgotten.
        """
        with self._lock:
            self._listed = dict(metadata)
            for described in metadata.values():
                self.routing.block_size = described.get(BLOCK_SIZE, self.routing.block_size)
            self._update_observed()
            self._watcher(self._listed)

    def watch(self, watcher: Callable[[Mapping[str, Mapping[str, Any]]], None]) -> None:
        """Call ``watcher`` with the replicas that take requests, now and whenever they change, in any thread.

        It replaces the watcher before it.
        """
        with self._lock:
            self._watcher = watcher
            watcher(self._listed)

    def _update_observed(self) -> None:
        draining = {
            name: described
            for name, described in self._observed.items()
            if name not in self._listed and self._is_needed(name)
        }
        self._observed = self._listed | draining
        self.routing.set_replicas(self._observed)
        self._sources.set_replicas(self._observed)
        endpoints = {name: described[ENDPOINT] for name, described in self._observed.items() if ENDPOINT in described}
        if self._subscriber is None and endpoints:
            self._subscriber = KVEventSubscriber(self.routing, self._recorder)
        if self._subscriber is not None:
            self._subscriber.set_endpoints(endpoints)

    def _is_needed(self, draining: str) -> bool:
        """Whether a replica that takes no more requests still runs ours, or serves the KV of those it handed over."""
        replica = self._table.by_name[draining]
        return replica.load.has_dispatches or (draining in self._handing_over and self._clock() <= replica.fresh_until)

    def _forget_ended(self) -> None:
        """Forget the replicas that have handed over their requests and report no more."""
        ended = {name for name in self._handing_over if name not in self._observed or not self._is_needed(name)}
        if ended:
            self._handing_over -= ended
            self._update_observed()

    # --- requests -----------------------------------------------------------------------------------------------------

    def choose(
        self,
        dispatch: Dispatch,
        candidates: Sequence[str],
        takes: Callable[[str], bool] | None = None,
        *,
        is_lost: Callable[[str], bool] = _none_is_lost,
    ) -> Decision | None:
        """Choose a replica for a request, and count the cache hits that are predicted for it.

        Args:
            dispatch: of the request.
            candidates: names of replicas, at least one. A tuple that stays the same is not looked up each time.
            takes: whether a replica takes requests now; None: all do. The best candidate is asked, and only if it does
                not, all others: there may be a thousand.
            is_lost: whether a replica has ended, so that nothing can be fetched from it.

        Returns:
            The choice; None if no candidate takes requests.
        """
        block_size = self.routing.block_size
        decision = self._choose(dispatch, candidates, is_lost)
        if takes is not None and not takes(decision.replica):
            if not (candidates := [name for name in candidates if takes(name)]):
                return None
            decision = self._choose(dispatch, candidates, is_lost)
        for metric, num_blocks in (
            (ROUTING_PREDICTED_HIT_TOKENS, decision.num_cached_blocks),
            (ROUTING_BEST_HIT_TOKENS, decision.max_cached_blocks),
        ):
            if num_blocks:
                self._recorder.increment(metric, num_blocks * block_size)
        if (fetch := decision.fetch) is not None:
            kind = fetch.source_name if fetch.holder is None else "peer"
            self._recorder.increment(ROUTING_PREDICTED_FETCH_TOKENS, fetch.num_fetched * block_size, source=kind)
        return decision

    def _choose(self, dispatch: Dispatch, candidates: Sequence[str], is_lost: Callable[[str], bool]) -> Decision:
        with self._lock:
            if self._handing_over:
                self._forget_ended()
            if not self._table.rows.knows(candidates):  # one may be unlisted already
                self.routing.add_unknown(candidates)
            now = self._clock()
            self._table.sample(now)
            request = dispatch.request
            prompt = PromptBlocks(request.num_tokens, dispatch.block_hashes, self.routing.block_size)
            num_cached_blocks = self.routing.num_cached_blocks(prompt)
            sources = self._sources.find(
                prompt, num_cached_blocks, request, dispatch.avoid, is_lost, dispatch.handed_over_by, now
            )
            return self._policy.choose(
                candidates, prompt, num_cached_blocks, dispatch.avoid, request.params.max_tokens, sources
            )

    def kv_source(self, decision: Decision) -> KVSource | None:
        """Return what a request tells its replica of the peer from which it may fetch KV; None if from none."""
        if decision.fetch is None or (holder := decision.fetch.holder) is None:
            return None
        return KVSource(holder.endpoint, holder.secret, decision.fetch.num_blocks * self.routing.block_size)

    def copy_target(self, dispatch: Dispatch, hashes: Sequence[int], candidates: Collection[str]) -> CopyTarget | None:
        """Return which other replica is to copy the KV of an unfinished answer, if any can.

        Args:
            dispatch: the answer, at the replica that has computed it.
            hashes: of the full blocks of its prompt and its tokens so far.
            candidates: replicas that can be asked.
        """
        with self._lock:
            return self._sources.copy_target(dispatch, hashes, candidates, self.routing.block_size)

    def most_similar(self, hashes: Sequence[int], candidates: Collection[str]) -> Holding | None:
        """Return the candidate that holds the most of a text and serves pages, and how much; None: there is none."""
        with self._lock:
            return self._sources.most_similar(hashes, candidates)

    def source_of(self, hashes: Sequence[int], without: str) -> KVSource | None:
        """Return a replica, not ``without``, from which all these blocks of a text can be read; None: there is none."""
        with self._lock:
            return self._sources.source_of(hashes, without, self.routing.block_size)

    def sent(self, dispatch: Dispatch, decision: Decision) -> None:
        """Add a dispatch, which has just been sent to its replica, to the load there.

        Until events confirm it, the replica is assumed to hold the prompt's blocks.

        Args:
            dispatch: its replica is that of the decision.
            decision: as ``choose`` returned it.
        """
        block_size = self.routing.block_size
        with self._lock:
            now = dispatch.sent_at = self._clock()
            self._recently_routed.add(dispatch, decision, block_size, knows_rates=self._table.knows_rates)
            self._index.expire(now)
            if decision.fetch is not None and decision.fetch.holder is not None and self._table.rates.may_guess(now):
                self._table.rates.guessed(now)
            if dispatch.replica in self._table.by_name:
                num_cached_tokens = decision.num_held_blocks * block_size
                dispatch.num_uncached_tokens = max(1, dispatch.request.num_tokens - num_cached_tokens)
                self._table.sent(dispatch)
                self._table.cluster.sent(num_cached_tokens, dispatch.num_uncached_tokens)
                self.routing.assume(dispatch.replica, dispatch.block_hashes, now)

    def ended(self, dispatch: Dispatch) -> None:
        """Remove a dispatch from the load of its replica: it has ended, for any reason, or was returned."""
        with self._lock:
            if dispatch.is_handed_over:
                self._handing_over.add(dispatch.replica)
            if dispatch.replica in self._table.by_name:
                self._table.ended(dispatch)
            if dispatch.num_tokens:
                self._table.cluster.answered(dispatch.num_tokens)
                if (routed := self._recently_routed.ended(dispatch)) is not None:
                    self._record(routed, dispatch.num_cached_tokens)
            if dispatch.replica in self._observed and dispatch.replica not in self._listed:
                self._update_observed()

    def _record(self, routed: RoutedRequest, num_cached_tokens: int) -> None:
        """Record what came of the predictions for a request."""
        if routed.predicted_s is not None and routed.measured_s is not None:
            self._recorder.observe(ROUTING_PREDICTED_TTFT, routed.predicted_s)
            self._recorder.observe(ROUTING_MEASURED_TTFT, routed.measured_s)
        if routed.source:
            came = routed.num_fetched_of(num_cached_tokens)
            self._recorder.increment(ROUTING_FETCHED_TOKENS, came, source=routed.source_kind)

    def stall_allowance(self, dispatch: Dispatch, stall_timeout_s: float) -> float:
        """Return the seconds until a dispatch without tokens must be checked again; 0: its replica has stalled.

        One that has no replica yet, or whose replica has a queue, is checked again after a quarter of the timeout. So
        is one whose tokens come together at the end, while its replica computes. Otherwise its replica has
        ``stall_timeout_s`` seconds from the dispatch to the first token. It is never more than ``stall_timeout_s``:
        StallWatch relies on that.
        """
        now = self._clock()
        with self._lock:
            is_busy = self._table.is_busy(
                dispatch.replica, now, within_s=stall_timeout_s, needs_queue=dispatch.streams_tokens
            )
        if not dispatch.replica or is_busy:
            return stall_timeout_s / 4
        return max(0.0, dispatch.sent_at + stall_timeout_s - now)

    def queued(self) -> tuple[int, int]:
        """Return (waiting requests, queued prefill tokens) of all replicas, unreported dispatches included."""
        with self._lock:
            return self._table.total_queued(self._clock())

    # --- for metrics and the web page ---------------------------------------------------------------------------------

    def recently_routed(self) -> list[RoutedRequest]:
        """Return the last routed requests of this process, the latest last."""
        with self._lock:
            return self._recently_routed.requests()

    def report_state(self) -> None:
        """Set the gauges."""
        self._recorder.set(REPLICAS, len(self._listed), state="running")
        self._recorder.set(REPLICAS, len(self._observed) - len(self._listed), state="draining")
        self._recorder.set(KV_INDEX_BLOCKS, len(self._index))


@cache
def cluster_view(deployment: str) -> ClusterView:
    """Return this process's view of ``deployment``."""
    return ClusterView()
