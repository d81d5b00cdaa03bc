"""ChannelServer: takes the requests of all ingresses to one replica, on its event loop.

    event loop    requests socket -> check -> AsyncEngine.submit(request, reader=the ingress's Connection)
    step thread   AsyncEngine -> Connection.publish -> outputs socket

An ingress that is silent counts as lost: its requests are aborted. A draining server refuses new requests, which their
ingress sends to other replicas, and waits for the others. Those that take too long it hands over: they end, and their
ingress lets another replica continue them while this one still serves their KV.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

import zmq

from deployments.transport.hashes import unpack_hashes
from deployments.transport.request_channel.address import ReplicaAddress
from deployments.transport.request_channel.codec import (
    ChannelMessageError,
    copy_order_of,
    decode_from_ingress,
    encode,
    request_of,
)
from deployments.transport.request_channel.connection import Connection, RequestCount
from deployments.transport.request_channel.errors import HandedOverError, ReplicaDrainingError, ReplicaFullError
from deployments.transport.request_channel.messages import Abort, Copy, FromIngress, Hello, Status, Submit
from deployments.transport.request_channel.numbering import Arrivals
from deployments.transport.request_channel.sockets import Socket, SocketReader, bind_router
from engine.async_engine import AsyncEngine
from engine.errors import EngineDeadError, RequestError
from engine.kv.tiers.copies import CopyOrder
from engine.request import EngineRequest
from engine.structured_outputs.grammar import Grammar

__all__ = ["ChannelServer"]

logger = logging.getLogger("ray.serve")

MAX_SILENT_TICKS = 5  # an ingress that sends nothing for this many ticks is lost
MAX_INGRESSES = 4096
MAX_KEPT_BYTES = 64 * 2**20  # of messages that a live ingress does not receive
DRAIN_POLL_S = 0.05
FLUSH_TIMEOUT_S = 2.0  # for the acknowledgements of the last outputs


def _never() -> float:
    return inf


@dataclass(slots=True, eq=False)
class _Ingress:
    """One ingress, as the event loop knows it."""

    number: int
    connection: Connection
    arrivals: Arrivals = field(default_factory=Arrivals)
    compiling: dict[int, asyncio.Task[None]] = field(default_factory=dict)  # stream -> compiles its grammar
    num_silent_ticks: int = 0

    def key(self, stream: int) -> str:
        """The id of a stream's request inside the engine."""
        return f"{self.number}.{stream}"


class ChannelServer:
    """Serves the requests of all ingresses. Make it on the event loop that is to receive them.

    Args:
        engine: runs the requests.
        host: the node's own address, to which the sockets bind.
        max_requests: unfinished requests, at most; further ones are refused.
        on_hashes: receives the block hashes of each request that is queued.
        on_copy: receives the texts whose KV is to be read from another replica.
        tick_s: how often silent ingresses are looked for.

    Raises:
        ConfigError: ``host`` is not an address of this node.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        host: str,
        *,
        max_requests: int,
        on_hashes: Callable[[Sequence[int]], None] = lambda hashes: None,
        on_copy: Callable[[CopyOrder], None] = lambda order: None,
        tick_s: float = 1.0,
    ) -> None:
        self._engine = engine
        self._max_requests = max_requests
        self._on_hashes = on_hashes
        self._on_copy = on_copy
        self._tick_s = tick_s
        self._count = RequestCount()
        self._ingresses: dict[bytes, _Ingress] = {}
        self._num_ingresses = 0  # so far
        self._closed: deque[bytes] = deque(maxlen=MAX_INGRESSES)  # identities, which an ingress uses once
        self._is_draining = False
        self._has_logged_drop = False
        self._context: zmq.Context[Socket] = zmq.Context()
        requests, requests_endpoint = bind_router(self._context, host)
        self._outputs, outputs_endpoint = bind_router(self._context, host)  # of the step thread
        self.address = ReplicaAddress(requests_endpoint, outputs_endpoint, secrets.token_hex())
        self._loop = asyncio.get_running_loop()
        self._reader = SocketReader(requests, self._receive)
        self._timer = self._loop.call_later(tick_s, self._tick)

    @property
    def num_requests(self) -> int:
        """Number of unfinished requests."""
        return self._count.num_unfinished + sum(len(ingress.compiling) for ingress in self._ingresses.values())

    async def drain(self, hand_over_in_s: Callable[[], float] = _never) -> int:
        """Refuse new requests; return when all others have ended and their outputs have arrived.

        Args:
            hand_over_in_s: seconds until those that are unfinished are handed over; it is asked again and again.

        Returns:
            Unfinished requests that were handed over.
        """
        self._is_draining = True
        num_handed_over = 0
        while self.num_requests:
            if hand_over_in_s() <= 0:
                num_handed_over = max(num_handed_over, self.num_requests)
                self._engine.end_all(lambda: HandedOverError("the replica shuts down before the request has ended"))
            await asyncio.sleep(DRAIN_POLL_S)
        deadline = self._loop.time() + FLUSH_TIMEOUT_S
        while self._loop.time() < deadline and not all(map(_has_everything, self._ingresses.values())):
            await asyncio.sleep(DRAIN_POLL_S)
        return num_handed_over

    def close(self) -> None:
        """Close the sockets. The engine must have been shut down."""
        self._timer.cancel()
        for ingress in self._ingresses.values():
            _cancel_compiling(ingress)
        self._reader.close()
        self._outputs.close(0)
        self._context.term()

    # --- messages -------------------------------------------------------------------------------------------------

    def _receive(self, frames: list[bytes]) -> None:
        identity, *messages = frames
        for data in messages:
            try:
                self._on_message(identity, decode_from_ingress(data))
            except ChannelMessageError as error:
                self._drop(str(error))

    def _on_message(self, identity: bytes, message: FromIngress) -> None:
        if isinstance(message, Hello):
            self._on_hello(identity, message)
        elif (ingress := self._ingresses.get(identity)) is not None:
            ingress.num_silent_ticks = 0
            if not isinstance(message, Copy):
                self._on_numbered(identity, ingress, message)
            elif not self._is_draining:
                self._on_copy(copy_order_of(message))
        # else it will say hello, and learn that it must start again

    def _drop(self, reason: str) -> None:
        if not self._has_logged_drop:  # once: a hostile peer must not fill the log
            self._has_logged_drop = True
            logger.warning("a message of the channel is dropped: %s", reason)

    def _on_hello(self, identity: bytes, hello: Hello) -> None:
        if not hmac.compare_digest(hello.secret.encode(errors="replace"), self.address.secret.encode()):
            self._drop("a Hello has a wrong secret")
            return
        ingress = self._ingresses.get(identity) or self._new_ingress(identity, hello)
        if ingress is None:
            self._send(identity, Status(0, 0, False, "this replica has closed the connection"))
            return
        ingress.num_silent_ticks = 0
        self._acknowledge(identity, ingress, hello)
        self._send_status(identity, ingress, resend=hello.sent > ingress.arrivals.received)

    def _new_ingress(self, identity: bytes, hello: Hello) -> _Ingress | None:
        """Return a new connection; None if the Hello continues one that was closed, or there are too many.

        The first Hello of a closed connection may still have been on the way.
        """
        is_old = identity in self._closed or hello.received or hello.acknowledged
        if is_old or len(self._ingresses) >= MAX_INGRESSES:
            return None
        self._num_ingresses += 1
        ingress = _Ingress(self._num_ingresses, Connection(self._outputs, identity, self._count))
        self._ingresses[identity] = ingress
        return ingress

    def _acknowledge(self, identity: bytes, ingress: _Ingress, hello: Hello) -> None:
        """Note what the ingress has received, and send what it lacks."""
        connection = ingress.connection
        has_advanced = hello.received > connection.acknowledged
        connection.acknowledged = max(connection.acknowledged, hello.received)
        if connection.num_bytes > MAX_KEPT_BYTES and not has_advanced:
            self._remove(identity, f"it does not receive {connection.num_bytes} bytes")
        elif hello.resend:
            self._engine.call_in_step_thread(partial(connection.resend, hello.received))
        elif connection.has_unsent:
            self._engine.call_in_step_thread(connection.flush)

    def _on_numbered(self, identity: bytes, ingress: _Ingress, message: Submit | Abort) -> None:
        had_gap = ingress.arrivals.has_gap
        if not ingress.arrivals.accept(message.number):
            if ingress.arrivals.has_gap and not had_gap:
                self._send_status(identity, ingress, resend=True)
            return
        if isinstance(message, Abort):
            self._abort(ingress, message.stream)
            return
        try:
            self._submit(ingress, message)
        except EngineDeadError:
            self._send_status(identity, ingress, resend=False)
        except RequestError as error:
            self._refuse(ingress, message.stream, error)
        except Exception as error:  # a bug of ours must not end the other requests
            logger.exception("request %s could not be submitted", ingress.key(message.stream))
            problem = f"the request could not be submitted: {type(error).__name__}: {error}"
            self._refuse(ingress, message.stream, RuntimeError(problem))

    def _send_status(self, identity: bytes, ingress: _Ingress, *, resend: bool) -> None:
        try:
            self._engine.check_health()
            error = None
        except EngineDeadError as dead:
            error = str(dead)
        self._send(identity, Status(ingress.arrivals.received, ingress.connection.last_number, resend, error))

    def _send(self, identity: bytes, status: Status) -> None:
        self._reader.send(identity, encode(status))

    # --- requests -------------------------------------------------------------------------------------------------

    def _submit(self, ingress: _Ingress, message: Submit) -> None:
        if self._is_draining:
            self._refuse(ingress, message.stream, ReplicaDrainingError("the replica is shutting down"))
            return
        if self.num_requests >= self._max_requests:
            problem = f"the replica has {self.num_requests} requests, and takes {self._max_requests}"
            self._refuse(ingress, message.stream, ReplicaFullError(problem))
            return
        request = request_of(message, ingress.key(message.stream))
        self._engine.check_request(request)
        self._engine.check_health()
        if message.hashes:
            self._on_hashes(unpack_hashes(message.hashes))
        if request.params.structured_outputs is None:
            self._queue(ingress, message.stream, request)
        else:
            compiling = self._loop.create_task(self._compile(ingress, message.stream, request))
            ingress.compiling[message.stream] = compiling
            compiling.add_done_callback(lambda _: ingress.compiling.pop(message.stream))

    async def _compile(self, ingress: _Ingress, stream: int, request: EngineRequest) -> None:
        """Compile a request's grammar and queue it."""
        try:
            grammar = await self._engine.compile_grammar(request)
            self._queue(ingress, stream, request, grammar)
        except EngineDeadError:
            pass  # the ingress learns it from the next Status
        except Exception as error:
            self._refuse(ingress, stream, error)

    def _queue(self, ingress: _Ingress, stream: int, request: EngineRequest, grammar: Grammar | None = None) -> None:
        self._count.num_started += 1
        self._engine.submit(request, ingress.connection, stream, grammar)

    def _refuse(self, ingress: _Ingress, stream: int, error: Exception) -> None:
        self._engine.call_in_step_thread(partial(ingress.connection.refuse, stream, error))

    def _abort(self, ingress: _Ingress, stream: int) -> None:
        compiling = ingress.compiling.get(stream)
        if compiling is None or not compiling.cancel():  # a compilation that has just ended has queued its request
            self._engine.abort(ingress.key(stream))

    # --- lost ingresses -------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Count the silence of each ingress: not in seconds, since this process may itself have been stopped."""
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        for identity, ingress in list(self._ingresses.items()):
            ingress.num_silent_ticks += 1
            if ingress.num_silent_ticks > MAX_SILENT_TICKS:
                self._remove(identity, "it is silent")

    def _remove(self, identity: bytes, reason: str) -> None:
        """Abort the requests of a lost ingress."""
        ingress = self._ingresses.pop(identity)
        self._closed.append(identity)
        logger.info("ingress %s has gone (%s); its unfinished requests are aborted", identity.hex()[:8], reason)
        _cancel_compiling(ingress)
        self._engine.remove_reader(ingress.connection)
        self._engine.call_in_step_thread(ingress.connection.close)


def _cancel_compiling(ingress: _Ingress) -> None:
    for task in ingress.compiling.values():
        task.cancel()


def _has_everything(ingress: _Ingress) -> bool:
    return ingress.connection.acknowledged >= ingress.connection.last_number
