"""PrefixRouter: reports the engine replicas to their ingress process. Ray Serve runs it on the engines' handle.

Serve pushes the set of replicas with their metadata to it, and to the view that the process shares. Requests for tokens
do not pass here: requests/dispatcher.py sends them over the channel, with this router's options. Calls through the
handle are for control, such as metrics, and any replica answers them. Serve pickles this module by value, so its
globals are copies: state that the process shares is in cluster_view.py.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments.routing.cluster_view import cluster_view
from deployments.routing.options import RoutingOptions

__all__ = ["PrefixRouter"]


class PrefixRouter(RequestRouter):
    """Keeps the view's set of replicas up to date."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Set the ``RoutingOptions``, which Serve passes from the deployment's request_router_kwargs."""
        self.view = cluster_view(self._deployment_id.name)
        self.view.routing.table.options = RoutingOptions(**kwargs)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the candidates as one rank. Serve takes the one with the shortest queue."""
        if pending_request is not None:
            # When all replicas are full Serve calls again; without a backoff that is a busy loop.
            pending_request.routing_context.should_backoff = True
        return [candidate_replicas]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Choose a replica for this request.

        Serve's own version matches requests to replicas by an id that all handle calls of one HTTP request share, so
        only one of several concurrent calls would ever get a replica.
        """
        async with aclosing(self._choose_replicas_with_backoff(pending_request)) as ranks:
            attempt = 0
            async for candidates in ranks:
                replica = await self._select_from_candidate_replicas(candidates, attempt)
                if replica is not None:
                    return replica
                attempt += 1
        raise AssertionError("the ranks never end")

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
