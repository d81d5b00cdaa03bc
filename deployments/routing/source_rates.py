"""SourceRates: how fast each replica has fetched KV from storage and from each peer, as its load reports say.

A pair that has not been measured lately has the mean of the replica's other peers, and that of the cluster if it has
none. What is still unknown has no rate, and nothing is fetched, except that a request now and then tries a peer to find
it out (``may_guess``).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Final, NamedTuple, get_args

from engine.kv.events import StorageName
from engine.observability.load import SourceRate

__all__ = ["FetchRate", "SourceRates"]

_STORAGE: Final = get_args(StorageName)  # sources that are no peers
_FIRST_GUESS_S = 10.0  # between two guesses
_LONGEST_GUESS_S = 600.0
_EXPIRES_S = 300.0  # after this long a rate counts as unknown: a network recovers, and only a transfer shows that


class FetchRate(NamedTuple):
    """The time that a fetch takes: ``latency_s + seconds_per_token * tokens``."""

    latency_s: float
    seconds_per_token: float


class SourceRates:
    """The rates of all pairs of a replica and a source; times are monotonic seconds."""

    def __init__(self) -> None:
        self._measured: dict[str, dict[str, tuple[SourceRate, float]]] = {}  # replica -> source -> (rate, when)
        self._rates: dict[str, dict[str, FetchRate]] = {}  # the same, as get() returns them
        self._means: dict[str, FetchRate] = {}  # of a replica's peers
        self._sums = FetchRate(0.0, 0.0)  # over the means, so that a report of one replica looks at no other
        self._cluster_mean: FetchRate | None = None
        self._next_guess, self._guess_s = -inf, _FIRST_GUESS_S

    def report(self, replica: str, rates: Iterable[SourceRate], now: float) -> None:
        """Take in the latest rates of a replica. One that has not changed was not measured since."""
        measured = self._measured.setdefault(replica, {})
        changed = False
        for rate in rates:
            known = measured.get(rate.source)
            if rate.tokens_per_s > 0 and (known is None or known[0] != rate):
                measured[rate.source] = rate, now
                changed = True
                self._guess_s = _FIRST_GUESS_S
        expired = [source for source, (_, since) in measured.items() if since < now - _EXPIRES_S]
        if expired:
            # The reports repeat it: it stays known as one that is not new.
            changed |= any(source in self._rates.get(replica, ()) for source in expired)
        if changed:
            self._update(replica, now)

    def remove(self, replica: str) -> None:
        """Forget a replica."""
        self._measured.pop(replica, None)
        self._rates.pop(replica, None)
        self._set_mean(replica, [])

    def get(self, replica: str, source: str) -> FetchRate | None:
        """Return the rate at which a replica fetches from a source; None: unknown.

        Args:
            replica: the name of the replica.
            source: the name of a storage, or where a peer serves its pages.
        """
        rate = self._rates[replica].get(source) if replica in self._rates else None
        if rate is not None or source in _STORAGE:
            return rate
        return self._means.get(replica, self._cluster_mean)

    def may_guess(self, now: float) -> bool:
        """Return whether a fetch may be based on a guess, because no rate of any peer is known."""
        return self._cluster_mean is None and now >= self._next_guess

    def guessed(self, now: float) -> None:
        """Record that a fetch was based on a guess. If it shows no rate, the next one waits twice as long."""
        self._next_guess = now + self._guess_s
        self._guess_s = min(2 * self._guess_s, _LONGEST_GUESS_S)

    def _update(self, replica: str, now: float) -> None:
        self._rates[replica] = rates = {
            source: FetchRate(rate.latency_s, 1 / rate.tokens_per_s)
            for source, (rate, since) in self._measured[replica].items()
            if since >= now - _EXPIRES_S
        }
        self._set_mean(replica, [rate for source, rate in rates.items() if source not in _STORAGE])

    def _set_mean(self, replica: str, peers: list[FetchRate]) -> None:
        if (old := self._means.pop(replica, None)) is not None:
            self._sums = _sum([self._sums, FetchRate(-old.latency_s, -old.seconds_per_token)])
        if peers:
            mean = self._means[replica] = _mean(_sum(peers), len(peers))
            self._sums = _sum([self._sums, mean])
        self._cluster_mean = _mean(self._sums, len(self._means)) if self._means else None


def _sum(rates: list[FetchRate]) -> FetchRate:
    return FetchRate(sum(rate.latency_s for rate in rates), sum(rate.seconds_per_token for rate in rates))


def _mean(total: FetchRate, number: int) -> FetchRate:
    return FetchRate(total.latency_s / number, total.seconds_per_token / number)
