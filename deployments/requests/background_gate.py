"""BackgroundGate: when requests of the lowest priority, those of batches, may run, and on which replicas.

On a replica that serves nothing else they take up to three quarters of the slots of its batch. Beside other requests
they may only use what those do not feel:

- as many decode as lengthen a step to at most ``max_slowdown`` of what it takes without them, by the replica's own
  measure of its steps (StepCosts). Those in excess are paused: aborted in the engine, and sent again later with the
  tokens that they have.
- one that starts adds its prompt to a step. If that takes longer than the slowdown allows, the next one waits until the
  longer steps are at most one in ``_STEPS_PER_START``: fewer than the one in 100 that a 99th percentile is about. Where
  the prompts of others make more steps as long as that anyway, prompts may take half of the allowed time instead.
- they leave a quarter of the KV blocks free.

The requests of this ingress are known at once, those of the others once a second (``num_elsewhere``). It holds no
connection and knows neither batches nor HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, log

from deployments.routing.cluster_view import ClusterView
from deployments.transport.request_channel.dispatch import Dispatch
from engine.observability.load import EngineLoad

__all__ = ["BACKGROUND_PRIORITY", "MAX_SLOWDOWN", "BackgroundGate"]

BACKGROUND_PRIORITY = -(2**63)  # no request can have a lower one

MAX_SLOWDOWN = 1.1
_STEPS_PER_START = 200
_MIN_FREE_BLOCKS = 0.25
_HOLD_S = 1.0  # a replica counts as used by others for so long after their last request has ended
_HALF_LIFE_S = 2.0  # of the prompts of others
_SIMILAR = 1.25  # times the mean prompt of others: a step that is as long as theirs


class _Replica:
    """What runs at one replica."""

    def __init__(self) -> None:
        self.running: dict[Dispatch, None] = {}  # of the background, the one that was sent first first
        self.used_until = -inf  # by other requests
        self.next_start = -inf  # beside them
        self._num_prompts = self._num_tokens = 0.0  # of other requests, decayed to ...
        self._decayed_at = -inf

    def add_prompt(self, num_tokens: int, now: float) -> None:
        """Count the prompt of another request; ``num_tokens`` are not cached."""
        self._decay(now)
        self._num_prompts += 1
        self._num_tokens += num_tokens

    def prompts(self, now: float) -> tuple[float, float]:
        """Return the mean tokens of the prompts of other requests, and how many tokens of them come in a second."""
        self._decay(now)
        mean = self._num_tokens / self._num_prompts if self._num_prompts else 0.0
        return mean, self._num_tokens * log(2) / _HALF_LIFE_S

    def _decay(self, now: float) -> None:
        factor = 0.5 ** ((now - self._decayed_at) / _HALF_LIFE_S)
        self._num_prompts, self._num_tokens = factor * self._num_prompts, factor * self._num_tokens
        self._decayed_at = now


class BackgroundGate:
    """Counts the background requests of one ingress.

    Args:
        view: the replicas' loads.
        max_per_replica: background requests at one replica.
        clock: returns seconds of the event loop.
        max_slowdown: how many times longer a step with other requests may become, at least 1.

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
        self._slack = max_slowdown - 1
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
            if prefill_s > self._slack * step_s:
                replica.next_start = self._clock() + self._interval_s(replica, dispatch, step_s, prefill_s)

    def other_sent(self, dispatch: Dispatch) -> None:
        """Count another request of this ingress that was sent."""
        if (replica := self._replicas.get(dispatch.replica)) is None:
            known = self._view.replicas
            self._replicas = {name: one for name, one in self._replicas.items() if one.running or name in known}
            self._replicas[dispatch.replica] = replica = _Replica()
        replica.add_prompt(dispatch.num_uncached_tokens, self._clock())

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
        return min(self._max_per_replica, int(self._slack * step_s / added_s)) if added_s > 0 else 0

    def _num_used(self, replica: _Replica, num_others: int) -> int:
        """Return the number of other requests at a replica, of all ingresses; 0 if there have been none for a while."""
        number = num_others + -(-self.num_elsewhere // max(1, len(self._view.replicas)))
        now = self._clock()
        if number:
            replica.used_until = now + _HOLD_S
        return max(number, int(now < replica.used_until))

    def _interval_s(self, replica: _Replica, dispatch: Dispatch, step_s: float, prefill_s: float) -> float:
        """Return the seconds until the next background request may start after one with a long prompt."""
        rare_s = _STEPS_PER_START * max(step_s, prefill_s / 2)
        mean, tokens_per_s = replica.prompts(self._clock())
        token_s, share = prefill_s / dispatch.num_uncached_tokens, self._slack / 2
        is_similar = dispatch.num_uncached_tokens <= _SIMILAR * mean and token_s * tokens_per_s >= share
        return min(rare_s, prefill_s / share) if share and is_similar else rare_s

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
