"""RecentlyRouted: the last routed requests of an ingress process, for its web page.

A request is listed when it is sent to a replica. If that replica returns it and another one gets it, the new entry
replaces the old one. It takes no lock: the caller holds one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import get_args

from deployments.routing.policy import Decision
from deployments.transport.request_channel.dispatch import Dispatch
from engine.kv.events import StorageName

__all__ = ["RecentlyRouted", "RoutedRequest"]

LENGTH = 50
_STORAGE = get_args(StorageName)  # sources; replicas have longer names


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """One routed request; counts are in tokens, seconds as in cost.py. It pickles."""

    time: float  # Unix seconds
    replica: str
    outcome: str  # as Decision.outcome
    prompt_tokens: int
    predicted_tokens: int  # predicted to be cached on the replica
    best_tokens: int  # the most predicted to be cached on any replica
    queue_s: float  # until the replica begins with it
    prefill_s: float  # of what is not cached
    others_s: float  # what that prefill costs other requests
    decode_s: float  # the answer's steps, as seconds before a first token
    next_s: float | None  # the sum of these on the next best replica; None: there is none
    source: str = (
        ""  # from where the replica fetches a part of the prompt: storage, or another replica; empty: it does not
    )
    fetched_tokens: int = 0  # that it fetches
    fetch_s: float = 0.0  # how long that takes; only what exceeds queue_s is a part of the cost
    predicted_s: float | None = None  # until its first token: queue, fetch and prefill; None: no rate is measured yet
    measured_s: float | None = None  # until its first token; None: it has not ended, or has none

    @property
    def source_kind(self) -> str:
        """The label of metrics: disk, shared or peer."""
        return self.source if self.source in _STORAGE else "peer"

    def num_fetched_of(self, num_cached_tokens: int) -> int:
        """Return how many of the tokens that an engine found in its memory it must have fetched as predicted."""
        return max(0, min(self.fetched_tokens, num_cached_tokens - self.predicted_tokens))


class RecentlyRouted:
    """The last ``LENGTH`` routed requests of one process.

    Args:
        clock: returns Unix seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._routed: deque[RoutedRequest] = deque(maxlen=LENGTH)

    def add(self, dispatch: Dispatch, decision: Decision, block_size: int, *, knows_rates: bool = True) -> None:
        """Add an entry: a dispatch is sent to its replica.

        Args:
            dispatch: refers to its entry afterwards. The entry does not refer to it, so that no prompt is kept here.
            decision: on which the choice of the replica was based.
            block_size: tokens per block.
            knows_rates: whether a prefill rate of a replica is known; else the costs are not seconds.
        """
        if isinstance(returned := dispatch.routed, RoutedRequest) and returned in self._routed:
            self._routed.remove(returned)
        routed = RoutedRequest(
            self._clock(),
            dispatch.replica,
            decision.outcome,
            dispatch.request.num_tokens,
            decision.num_cached_blocks * block_size,
            decision.max_cached_blocks * block_size,
            queue_s=round(decision.cost.queue_s, 4),
            prefill_s=round(decision.cost.prefill_s, 4),
            others_s=round(decision.cost.others_s, 4),
            decode_s=round(decision.cost.decode_s, 4),
            next_s=None if decision.next_cost_s is None else round(decision.next_cost_s, 4),
            predicted_s=round(decision.cost.first_token_s, 4) if knows_rates else None,
        )
        if (fetch := decision.fetch) is not None:
            routed = replace(
                routed,
                source=fetch.source_name,
                fetched_tokens=fetch.num_fetched * block_size,
                fetch_s=round(fetch.seconds, 4),
            )
        dispatch.routed = routed
        self._routed.append(routed)

    def ended(self, dispatch: Dispatch) -> RoutedRequest | None:
        """Add the measured time, if it has a token, to the entry of a dispatch that has ended; return the entry.

        The dispatch refers to the new entry afterwards. None: it has none.
        """
        if not isinstance(routed := dispatch.routed, RoutedRequest) or dispatch.first_token is None:
            return routed if isinstance(routed, RoutedRequest) else None
        measured_s = round(max(0.0, dispatch.first_token - dispatch.sent_at), 4)
        dispatch.routed = ended = replace(routed, measured_s=measured_s)
        if routed in self._routed:
            self._routed[self._routed.index(routed)] = ended
        return ended

    def requests(self) -> list[RoutedRequest]:
        """Return the last routed requests, the latest last."""
        return list(self._routed)
