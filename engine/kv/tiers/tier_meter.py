"""TierMeter: measures what moves between memory and other places, and how fast it comes.

The rate of a source is that of the time a request waited for it, not only of its reads: a router compares it with the
time that computing takes. Old measurements are forgotten: a disk that was busy may be idle again.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from engine.observability.metrics import (
    KV_COPIED_TOKENS,
    TIER_BLOCKS,
    TIER_BYTES,
    TIER_CAPACITY,
    TIER_FAILURES,
    TIER_FETCH_SECONDS,
    TIER_HITS,
    TIER_LEASES,
    TIER_TOKENS,
    MetricSink,
    NullSink,
)

__all__ = ["Rate", "TierMeter"]

_KEPT = 0.75  # of the weight of earlier measurements after another one of the same size
_FORGOTTEN_AFTER_S = 60.0


class Rate:
    """Tokens and bytes a second, a moving average weighted by size.

    Args:
        clock: monotonic seconds.

    Attributes:
        num_transfers: that were measured.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._measured_at: float | None = None
        self._tokens = self._bytes = self._seconds = 0.0
        self.num_transfers = 0

    def record(self, num_tokens: int, num_bytes: int, seconds: float) -> None:
        """Take in one transfer."""
        if num_tokens <= 0 or seconds <= 0:
            return
        self._tokens = _KEPT * self._tokens + num_tokens
        self._bytes = _KEPT * self._bytes + num_bytes
        self._seconds = _KEPT * self._seconds + seconds
        self._measured_at = self._clock()
        self.num_transfers += 1

    @property
    def tokens_per_s(self) -> float:
        """0: nothing was measured yet."""
        return self._tokens / self._seconds if self._seconds else 0.0

    @property
    def bytes_per_s(self) -> float:
        """0: nothing was measured yet."""
        return self._bytes / self._seconds if self._seconds else 0.0

    def expected_seconds(self, num_tokens: int) -> float | None:
        """Return the seconds for a transfer; None if nothing was measured lately."""
        if self._measured_at is None or self._clock() - self._measured_at > _FORGOTTEN_AFTER_S:
            return None
        return num_tokens / self.tokens_per_s


class TierMeter:
    """Counts what is fetched and saved, for metrics and for the prices of a router. The engine's thread calls it.

    Args:
        sink: stores the values of metrics.

    Attributes:
        rates: of each source, by its name.
    """

    def __init__(self, sink: MetricSink | None = None) -> None:
        self._sink = sink or NullSink()
        self.rates: dict[str, Rate] = {}

    def rate(self, name: str) -> Rate:
        """Return the rate at which pages come from a source."""
        return self.rates.setdefault(name, Rate())

    def fetched(self, source: str, *, num_tokens: int, num_bytes: int, seconds: float, is_late: bool) -> None:
        """Count what a request has got from a source; if it came too late, perhaps nothing, which is a rate too."""
        self.rate(source).record(max(num_tokens, 1) if is_late else num_tokens, num_bytes, seconds)
        self._sink.observe(TIER_FETCH_SECONDS, seconds, tier=source)
        self._moved(source, "in", num_tokens, num_bytes)
        if num_tokens:
            self._sink.increment(TIER_HITS, num_tokens, tier=source)

    def saved(self, target: str, *, num_tokens: int, num_bytes: int) -> None:
        """Count what was written to a disk or read by another engine."""
        self._moved(target, "out", num_tokens, num_bytes)

    def copied_ahead(self, reason: str, source: str, *, num_tokens: int, num_bytes: int) -> None:
        """Count what was read from another engine before a request needed it."""
        self._moved(source, "in", num_tokens, num_bytes)
        if num_tokens:
            self._sink.increment(KV_COPIED_TOKENS, num_tokens, reason=reason)

    def failed(self, name: str, reason: str) -> None:
        """Count a fetch, or a save, that failed."""
        self._sink.increment(TIER_FAILURES, tier=name, reason=reason)

    def holds(self, name: str, num_blocks: int) -> None:
        """Report how many blocks a tier holds."""
        self._sink.set(TIER_BLOCKS, num_blocks, tier=name)

    def has_room_for(self, name: str, num_blocks: int) -> None:
        """Report how many blocks a tier can hold."""
        self._sink.set(TIER_CAPACITY, num_blocks, tier=name)

    def lends(self, num_leases: int) -> None:
        """Report how many leases there are."""
        self._sink.set(TIER_LEASES, num_leases)

    def copied(self, direction: str, num_tokens: int, num_bytes: int) -> None:
        """Count what a step copies from host memory (in) or to it (out)."""
        self._moved("host", direction, num_tokens, num_bytes)

    def _moved(self, name: str, direction: str, num_tokens: int, num_bytes: int) -> None:
        if num_tokens:
            self._sink.increment(TIER_TOKENS, num_tokens, tier=name, direction=direction)
        if num_bytes:
            self._sink.increment(TIER_BYTES, num_bytes, tier=name, direction=direction)
