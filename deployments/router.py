"""PrefixRouter: the request router that Ray Serve calls for each request to the engines.

Serve runs it in each ingress process, on the handle of the engine deployment. It reads a request's block hashes from
the call's keyword argument ``block_hashes``, and the replicas that have just failed the request from ``avoid``. Serve
pickles this module by value, so its globals are copies: state that the process shares is in cluster_view.py and
ingress_metrics.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments.observability.ingress_metrics import ROUTING_DECISION_SECONDS, ROUTING_DECISIONS, ingress_recorder
from deployments.routing.cluster_view import cluster_view
from deployments.routing.options import RoutingOptions
from engine.request import EngineRequest

__all__ = ["PrefixRouter"]


class PrefixRouter(RequestRouter):
    """Chooses the replica whose queue and uncached tokens cost the least time (deployments/routing/cost.py)."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Set the ``RoutingOptions``, which Serve passes from the deployment's request_router_kwargs."""
        self.view = cluster_view(self._deployment_id.name)
        self.view.routing.options = RoutingOptions(**kwargs)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the candidates, best first, each as a rank of its own; Serve tries the ranks in order."""
        started = perf_counter()
        if pending_request is not None:
            # When all replicas are full Serve calls again; without a backoff that is a busy loop.
            pending_request.routing_context.should_backoff = True
        call = _Call.read(pending_request)
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        decision = self.view.choose(list(replicas), call.block_hashes, call.num_tokens, call.avoid, call.request_id)
        if call.num_tokens:
            ingress_recorder().increment(ROUTING_DECISIONS, outcome=decision.outcome)
            ingress_recorder().observe(ROUTING_DECISION_SECONDS, perf_counter() - started)
        return [[replicas[name]] for name in decision.order]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Choose a replica for this request, and record the choice before the next request is routed.

        Serve's own version matches requests to replicas by an id that all handle calls of one HTTP request share. Of
        several concurrent calls (a list of prompts) all but one would wait forever.
        """
        async with aclosing(self._choose_replicas_with_backoff(pending_request)) as ranks:
            attempt = 0
            async for candidates in ranks:
                replica = await self._select_from_candidate_replicas(candidates, attempt)
                if replica is not None:
                    self._record_choice(pending_request, replica.replica_id)
                    return replica
                attempt += 1
        raise AssertionError("the ranks never end")

    def _record_choice(self, pending_request: PendingRequest, replica_id: ReplicaID) -> None:
        call = _Call.read(pending_request)
        if call.request_id:
            self.view.dispatch(call.request_id, replica_id.unique_id, call.block_hashes, call.num_tokens)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Remove a dead replica at once."""
        super().on_replica_actor_died(replica_id)
        self._replicas_changed()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Update the set of replicas and their metadata."""
        super().update_replicas(replicas)
        self._replicas_changed()

    def _replicas_changed(self) -> None:
        self.view.set_replicas(
            {replica_id.unique_id: replica.replica_metadata for replica_id, replica in self.curr_replicas.items()}
        )


@dataclass(frozen=True, slots=True)
class _Call:
    """What routing needs of a handle's call; a call that is not for tokens has no id and no tokens."""

    request_id: str = ""
    num_tokens: int = 0
    block_hashes: Sequence[int] = ()
    avoid: Sequence[str] = ()

    @classmethod
    def read(cls, pending_request: PendingRequest | None) -> _Call:
        """Read the arguments of ``EngineReplica.generate``."""
        request = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if pending_request is None or not isinstance(request, EngineRequest):
            return cls()
        options = pending_request.kwargs
        return cls(
            request.request_id, request.num_tokens, options.get("block_hashes") or (), options.get("avoid") or ()
        )
