"""RecentlyRouted: the last routed requests of an ingress process, for its web page.

A decision is kept until its request is sent to a replica, which need not be the first choice: that one may be full.
If a replica rejects the request and another one gets it, the new entry replaces the old one. It takes no lock:
ClusterView holds one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from deployments.routing.policy import Decision

__all__ = ["RecentlyRouted", "RoutedRequest"]

LENGTH = 50


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """One routed request; counts are in tokens. It pickles."""

    time: float  # Unix seconds
    replica: str
    outcome: str  # as Decision.outcome, for the replica that the request was sent to
    prompt_tokens: int
    predicted_tokens: int  # predicted to be cached on the replica
    best_tokens: int  # the most predicted to be cached on any replica


class RecentlyRouted:
    """The last ``LENGTH`` routed requests of one process.

    Args:
        clock: returns Unix seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._decisions: dict[str, Decision] = {}  # by request id, until the request is sent
        self._sent: dict[str, RoutedRequest] = {}  # by request id, until the request ends
        self._routed: deque[RoutedRequest] = deque(maxlen=LENGTH)

    def record_decision(self, request_id: str, decision: Decision) -> None:
        """Keep the latest decision for a request."""
        self._decisions[request_id] = decision

    def record_dispatch(
        self, request_id: str, replica: str, num_tokens: int, num_cached_blocks: int, block_size: int
    ) -> None:
        """Add an entry: a request is sent to a replica.

        Args:
            request_id: of the request.
            replica: its name.
            num_tokens: of the prompt.
            num_cached_blocks: leading blocks of the prompt that this replica is predicted to have cached.
            block_size: tokens per block.
        """
        if (decision := self._decisions.pop(request_id, None)) is None:
            return
        most = max(num_cached_blocks, decision.max_cached_blocks)
        is_other = decision.outcome == "hit" and num_cached_blocks < most  # the first choice was full
        outcome = "balanced" if is_other else decision.outcome
        rejected = self._sent.get(request_id)
        if rejected is not None and rejected in self._routed:
            self._routed.remove(rejected)
        routed = RoutedRequest(
            self._clock(), replica, outcome, num_tokens, num_cached_blocks * block_size, most * block_size
        )
        self._routed.append(routed)
        self._sent[request_id] = routed

    def ended(self, request_id: str) -> None:
        """Remove the decision for a request that has ended, sent or not; its entry stays."""
        self._decisions.pop(request_id, None)
        self._sent.pop(request_id, None)

    def requests(self) -> list[RoutedRequest]:
        """Return the last routed requests, the latest last."""
        return list(self._routed)
