"""Replication: neighbours copy the KV of answers while these grow, so that a killed replica costs little of it.

An ingress knows the tokens of an answer and which replicas hold its blocks. At an interval of tokens it orders a
neighbour to read what it lacks from the replica that computes the answer. The blocks of the prompt are copied with the
first ones, unless the neighbour holds them already. This class decides when; the view decides which neighbour.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import inf

from deployments.routing.cluster_view import ClusterView
from deployments.transport.request_channel.dispatch import Dispatch
from engine.kv.tiers.copies import CopyOrder

__all__ = ["Replication"]


class Replication:
    """Decides when the KV of running answers is copied.

    Args:
        view: knows what each replica holds.
        every: tokens of an answer's KV that may be lost, about; None: nothing is copied.
        send: sends a replica the order to copy a text.
    """

    def __init__(self, view: ClusterView, every: int | None, send: Callable[[str, CopyOrder], None]) -> None:
        self._view = view
        self._every = every
        self._send = send

    def first_at(self, dispatch: Dispatch) -> float:
        """Return the length of an answer at which it is to be copied first; infinity: never.

        An answer that is short for certain is not copied, nor is one whose tokens come at its end.
        """
        params = dispatch.request.params
        if self._every is None or params.num_sequences > 1 or not dispatch.streams_tokens:
            return inf
        return inf if params.max_tokens is not None and params.max_tokens < self._every else 1

    def copy(
        self, dispatch: Dispatch, hashes: Sequence[int], output: Sequence[int], candidates: Collection[str]
    ) -> float:
        """Let a neighbour copy what it lacks of an answer, if that is much; return at which length to call this again.

        Args:
            dispatch: the answer, at the replica that computes it.
            hashes: of the full blocks of its prompt and its tokens.
            output: its tokens so far.
            candidates: replicas that take orders.
        """
        assert self._every is not None
        target = self._view.copy_target(dispatch, hashes, candidates)
        if target is None:
            return len(output) + self._every
        request = dispatch.request
        num_tokens = len(request.prompt_token_ids) + len(output)
        if (missing := num_tokens - target.num_held_tokens) < self._every:
            return len(output) + self._every - missing
        token_ids = [*request.prompt_token_ids, *output]
        self._send(target.replica, CopyOrder(token_ids, request.cache_key, target.source, "replication"))
        return len(output) + self._every
