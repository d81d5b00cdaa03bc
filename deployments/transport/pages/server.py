"""PageServer: sends pages of one engine to the replicas that know its secret.

    accepting thread      takes connections, a bounded number
    a thread for each     Hello, then pulls: lease the pages from the engine, send them, release them

The engine's thread only lends; it never waits for a socket. A connection that misbehaves is closed and counted.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
from collections.abc import Mapping
from time import monotonic
from typing import Final

from deployments.transport.kv_events.sockets import address_of, url_host
from deployments.transport.pages.address import PageAddress
from deployments.transport.pages.conversation import Conversation, SecretError, Terms
from deployments.transport.pages.lender import PageLender
from deployments.transport.pages.messages import PageMessageError
from deployments.transport.pages.wire import PeerStalledError, Wire
from engine.errors import ConfigError
from engine.observability.metrics import PEER_REJECTIONS, MetricSink

__all__ = ["PageServer"]

logger = logging.getLogger("ray.serve")

MAX_CONNECTIONS: Final = 64
MAX_PULLS: Final = 4  # that are answered at a time; others wait, and then get the error that the server is busy
BACKLOG: Final = 64
ACCEPT_PAUSE_S: Final = 0.1
CLOSE_TIMEOUT_S: Final = 5.0
DRAIN_S: Final = 2.0
DRAIN_POLL_S: Final = 0.02


class PageServer:
    """Serves the pages of one engine.

    Args:
        lender: lends the engine's pages.
        host: the node's own address, to which the socket binds.
        max_tokens: of a prompt.
        metrics: records bytes and ended connections.

    Attributes:
        address: for the replica's metadata.

    Raises:
        ConfigError: ``host`` is not an address of this node.
    """

    def __init__(self, lender: PageLender, host: str, *, max_tokens: int, metrics: MetricSink) -> None:
        self._lender = lender
        self._metrics = metrics
        self._socket, endpoint = _listen(host)
        self.address = PageAddress(endpoint, secrets.token_hex())
        self._max_tokens = max_tokens
        self._closing = threading.Event()
        self._has_logged = False
        self._conversations: dict[Conversation, threading.Thread] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def open(self, page_format: Mapping[str, str]) -> None:
        """Answer clients from now on; until then their connections wait.

        Args:
            page_format: everything that must be equal for pages to be exchanged, by name.
        """
        terms = Terms(
            secret=self.address.secret,
            page_format=dict(page_format),
            max_tokens=self._max_tokens,
            pulls=threading.Semaphore(MAX_PULLS),
        )
        self._thread = threading.Thread(target=self._accept, args=(terms,), name="page-server", daemon=True)
        self._thread.start()

    @property
    def num_connections(self) -> int:
        """Connections that are open."""
        with self._lock:
            return len(self._conversations)

    def drain(self, quiet_s: float = 0.0, within_s: float = DRAIN_S) -> None:
        """Wait for the transfers that run, and for those that begin soon. The engine must still lend.

        Args:
            quiet_s: return when nothing was sent for so long.
            within_s: return after so long in any case.
        """
        sent_at = monotonic()
        deadline = sent_at + within_s
        while (now := monotonic()) < deadline:
            if self.is_sending:
                sent_at = now
            elif now - sent_at >= quiet_s:
                return
            self._closing.wait(DRAIN_POLL_S)

    @property
    def is_sending(self) -> bool:
        """Whether pages are lent for any client."""
        with self._lock:
            return any(conversation.is_sending for conversation in self._conversations)

    def close(self) -> None:
        """End every connection, and the threads."""
        self._closing.set()
        with contextlib.suppress(OSError):  # it was closed before
            self._socket.shutdown(socket.SHUT_RDWR)  # so that accept() returns
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
        self._socket.close()
        with self._lock:
            conversations = dict(self._conversations)
        for conversation in conversations:
            conversation.cut()
        for thread in conversations.values():
            thread.join(CLOSE_TIMEOUT_S)

    # --- the accepting thread -----------------------------------------------------------------------------------------

    def _accept(self, terms: Terms) -> None:
        while not self._closing.is_set():
            try:
                connected, _ = self._socket.accept()
            except OSError as error:
                if not self._closing.is_set():
                    self._report("sockets", error)
                    self._closing.wait(ACCEPT_PAUSE_S)  # the process may have no descriptor left for now
                continue
            self._start(Wire(connected), terms)

    def _start(self, wire: Wire, terms: Terms) -> None:
        """Give a connection a thread of its own, if there are not too many."""
        conversation = Conversation(wire, terms, self._lender)
        thread = threading.Thread(target=self._converse, args=(wire, conversation), name="page-connection", daemon=True)
        with self._lock:
            has_room = len(self._conversations) < MAX_CONNECTIONS and not self._closing.is_set()
            if has_room:
                self._conversations[conversation] = thread
        if has_room:
            thread.start()
        else:
            self._report("connections", f"there are {MAX_CONNECTIONS} connections")
            wire.close()

    # --- the thread of a connection -----------------------------------------------------------------------------------

    def _converse(self, wire: Wire, conversation: Conversation) -> None:
        try:
            if refusal := conversation.run():
                self._report("refused", refusal)  # first: the client's log and this metric then agree at any time
                conversation.refuse(refusal)
        except SecretError as error:
            self._report("secret", error)
        except PageMessageError as error:
            self._report("malformed", error)
        except PeerStalledError as error:
            self._report("stalled", error)
        except OSError:
            pass  # a client ends its connections when it likes
        except Exception:
            logger.exception("a connection of the page server has failed")
        finally:
            wire.close()
            with self._lock:
                del self._conversations[conversation]

    def _report(self, reason: str, problem: object) -> None:
        self._metrics.increment(PEER_REJECTIONS, reason=reason)
        if not self._has_logged:  # once: a hostile peer must not fill the log
            self._has_logged = True
            logger.warning("a connection of the page server was closed: %s", problem)


def _listen(host: str) -> tuple[socket.socket, str]:
    """Return a socket that listens on a free port of ``host``, and its endpoint."""
    address = address_of(host)
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.bind((str(address), 0))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(f"cannot listen on host={host!r}: {error}; give an address of this node") from None
    return listening, f"tcp://{url_host(address)}:{listening.getsockname()[1]}"
