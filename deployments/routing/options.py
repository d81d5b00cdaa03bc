"""RoutingOptions: the parameters of the routing policy."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RoutingOptions"]


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """What the router assumes; all else of its cost is measured."""

    # Seconds after a first token that one second before it outweighs: about the ratio of the usual objectives for a
    # whole answer and for its first token.
    first_token_weight: float = 15.0
    assume_s: float = 30.0  # a dispatched prompt counts as cached for this long, until an event confirms it
    stale_after_s: float = 2.0  # a load report expires after this
    transit_s: float = 0.02  # a report does not include requests dispatched less than this before it arrived
