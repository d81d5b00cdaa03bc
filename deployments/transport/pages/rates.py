"""PeerRates: how fast pages have come from each peer, measured by every transfer.

A transfer takes the peer's latency, from the request to its first page, and then the time of the bytes at its rate.
Both are exponential moving averages. A short transfer says nothing of the rate, since its bytes come at once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from itertools import islice
from typing import Final

from msgspec import Struct

from engine.observability.load import MAX_SOURCE_RATES, SourceRate

__all__ = ["PeerRate", "PeerRates"]

WEIGHT: Final = 0.3  # of the latest transfer in an average
MIN_RATED_BYTES: Final = 2**16  # of a transfer that says something of the rate
MAX_PEERS: Final = 256  # the least recently used ones are forgotten


class PeerRate(Struct, frozen=True, array_like=True):
    """The averages of one peer.

    Attributes:
        latency_s: seconds from a request to its first page: the connection, the source's current step, its copies.
        tokens_per_s: after that; 0: not measured yet.
        bytes_per_s: likewise.
        num_transfers: that were measured.
    """

    latency_s: float
    tokens_per_s: float
    bytes_per_s: float
    num_transfers: int


class PeerRates:
    """The rate of each peer, by endpoint. Any thread may call its methods."""

    def __init__(self) -> None:
        self._rates: OrderedDict[str, PeerRate] = OrderedDict()
        self._latest: tuple[SourceRate, ...] = ()
        self._lock = threading.Lock()

    def record(self, endpoint: str, num_tokens: int, num_bytes: int, latency_s: float, transfer_s: float) -> None:
        """Take a transfer into account.

        Args:
            endpoint: of the peer.
            num_tokens: whose pages have come.
            num_bytes: of the pages.
            latency_s: seconds from the request to the first page.
            transfer_s: seconds from there to the last one.
        """
        with self._lock:
            old = self._rates.pop(endpoint, None) or PeerRate(latency_s, 0.0, 0.0, 0)
            tokens_per_s, bytes_per_s = old.tokens_per_s, old.bytes_per_s
            if num_bytes >= MIN_RATED_BYTES and transfer_s > 0:
                tokens_per_s = _average(tokens_per_s or num_tokens / transfer_s, num_tokens / transfer_s)
                bytes_per_s = _average(bytes_per_s or num_bytes / transfer_s, num_bytes / transfer_s)
            latency_s = _average(old.latency_s, latency_s)
            self._rates[endpoint] = PeerRate(latency_s, tokens_per_s, bytes_per_s, old.num_transfers + 1)
            if len(self._rates) > MAX_PEERS:
                self._rates.popitem(last=False)
            newest = islice(reversed(self._rates.items()), MAX_SOURCE_RATES)
            self._latest = tuple(
                SourceRate(name, rate.latency_s, rate.tokens_per_s, rate.num_transfers) for name, rate in newest
            )

    def get(self, endpoint: str) -> PeerRate | None:
        """Return the rate of a peer; None: it was never used."""
        with self._lock:
            return self._rates.get(endpoint)

    def latest(self) -> tuple[SourceRate, ...]:
        """Return the peers that were used last as a load report has them. It costs nothing."""
        return self._latest


def _average(old: float, new: float) -> float:
    return old + WEIGHT * (new - old)
