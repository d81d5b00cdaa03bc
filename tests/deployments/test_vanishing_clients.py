"""Clients that vanish from the HTTP application, over a real channel to an engine: nothing of them is left."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message

from deployments.config import AppConfig
from deployments.ingress import Ingress
from deployments.requests.dispatcher import Dispatcher
from deployments.routing.cluster_view import cluster_view
from tests.deployments.fakes import FakeEngines
from tests.deployments.transport.request_channel.peers import Peers, in_lockstep
from tests.waiting import until_in_loop

CLIENTS, AT_ONCE = 500, 50
DISCONNECT: Message = {"type": "http.disconnect"}


class Client:
    """Reads some messages of a response, and vanishes after some turns of the event loop.

    With ``num_messages=0`` it never reads.
    """

    def __init__(self, body: dict[str, Any], num_messages: int, num_turns: int) -> None:
        self._body: list[bytes] = [json.dumps(body).encode()]
        self._num_messages = num_messages
        self._num_turns = num_turns
        self._has_gone = asyncio.Event()
        self.num_received = 0

    async def run(self, app: Any) -> None:
        """Send the request; returns when the application has ended it."""
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
        if not self._num_messages:
            self._vanish()
        await app(scope, self._receive, self._send)

    def _vanish(self) -> None:
        self._num_turns -= 1
        if self._num_turns < 0:
            self._has_gone.set()
        else:
            asyncio.get_running_loop().call_soon(self._vanish)

    async def _receive(self) -> Message:
        if self._body:
            return {"type": "http.request", "body": self._body.pop()}
        await self._has_gone.wait()
        return DISCONNECT

    async def _send(self, message: Message) -> None:
        if self.num_received >= self._num_messages:  # the socket is full
            await self._has_gone.wait()
            return
        self.num_received += 1
        if self.num_received == self._num_messages:
            self._vanish()


async def test_five_hundred_clients_leave_no_task_stream_request_or_block(
    peers: Peers, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatchers: list[Dispatcher] = []

    def dispatcher(*args: Any, **options: Any) -> Dispatcher:
        dispatchers.append(Dispatcher(*args, **options))
        return dispatchers[0]

    monkeypatch.setattr("deployments.ingress.Dispatcher", dispatcher)
    monkeypatch.setattr("deployments.ingress.RayExporter.start", lambda self: None)
    cluster_view.cache_clear()
    replica = peers.replica(num_blocks=2048, max_model_len=128)
    in_lockstep(replica)
    engines: Any = FakeEngines([[]])
    ingress: Any = Ingress(engines, AppConfig.parse({"model": str(tokenizer_path), "model_name": "tiny"}))
    app = ingress.__serve_build_asgi_app__()
    view = cluster_view(engines.deployment_name)
    async with app.router.lifespan_context(app):
        view.set_replicas({"r1": {"block_size": 4, **replica.server.address.metadata}})
        links = dispatchers[0]._links
        assert links is not None
        await until_in_loop(lambda: links.ready)
        tasks = asyncio.all_tasks()
        received = await _vanish(app, random.Random(1))
        await until_in_loop(lambda: replica.is_idle)
        await until_in_loop(lambda: not asyncio.all_tasks() - tasks)
        link = links["r1"]
        await until_in_loop(lambda: not len(link._connection._outbox))
        assert not link._streams
        assert not dispatchers[0]._waiting
        assert not dispatchers[0]._watch._watched
        assert dispatchers[0].queued() == view.queued() == (0, 0)
    assert sum(count > 2 for count in received) > CLIENTS // 4, "no client read a part of its answer"


async def _vanish(app: Any, rng: random.Random) -> list[int]:
    """Run the clients; return how many messages each has received."""
    received: list[int] = []
    for first in range(0, CLIENTS, AT_ONCE):
        clients = [_client(number, rng) for number in range(first, first + AT_ONCE)]
        await asyncio.gather(*(client.run(app) for client in clients))
        received += [client.num_received for client in clients]
    return received


def _client(number: int, rng: random.Random) -> Client:
    body: dict[str, Any] = {"prompt": [number % 60, number // 60, 5], "max_tokens": 100, "ignore_eos": True}
    body |= {"stream": number % 5 > 0, "n": 1 + number % 2, "seed": number, "logprobs": 0 if number % 3 else None}
    return Client(body, rng.choice([0, 1, 3, 10]), rng.randrange(100))
