"""History: past counters of GET /live; rates are computed from their differences, over the web page's times."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["History"]

RATE_OVER_S = 2.5  # the difference of one poll is noisy
HITS_OVER_S = 30.0
_KEPT_S = 60.0


@dataclass(frozen=True, slots=True)
class _Sample:
    time: float
    generated: int
    queried: int
    hit: int


class History:
    """The last minute of each replica's counters."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[_Sample]] = {}
        self._time = float("-inf")

    def add(self, state: dict[str, Any]) -> bool:
        """Add an answer of GET /live; return False if it is not newer than the last one, as of another ingress."""
        now = float(state["time"])
        if now <= self._time:
            return False
        self._time = now
        replicas = {str(replica["name"]): replica for replica in state["replicas"]}
        self._samples = {name: samples for name, samples in self._samples.items() if name in replicas}
        for name, replica in replicas.items():
            samples = self._samples.setdefault(name, deque())
            counters = (int(replica[key]) for key in ("generated_tokens", "query_tokens", "hit_tokens"))
            samples.append(_Sample(now, *counters))
            while samples[0].time < now - _KEPT_S:
                samples.popleft()
        return True

    def rate(self, names: Iterable[str]) -> float | None:
        """Return the tokens a second that these replicas generate; None before the second answer."""
        rates = [
            (last.generated - first.generated) / (last.time - first.time)
            for first, last in self._changes(names, RATE_OVER_S)
        ]
        return sum(rates) if rates else None

    def hit_rate(self, names: Iterable[str]) -> float | None:
        """Return the share of prompt tokens that was cached; None without prompts."""
        changes = list(self._changes(names, HITS_OVER_S))
        queried = sum(last.queried - first.queried for first, last in changes)
        return sum(last.hit - first.hit for first, last in changes) / queried if queried else None

    def _changes(self, names: Iterable[str], seconds: float) -> Iterable[tuple[_Sample, _Sample]]:
        """Yield the first and last sample of the last seconds, at least the last two samples."""
        for name in names:
            samples = self._samples.get(name)
            if samples is None or len(samples) < 2:
                continue
            last = samples[-1]
            recent = [sample for sample in samples if sample.time >= last.time - seconds]
            yield (recent[0] if len(recent) > 1 else samples[-2]), last
