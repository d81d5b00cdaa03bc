"""PrefixRouter: binds the routing policy to Ray Serve.

Serve runs it inside each ingress process, on the handle that leads to the engines. A request's block hashes come as
the keyword argument ``block_hashes`` of the handle's call, replicas that just failed it as ``avoid``. Serve pickles
this module by value, so that its globals are copies: what the process shares lives in routing.py and telemetry.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from time import perf_counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments.routing import rank, routing_state
from deployments.telemetry import ROUTING_DECISION_SECONDS, ROUTING_DECISIONS, ingress_recorder

__all__ = ["PrefixRouter"]


class PrefixRouter(RequestRouter):
    """Sends the same prefix to the same replica, under a load bound."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Take ``load_bound``, ``load_slack`` and ``max_index_blocks`` from the deployment's request_router_kwargs."""
        self.load_bound: float = kwargs["load_bound"]
        self.load_slack: int = kwargs["load_slack"]
        self.state = routing_state(self._deployment_id.name)
        self.state.index.max_blocks = kwargs["max_index_blocks"]

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Rank the candidates; Serve tries the ranks in order, and never gets an empty list."""
        started = perf_counter()
        kwargs: dict[str, Any] = {}
        if pending_request is not None:
            kwargs = pending_request.kwargs
            # Else Serve calls again at once when all are full, and spins.
            pending_request.routing_context.should_backoff = True
        hashes: Sequence[int] = kwargs.get("block_hashes") or ()
        avoid: Sequence[str] = kwargs.get("avoid") or ()
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        names = [name for name in replicas if name not in avoid] or list(replicas)
        loads = {name: self._load(replicas[name].replica_id) for name in names}
        depths = self.state.index.longest_prefix(hashes)
        turn = next(self.state.turns)
        ranking = rank(loads, depths, hashes, bound=self.load_bound, slack=self.load_slack, turn=turn)
        ingress_recorder().increment(ROUTING_DECISIONS, outcome="retry" if avoid else ranking.outcome)
        ingress_recorder().observe(ROUTING_DECISION_SECONDS, perf_counter() - started)
        return [[replicas[name]] for name in ranking.order]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Choose for this very request.

        Serve's own version matches requests to replicas by an id which all handle calls of one HTTP request share, so
        that all but one of several concurrent calls (a list of prompts) would wait for ever.
        """
        async with aclosing(self._choose_replicas_with_backoff(pending_request)) as ranks:
            attempt = 0
            async for candidates in ranks:
                replica = await self._select_from_candidate_replicas(candidates, attempt)
                if replica is not None:
                    return replica
                attempt += 1
        raise AssertionError("the ranks never end")

    def _load(self, replica_id: ReplicaID) -> int:
        """Return the requests on a replica: ours, or all that it last reported, whichever is more."""
        reported = self.replica_queue_len_cache.get(replica_id) or 0
        return max(self.state.in_flight[replica_id.unique_id], reported)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Count a request in as soon as it leaves, so that a burst does not see an idle replica."""
        super().on_send_request(replica_id)
        self.state.sent(replica_id.unique_id)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        """Assume that the replica will hold the prompt's blocks."""
        self.state.stored(replica_id.unique_id, pending_request.kwargs.get("block_hashes") or ())

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count a request out."""
        self.state.completed(replica_id.unique_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a dead replica at once."""
        super().on_replica_actor_died(replica_id)
        self._replicas_changed()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget the replicas that are gone."""
        super().update_replicas(replicas)
        self._replicas_changed()

    def _replicas_changed(self) -> None:
        self.state.set_replicas([replica_id.unique_id for replica_id in self.curr_replicas])
