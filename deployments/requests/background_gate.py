"""BackgroundGate: when requests of the lowest priority, those of batches, may run, and on which replicas.

On a replica that serves nothing else they take up to three quarters of the slots of its batch. Beside other requests:

- as many decode as lengthen a step so little that the 99th percentile of the times between others' tokens, which the
  ingress follows (GapTail), grows to at most ``max_slowdown`` of what it is without them, by the replica's own measure
  of its steps (StepCosts); and so little that a step is at most half as long again. Until the percentile is known, the
  step itself takes its place. Those in excess are paused: aborted in the engine, and sent again later with the tokens
  that they have.
- one that starts adds its prompt to a step. Prompts that lengthen a step as little come one after the other. Longer
  ones take a small share of the time, if a step with one is no longer than that percentile; else they come every
  ``_STEPS_PER_START`` steps, which is fewer than the one in 100 that the percentile is about.
- they leave a quarter of the KV blocks free.

The requests of this ingress are known at once, those of the others once a second (``num_elsewhere``). It holds no
connection and knows neither batches nor HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from deployments.requests.gap_tail import GapTail
from deployments.routing.cluster_view import ClusterView
from deployments.transport.request_channel.dispatch import Dispatch
from engine.observability.load import EngineLoad

__all__ = ["BACKGROUND_PRIORITY", "MAX_SLOWDOWN", "BackgroundGate"]

BACKGROUND_PRIORITY = -(2**63)  # no request can have a lower one

MAX_SLOWDOWN = 1.1
_STEPS_PER_START = 200
_MIN_FREE_BLOCKS = 0.25
_HOLD_S = 1.0  # a replica counts as used by others for so long after their last request has ended
_MOST_ADDED = 0.5  # to a step, of its length, unless ``max_slowdown`` allows more
_PROMPT_SHARE = 0.25  # of what ``max_slowdown`` adds: 0.025 of the time


class _Replica:
    """What runs at one replica."""

    def __init__(self) -> None:
        self.running: dict[Dispatch, None] = {}  # of the background, the one that was sent first first
        self.used_until = -inf  # by other requests
        self.next_start = -inf  # beside them
        self.gaps = GapTail()  # of other requests


class BackgroundGate:
    """Counts the background requests of one ingress.

    Args:
        view: the replicas' loads.
        max_per_replica: background requests at one replica.
        clock: returns seconds of the event loop.
        max_slowdown: how many times longer the 99th percentile of the times between others' tokens may become, from 1.

    Attributes:
        num_elsewhere: unfinished other requests at the other ingresses.
    """

    def __init__(
        self,
        view: ClusterView,
        max_per_replica: int,
        clock: Callable[[], float],
        max_slowdown: float = MAX_SLOWDOWN,
    ) -> None:
        self.num_elsewhere = 0
        self._slack = 1 - 1 / max_slowdown  # of gaps that are measured with background requests
        self._most_added = max(_MOST_ADDED, max_slowdown - 1)
        self._prompt_share = _PROMPT_SHARE * (max_slowdown - 1)
        self._view = view
        self._max_per_replica = max_per_replica
        self._clock = clock
        self._replicas: dict[str, _Replica] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no background request runs."""
        return not any(replica.running for replica in self._replicas.values())

    def sent(self, dispatch: Dispatch, num_others: int) -> None:
        """Count a background request that was sent.

        Args:
            dispatch: the request, whose replica is known.
            num_others: other requests of this ingress at the same replica.
        """
        replica = self._replicas.setdefault(dispatch.replica, _Replica())
        replica.running[dispatch] = None
        report = self._report(dispatch.replica)
        if report is not None and (num_used := self._num_used(replica, num_others)):
            step_s, prefill_s = self._step_s(report, num_used), self._prefill_s(report, dispatch)
            replica.next_start = self._clock() + self._interval_s(replica, step_s, prefill_s)

    def gaps_of(self, name: str) -> GapTail:
        """Return what follows the times between the tokens of other requests at a replica."""
        if (replica := self._replicas.get(name)) is None:
            known = self._view.replicas
            self._replicas = {name: one for name, one in self._replicas.items() if one.running or name in known}
            self._replicas[name] = replica = _Replica()
        return replica.gaps

    def ended(self, dispatch: Dispatch) -> None:
        """Forget a background request, in whatever state."""
        replica = self._replicas.get(dispatch.replica)
        if replica is not None:
            replica.running.pop(dispatch, None)
            if not replica.running and dispatch.replica not in self._view.replicas:
                del self._replicas[dispatch.replica]

    def num_running(self, replica: str) -> int:
        """Return the number of background requests at a replica."""
        return len(self._replicas[replica].running) if replica in self._replicas else 0

    def has_room(self, name: str, num_others: int) -> bool:
        """Whether a replica takes another background request now."""
        replica = self._replicas.setdefault(name, _Replica())
        report = self._report(name)
        if report is not None and report.num_blocks and report.num_free_blocks < _MIN_FREE_BLOCKS * report.num_blocks:
            return False
        if self._num_used(replica, num_others) and self._clock() < replica.next_start:
            return False
        return len(replica.running) < self._limit(name, replica, num_others)

    def excess(self, name: str, num_others: int) -> list[Dispatch]:
        """Return the background requests to pause at a replica, those that were sent last."""
        replica = self._replicas.get(name)
        if replica is None or not replica.running:
            return []
        limit = self._limit(name, replica, num_others)
        return list(replica.running)[limit:]

    def _limit(self, name: str, replica: _Replica, num_others: int) -> int:
        """Return how many background requests a replica may have."""
        num_used = self._num_used(replica, num_others)
        if not num_used:
            return self._max_per_replica
        report = self._report(name)
        if report is None:
            return 0
        costs = report.step_costs
        context = report.num_decoding_tokens / report.num_decoding if report.num_decoding else 0.0
        added_s = costs.sequence_s + costs.kv_token_s * context
        step_s = self._step_s(report, num_used)
        return min(self._max_per_replica, int(self._slack_s(replica, step_s) / added_s)) if added_s > 0 else 0

    def _num_used(self, replica: _Replica, num_others: int) -> int:
        """Return the number of other requests at a replica, of all ingresses; 0 if there have been none for a while."""
        number = num_others + -(-self.num_elsewhere // max(1, len(self._view.replicas)))
        now = self._clock()
        if number:
            replica.used_until = now + _HOLD_S
        return max(number, int(now < replica.used_until))

    def _interval_s(self, replica: _Replica, step_s: float, prefill_s: float) -> float:
        """Return the seconds until another background request may start after one with this prompt."""
        slack_s = self._slack_s(replica, step_s)
        if prefill_s <= slack_s:
            return step_s * prefill_s / slack_s if slack_s else 0.0
        if step_s + prefill_s <= replica.gaps.seconds and self._prompt_share:
            return prefill_s / self._prompt_share
        return _STEPS_PER_START * max(step_s, prefill_s / 2)

    def _slack_s(self, replica: _Replica, step_s: float) -> float:
        """Return the seconds by which background requests may lengthen a step of other requests."""
        return min(self._slack * max(step_s, replica.gaps.seconds), self._most_added * step_s)

    def _report(self, name: str) -> EngineLoad | None:
        with self._view.routing.lock:
            replica = self._view.routing.table.by_name.get(name)
            return None if replica is None else replica.load.report

    @staticmethod
    def _step_s(report: EngineLoad, num_sequences: int) -> float:
        """Return the seconds of a step with other requests only."""
        context = report.num_decoding_tokens / report.num_decoding if report.num_decoding else 0.0
        return report.step_costs.seconds(0, num_sequences, int(num_sequences * context))

    @staticmethod
    def _prefill_s(report: EngineLoad, dispatch: Dispatch) -> float:
        return report.step_costs.prefill_token_s * dispatch.num_uncached_tokens
