"""PrefixRouter: the request router that Ray Serve calls for each request to the engines.

Serve runs it in each ingress process, on the handle of the engine deployment. It reads a request's block hashes from
the call's keyword argument ``block_hashes``, and the replicas that have just failed the request from ``avoid``. Serve
pickles this module by value, so its globals are copies: state that the process shares is in cluster_view.py and
ingress_metrics.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from time import perf_counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments.observability.ingress_metrics import ROUTING_DECISION_SECONDS, ROUTING_DECISIONS, ingress_recorder
from deployments.routing.cluster_view import cluster_view
from deployments.routing.options import RoutingOptions

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
        hashes, num_tokens, avoid = _prompt(pending_request)
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        decision = self.view.choose(list(replicas), hashes, num_tokens, avoid, _request_id(pending_request))
        if num_tokens:  # else the call is not for tokens
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
        if request_id := _request_id(pending_request):  # else the call is not for tokens
            hashes, num_tokens, _ = _prompt(pending_request)
            self.view.dispatch(request_id, replica_id.unique_id, hashes, num_tokens)

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


def _prompt(pending_request: PendingRequest | None) -> tuple[Sequence[int], int, Sequence[str]]:
    """Return a request's block hashes, its number of tokens and the replicas to avoid; none for other calls."""
    if pending_request is None:
        return (), 0, ()
    kwargs, args = pending_request.kwargs, pending_request.args
    num_tokens = args[0].num_tokens if args and hasattr(args[0], "num_tokens") else 0
    return kwargs.get("block_hashes") or (), num_tokens, kwargs.get("avoid") or ()


def _request_id(pending_request: PendingRequest | None) -> str:
    """Return the id of a request for tokens; none for other calls."""
    args = () if pending_request is None else pending_request.args
    return str(getattr(args[0], "request_id", "")) if args else ""
