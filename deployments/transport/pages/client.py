"""PageClient: reads the pages of a prompt's beginning from another replica, into the host pages that wait for them.

It is a PrefixSource of the engine. The engine's thread starts a fetch and goes on; a thread of the client receives the
pages. Whatever goes wrong ends the fetch with a reason, and the engine computes what is missing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Final

from deployments.transport.pages.messages import BUSY, EVICTED, MISSING, PageMessageError
from deployments.transport.pages.peers import PageRefusalError, Peers
from deployments.transport.pages.pull import ChecksumError, PullCancelledError, Pulled, pull
from deployments.transport.pages.rates import PeerRates
from deployments.transport.pages.transfer_log import TransferLog
from deployments.transport.pages.wire import PeerGoneError, PeerStalledError, Wire
from engine.errors import ConfigError
from engine.kv.tiers.source import ArrivalSink, WantedPrefix
from engine.observability.load import SourceRate
from engine.request import KVSource

__all__ = ["PageClient"]

logger = logging.getLogger("ray.serve")

MAX_FETCHES: Final = 32  # at a time; a further prompt is computed
FLOOR_S: Final = 2.0  # least deadline: the source may be in a long step
TIMEOUT_FACTOR: Final = 4.0  # times longer than expected that the bytes may take
UNMEASURED_BYTES_PER_S: Final = 1e8


class PageClient:
    """Fetches pages from other replicas.

    Args:
        page_format: everything that must be equal for pages to be exchanged, by name.
        bytes_per_token: of pages.
        block_size: tokens per block.

    Attributes:
        name: of this source, in metrics.
        peer_rates: how fast pages have come from each peer.
        log: what has come lately, and what comes now.
    """

    name = "peer"

    def __init__(self, page_format: Mapping[str, str], bytes_per_token: float, block_size: int) -> None:
        self.peer_rates = PeerRates()
        self.log = TransferLog(block_size)
        self._bytes_per_token = bytes_per_token
        self._peers = Peers(page_format)
        self._threads = ThreadPoolExecutor(MAX_FETCHES, thread_name_prefix="page-client")
        self._fetches: set[_Fetch] = set()

    # --- PrefixSource: the engine's thread ----------------------------------------------------------------------------

    def may_help(self, source: KVSource | None) -> bool:
        """Whether the request names a source that can be asked now."""
        return source is not None and len(self._fetches) < MAX_FETCHES and self._peers.is_worth_trying(source)

    def has(self, wanted: WantedPrefix, index: int, kind: int) -> bool:
        """Whether the router expects the request's source to have a block; if it does, with pages of every kind."""
        return wanted.source is not None and index < wanted.source.num_tokens // wanted.chain.block_size

    def seconds(self, num_tokens: int) -> float | None:
        """Return None: peers differ, and the router has compared the one that it named."""
        return None

    def rates(self) -> tuple[SourceRate, ...]:
        """Return the rates of the peers that were used last."""
        return self.peer_rates.latest()

    def fetch(self, wanted: WantedPrefix, sink: ArrivalSink) -> None:
        """Start to receive the blocks that the sink has pages for."""
        assert wanted.source is not None
        fetch = _Fetch(wanted, sink, wanted.source, self._peers)
        self._fetches.add(fetch)
        try:
            self._threads.submit(self._run, fetch)
        except RuntimeError:  # the process can start no thread
            self._fetches.discard(fetch)
            sink.finished("io")

    def close(self) -> None:
        """End every fetch, and all connections. No further fetch may start."""
        for fetch in list(self._fetches):
            fetch.cut()
        self._threads.shutdown()
        self._peers.close()

    # --- the client's threads -----------------------------------------------------------------------------------------

    def _run(self, fetch: _Fetch) -> None:
        """Run a fetch, and say how it has ended."""
        error: str | None = "io"
        ended = self.log.began(fetch.source.endpoint, fetch.pulled)
        try:
            error = fetch.run(monotonic() + self._timeout_s(fetch))
            self._record(fetch)
        except Exception:
            logger.exception("pages could not be fetched")
        finally:
            ended()
            self._fetches.discard(fetch)
            fetch.sink.finished(error)

    def _timeout_s(self, fetch: _Fetch) -> float:
        """Return how long a fetch may take: a floor, and a multiple of the time that it takes at the peer's rate."""
        rate = self.peer_rates.get(fetch.source.endpoint)
        bytes_per_s = (rate.bytes_per_s if rate else 0) or UNMEASURED_BYTES_PER_S
        num_tokens = fetch.sink.num_blocks * fetch.wanted.chain.block_size
        return FLOOR_S + TIMEOUT_FACTOR * num_tokens * self._bytes_per_token / bytes_per_s

    def _record(self, fetch: _Fetch) -> None:
        pulled = fetch.pulled
        if pulled.num_blocks:
            num_tokens = pulled.num_blocks * fetch.wanted.chain.block_size
            endpoint = fetch.source.endpoint
            self.peer_rates.record(endpoint, num_tokens, pulled.num_bytes, pulled.latency_s, pulled.transfer_s)


class _Fetch:
    """One transfer into a sink. One thread runs it; any thread may cut it off."""

    def __init__(self, wanted: WantedPrefix, sink: ArrivalSink, source: KVSource, peers: Peers) -> None:
        self.wanted = wanted
        self.sink = sink
        self.source = source
        self.pulled = Pulled()
        self._peers = peers
        self._wire: Wire | None = None
        self._is_cut = False

    def cut(self) -> None:
        """End the transfer soon."""
        self._is_cut = True
        if (wire := self._wire) is not None:
            wire.cut()

    def run(self, deadline: float) -> str | None:
        """Receive the blocks; return why not all of them, one of ``FETCH_ERRORS``, or None."""
        try:
            self._pull(deadline)
        except PageRefusalError as error:  # it says what differs, and the server is not asked again
            logger.warning("%s refuses to send KV pages: %s", self.source.endpoint, error)
            return "refused"
        except PullCancelledError:
            return "cancelled"
        except (ChecksumError, PageMessageError, ConfigError, OSError) as error:
            if self._is_cut:
                return "cancelled"
            self._peers.note_failure(self.source)
            logger.warning("KV pages from %s did not come: %s", self.source.endpoint, error)
            return _ERRORS.get(type(error), "io")
        return _REASONS.get(self.pulled.reason, "gone") if self.pulled.reason else None

    def _pull(self, deadline: float) -> None:
        wire = self._peers.take_idle(self.source)
        is_new = wire is None
        if wire is None:
            wire = self._peers.connect(self.source, deadline)
        self._wire = wire
        try:
            if self._is_cut:  # before it had a wire to cut
                raise PeerGoneError("the client is closed")
            if is_new:
                self._peers.say_hello(self.source, wire, deadline)
            pull(wire, self.wanted, self.sink, deadline, self.pulled)
        except BaseException:
            wire.close()
            raise
        self._peers.give_back(self.source, wire)


_ERRORS: Final[dict[type[Exception], str]] = {ChecksumError: "checksum", PeerStalledError: "late"}
_REASONS: Final = {BUSY: "late", EVICTED: "gone", MISSING: "gone"}
