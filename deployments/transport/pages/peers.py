"""Peers: the connections of a client to page servers, and which servers are not worth trying.

A connection is kept open after a transfer, for the next one. A server that has refused this client's pages is not
asked again; one that has failed is left alone for a while, which doubles with each failure.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Final
from urllib.parse import urlsplit

from deployments.transport.kv_events.sockets import check_endpoint
from deployments.transport.pages.messages import (
    MAX_REPLY_BYTES,
    VERSION,
    Hello,
    PageMessageError,
    Refusal,
    Welcome,
    decode_from_server,
)
from deployments.transport.pages.wire import SHORTEST_S, Wire
from engine.errors import PagodaError
from engine.request import KVSource

__all__ = ["PageRefusalError", "Peers"]

CONNECT_S: Final = 1.0  # a peer in the cluster's network answers within milliseconds
MAX_PEERS: Final = 256  # the least recently used ones are forgotten
MAX_IDLE: Final = 2  # connections of one peer
FIRST_PAUSE_S: Final = 1.0
MAX_DOUBLINGS: Final = 6


class PageRefusalError(PagodaError):
    """A server's pages are not like this client's; the message names what differs."""


@dataclass(slots=True)
class _Peer:
    """What is known of one server, which is named by its secret: another process may get its port."""

    idle: list[Wire] = field(default_factory=list)
    is_refused: bool = False
    num_failures: int = 0  # since the last success
    retry_at: float = 0.0


class Peers:
    """Opens connections to page servers. Any thread may call its methods.

    Args:
        page_format: everything that must be equal for pages to be exchanged, by name.
        clock: monotonic seconds, for the pauses.
    """

    def __init__(self, page_format: Mapping[str, str], clock: Callable[[], float] = monotonic) -> None:
        self._page_format = dict(page_format)
        self._clock = clock
        self._peers: OrderedDict[KVSource, _Peer] = OrderedDict()
        self._lock = threading.Lock()
        self._is_closed = False

    def is_worth_trying(self, source: KVSource) -> bool:
        """Whether the server has neither refused nor just failed."""
        with self._lock:
            peer = self._peers.get(_key(source))
            return peer is None or not (peer.is_refused or peer.retry_at > self._clock())

    def take_idle(self, source: KVSource) -> Wire | None:
        """Return a connection that is open, if there is one."""
        with self._lock:
            idle = self._peer(source).idle
            while idle:
                wire = idle.pop()
                if wire.is_quiet:
                    return wire
                wire.close()
        return None

    def connect(self, source: KVSource, deadline: float) -> Wire:
        """Return a new connection, before the Hello.

        Raises:
            ConfigError: the endpoint is not ``tcp://<address>:<port>``.
            OSError: the server does not listen.
        """
        check_endpoint(source.endpoint)
        parts = urlsplit(source.endpoint)
        timeout_s = max(SHORTEST_S, min(CONNECT_S, deadline - monotonic()))
        return Wire(socket.create_connection((parts.hostname, parts.port), timeout=timeout_s))

    def say_hello(self, source: KVSource, wire: Wire, deadline: float) -> None:
        """Open a conversation.

        Raises:
            PageRefusalError: the server's pages are not alike. It is not worth trying again.
            PageMessageError: it is no page server of this version.
            OSError: as Wire.
        """
        wire.send(Hello(VERSION, source.secret, self._page_format), deadline)
        answer = decode_from_server(wire.receive(MAX_REPLY_BYTES, deadline))
        if isinstance(answer, Refusal):
            with self._lock:
                self._peer(source).is_refused = True
            raise PageRefusalError(answer.reason)
        if not isinstance(answer, Welcome):
            raise PageMessageError(f"{type(answer).__name__} does not answer a Hello")

    def give_back(self, source: KVSource, wire: Wire) -> None:
        """Keep a connection whose last answer has ended, for the next transfer."""
        with self._lock:
            peer = self._peer(source)
            peer.num_failures = 0
            if not self._is_closed and len(peer.idle) < MAX_IDLE:
                peer.idle.append(wire)
                return
        wire.close()

    def note_failure(self, source: KVSource) -> None:
        """Leave a server alone for a while."""
        with self._lock:
            peer = self._peer(source)
            peer.retry_at = self._clock() + FIRST_PAUSE_S * 2 ** min(peer.num_failures, MAX_DOUBLINGS)
            peer.num_failures += 1

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            self._is_closed = True
            for peer in self._peers.values():
                _close_idle(peer)

    def _peer(self, source: KVSource) -> _Peer:
        """Return what is known of a server, as the most recently used one."""
        key = _key(source)
        peer = self._peers.pop(key, None) or _Peer()
        self._peers[key] = peer
        if len(self._peers) > MAX_PEERS:
            _close_idle(self._peers.popitem(last=False)[1])
        return peer


def _key(source: KVSource) -> KVSource:
    return KVSource(source.endpoint, source.secret, 0)


def _close_idle(peer: _Peer) -> None:
    while peer.idle:
        with contextlib.suppress(OSError):
            peer.idle.pop().close()
