"""Front: an ingress and two replicas on a network in memory, and clients that read when the test lets them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec.structs import replace
from starlette.types import Message

from deployments.api.openai.protocol import ChatRequest, GenerationRequest
from deployments.api.openai.writers import ChatWriters, CompletionWriters
from deployments.api.serving import _streamed
from deployments.api.writers import ResponseHead, Writers
from deployments.requests.dispatcher import Dispatcher
from deployments.requests.generation import Generation
from deployments.requests.prompt import Prompt
from deployments.routing.cluster_view import ClusterView
from deployments.transport.request_channel.dispatch import Dispatch
from deployments.transport.request_channel.link import Link
from deployments.transport.request_channel.server import ChannelServer
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.text.text_stream import TextStream
from engine.text.tokenizer import Tokenizer
from tests.deployments.delivery.network import Network, Router
from tests.deployments.delivery.scripted_engine import Answer, ScriptedEngine
from tests.deployments.delivery.sse_content import Content
from tests.deployments.fakes import IDLE, NO_REPLICATION, FakeDispatch

NEVER_S = 1e6  # the test itself calls what timers would


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(12):
        await asyncio.sleep(0)


class Client:
    """Receives the ASGI messages of a response, each when it may."""

    def __init__(self) -> None:
        self.body = b""
        self.has_ended = False
        self.has_gone = asyncio.Event()
        self._allowed = asyncio.Semaphore(0)

    def allow(self, count: int) -> None:
        """Let so many messages pass."""
        for _ in range(count):
            self._allowed.release()

    async def send(self, message: Message) -> None:
        await self._allowed.acquire()
        if message["type"] == "http.response.body":
            assert not self.has_ended
            self.body += message["body"]
            self.has_ended = not message["more_body"]

    async def receive(self) -> Message:
        await self.has_gone.wait()
        return {"type": "http.disconnect"}


class Request:
    """One HTTP request with the scripted answers to it: a body, and its prompt and parameters.

    Args:
        answers: one for each choice.
    """

    def __init__(self, body: GenerationRequest, prompt: Prompt, params: SamplingParams, answers: list[Answer]) -> None:
        self.body = body
        self.prompt = prompt
        self.answers = answers
        self._params = params

    def generations(self, dispatcher: Any, tokenizer: Tokenizer) -> list[Generation]:
        """Return a Generation for each choice; its seed says which."""
        token_ids = self.prompt.token_ids
        return [
            Generation(
                dispatcher,
                EngineRequest(f"request {token_ids[0]}.{index}", token_ids, replace(self._params, seed=index)),
                self.prompt,
                TextStream(tokenizer, token_ids, self._params),
                index=index,
                max_migrations=3,
            )
            for index in range(len(self.answers))
        ]

    def answer(self, request: EngineRequest) -> Answer:
        """Return the scripted answer to a request for a choice."""
        assert request.params.seed is not None
        return self.answers[request.params.seed]


async def respond(dispatcher: Any, request: Request, tokenizer: Tokenizer, client: Client) -> list[Generation]:
    """Stream a request's answers to a client; returns the generations at the end."""
    writers: Writers[Any] = ChatWriters(None) if isinstance(request.body, ChatRequest) else CompletionWriters()
    generations = request.generations(dispatcher, tokenizer)
    head = ResponseHead("id", 1_700_000_000, "m")
    response = await _streamed(writers.events(head, request.body, tokenizer, generations), generations)
    await response({"type": "http"}, client.receive, client.send)
    return generations


class _OneByOne:
    """Engines whose outputs are one token each and reach the reader as they are, past the channel."""

    request_timeout_s = NEVER_S
    replication = NO_REPLICATION

    def __init__(self, request: Request) -> None:
        self._request = request

    def send(self, request: EngineRequest, block_hashes: Sequence[int], **_: Any) -> Dispatch:
        outputs = self._request.answer(request).outputs(request, iter(lambda: 1, -1))
        return FakeDispatch(request, block_hashes, script=list(outputs))

    def end(self, dispatch: Dispatch) -> None:
        """There is nothing to cancel."""


async def respond_undisturbed(request: Request, tokenizer: Tokenizer) -> tuple[Content, list[Generation]]:
    """Return what a client gets that receives every token by itself."""
    client = Client()
    client.allow(10_000)
    generations = await respond(_OneByOne(request), request, tokenizer, client)
    return Content.of(client.body), generations


class Front:
    """Two replicas and an ingress.

    Args:
        answer: of every engine to a request.
    """

    def __init__(self, network: Network, answer: Callable[[EngineRequest], Answer]) -> None:
        self.network = network
        self.view = ClusterView(clock=lambda: 0.0)  # no load report expires, however slow the machine is
        self.engines = {name: ScriptedEngine(answer) for name in ("r1", "r2")}
        self.servers = {
            name: ChannelServer(engine, "127.0.0.1", max_requests=100, tick_s=NEVER_S)  # type: ignore[arg-type]
            for name, engine in self.engines.items()
        }
        self.dispatcher = Dispatcher(
            self.view,
            asyncio.Event().wait,
            max_requests=100,
            stall_timeout_s=NEVER_S,
            request_timeout_s=NEVER_S,
        )
        self.dispatcher.start()
        self.view.set_replicas(
            {name: {"block_size": 4, **server.address.metadata} for name, server in self.servers.items()}
        )
        for name in self.servers:
            self.view.routing.report(name, IDLE, now=0.0)

    @property
    def links(self) -> list[Link]:
        """The links to both replicas."""
        links = self.dispatcher._links
        assert links is not None
        return [links[name] for name in self.servers]

    def routers(self, replica: str) -> Iterable[Router]:
        """Return the sockets of a replica."""
        address = self.servers[replica].address
        return [
            self.network.routers[int(endpoint.rpartition(":")[2])] for endpoint in (address.requests, address.outputs)
        ]

    def tick(self) -> None:
        """Let the ingress acknowledge and look for lost messages, as it does periodically."""
        for link in self.links:
            link.tick()

    def forget_ingress(self, replica: str) -> None:
        """Let a replica take the ingress for dead."""
        server = self.servers[replica]
        for identity in list(server._ingresses):
            server._remove(identity, "a test")

    def kill(self, replica: str) -> None:
        """End a replica's process."""
        for router in self.routers(replica):
            router.is_dead = True
            for line in list(router.lines.values()):
                line.cut(0)

    async def run_quietly(self, num_steps: int = 1) -> None:
        """Let everything happen once, without a disturbance, and so many steps of the engines."""
        for line in self.network.lines:
            line.connect()
        for engine in self.engines.values():
            for _ in range(num_steps):
                engine.step(1)
        for line in self.network.lines:
            line.move(1000)
        await settle()

    def close(self) -> None:
        """Close the links and the servers."""
        self.dispatcher.close()
        for server in self.servers.values():
            server.close()
