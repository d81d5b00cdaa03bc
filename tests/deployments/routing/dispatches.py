"""Dispatches for tests of routing, which need only a prompt's length and hashes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from deployments.routing.cluster_view import ClusterView
from deployments.routing.policy import Decision
from deployments.transport.request_channel.dispatch import Dispatch
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams

__all__ = ["dispatch_of", "send"]


def dispatch_of(
    hashes: Sequence[int],
    num_tokens: int,
    replica: str = "",
    *,
    avoid: Collection[str] = (),
    beam_width: int | None = None,
    max_tokens: int | None = None,
) -> Dispatch:
    """Return a dispatch of a prompt of this many tokens."""
    params = (
        SamplingParams(max_tokens=max_tokens)
        if beam_width is None
        else SamplingParams(temperature=0.0, beam_width=beam_width)
    )
    return Dispatch(EngineRequest("id", [0] * num_tokens, params), hashes, avoid, replica=replica)


def send(view: ClusterView, replica: str, hashes: Sequence[int], num_tokens: int, *, num_cached: int = 0) -> Dispatch:
    """Send a prompt to a replica, whatever the view would choose."""
    dispatch = dispatch_of(hashes, num_tokens, replica)
    view.sent(dispatch, Decision(replica, "hit" if num_cached else "cold", num_cached, num_cached))
    return dispatch
