"""RoutingLog: where the last requests of an ingress process went, and why.

A decision is noted when it is made and told when the request is sent to a replica: the one that was wanted may be full.
A replica may still refuse it, and then it is sent to another one, which takes the first one's place in the log. It
costs an entry in each of two dictionaries and one in a bounded queue. It knows no locks: who writes to it from several
threads brings one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from deployments.routing.policy import Decision

__all__ = ["RoutedRequest", "RoutingLog"]

LENGTH = 50


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """One request's way, in tokens. It pickles."""

    time: float  # Unix seconds
    replica: str
    outcome: str  # as Decision's, with the replica in mind that it was sent to
    prompt_tokens: int
    predicted_tokens: int  # that the replica was thought to have cached
    best_tokens: int  # that any replica was thought to have cached


class RoutingLog:
    """The last ``LENGTH`` requests of one process.

    Args:
        clock: Unix seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._decisions: dict[str, Decision] = {}  # by request id, until it is sent to a replica
        self._sent: dict[str, RoutedRequest] = {}  # by request id, until it has ended
        self._routed: deque[RoutedRequest] = deque(maxlen=LENGTH)

    def decided(self, request_id: str, decision: Decision) -> None:
        """Replicas were ranked for a request, perhaps once more."""
        self._decisions[request_id] = decision

    def placed(self, request_id: str, replica: str, num_tokens: int, held_blocks: int, block_size: int) -> None:
        """A request is sent to a replica that is thought to hold ``held_blocks`` of its prompt."""
        if (decision := self._decisions.pop(request_id, None)) is None:
            return
        is_other = decision.outcome == "hit" and held_blocks < decision.best_blocks  # the one that was wanted was full
        outcome = "balanced" if is_other else decision.outcome
        held, best = held_blocks * block_size, max(held_blocks, decision.best_blocks) * block_size
        refused = self._sent.get(request_id)
        if refused is not None and refused in self._routed:
            self._routed.remove(refused)
        routed = RoutedRequest(self._clock(), replica, outcome, num_tokens, held, best)
        self._routed.append(routed)
        self._sent[request_id] = routed

    def ended(self, request_id: str) -> None:
        """A request has ended, perhaps before it was sent anywhere."""
        self._decisions.pop(request_id, None)
        self._sent.pop(request_id, None)

    def recent(self) -> list[RoutedRequest]:
        """Return the requests, the latest last."""
        return list(self._routed)
