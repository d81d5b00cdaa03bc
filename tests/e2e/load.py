"""Load for the failure tests: requests with known answers, and clients that send them one after another.

A client compares every answer down to its token ids. It does not know what the test does to the server meanwhile.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from tests.waiting import HANG_S, until_async

OnChunk = Callable[[httpx.Response, int], Awaitable[None]]

TOKENS = 120  # an answer takes some seconds while 32 clients share two cores


@dataclass(frozen=True)
class Question:
    """A request with a deterministic answer: greedy or seeded."""

    path: str
    body: dict[str, Any]


@dataclass
class Answer:
    """The content of an answer, by choice.

    The parts are its text, its reasoning, and the name and the arguments of each tool call, in their order.
    """

    parts: dict[int, list[tuple[str, str]]] = field(default_factory=lambda: defaultdict(list))
    token_ids: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    finish_reasons: dict[int, str] = field(default_factory=dict)

    def add(self, choice: dict[str, Any]) -> None:
        """Append a chunk, or add a whole choice."""
        index, message = choice["index"], choice.get("message") or choice.get("delta") or {}
        assert index not in self.finish_reasons, f"data after the end of choice {index}"
        self._extend(index, "reasoning", message.get("reasoning"))
        self._extend(index, "text", choice.get("text") or message.get("content"))
        for call in message.get("tool_calls") or ():
            if "id" in call:
                self.parts[index].append(("call", call["function"]["name"]))
            self._extend(index, "arguments", call["function"]["arguments"])
        self.token_ids[index] += choice["token_ids"]
        if choice["finish_reason"] is not None:
            self.finish_reasons[index] = choice["finish_reason"]

    def _extend(self, index: int, kind: str, text: str | None) -> None:
        """Append a piece of text to the last part, if that is of the same kind."""
        parts = self.parts[index]
        if text and parts and parts[-1][0] == kind:
            parts[-1] = (kind, parts[-1][1] + text)
        elif text:
            parts.append((kind, text))


Recorded = list[tuple[Question, Answer]]


class RequestFailed(Exception):  # noqa: N818
    """The server answered with an error, or did not finish its answer."""


class ServerGone(RequestFailed):
    """The ingress died before the first byte of the answer, or there was none: the proxy answered."""


PROXY_ERRORS = ('"bad_gateway"', '"no_ingress"')  # HAProxy's own, of deployments/proxy


def _tool(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters | {"additionalProperties": False}}}


_LETTER = {"type": "string", "minLength": 60, "maxLength": 120}
_TOOLS = [_tool("write", {"text": _LETTER, "copies": {"type": "integer"}}), _tool("send", {"letter": _LETTER})]
# A choice, since a new engine tries each other grammar before its first use, one after the other.
_REASONED = f"<think>{'The river is long. ' * 12}</think>{'So is its story. ' * 12}"

# The kinds of requests. Half are greedy, half have a seed.
_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 0, "chat": True},
    {"temperature": 0.9, "seed": 8, "chat": True},
    {"temperature": 0, "stream": False},
    {"temperature": 0.9, "seed": 9, "n": 2, "max_tokens": TOKENS // 2},
    {"temperature": 0, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    {"temperature": 0.9, "seed": 10, "structured_outputs": {"regex": "([a-z]{3,7} ){300}"}},
    {"temperature": 0.9, "seed": 11, "chat": True, "tools": _TOOLS, "tool_choice": "required"},
    {"temperature": 0, "chat": True, "structured_outputs": {"choice": [_REASONED]}},
)
_LONG_PREFIX = (  # several KV blocks
    "You are a patient guide to the rivers of the world, and you tell long stories. " * 4
)


def questions(count: int) -> list[Question]:
    """Return ``count`` different requests; every second one of each kind starts with a long shared prefix."""
    return [_question(number, dict(_KINDS[number % len(_KINDS)])) for number in range(count)]


def _question(number: int, kind: dict[str, Any]) -> Question:
    prompt = (_LONG_PREFIX if number // len(_KINDS) % 2 else "") + f"Story {number} begins at the"
    is_chat = kind.pop("chat", False)
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
    common = {"max_tokens": TOKENS, "ignore_eos": True, "stream": True, "return_token_ids": True}
    return Question("/v1/chat/completions" if is_chat else "/v1/completions", common | asked | kind)


async def ask(client: httpx.AsyncClient, question: Question, on_chunk: OnChunk | None = None) -> Answer:
    """Send one request and read its answer to the end; ``on_chunk`` gets the stream and the number of its chunk.

    Raises:
        RequestFailed: the answer is an error or incomplete.
        ServerGone: the proxy answered, before the first byte of the ingress.
        httpx.TransportError: the connection broke.
    """
    answer, body = Answer(), question.body
    if not body["stream"]:
        whole = await client.post(question.path, json=body)
        _require_success(whole.status_code, whole.text)
        for choice in whole.json()["choices"]:
            answer.add(choice)
        return answer
    line, num_chunks = "", 0
    async with client.stream("POST", question.path, json=body) as response:
        if response.status_code != 200:
            _require_success(response.status_code, (await response.aread()).decode())
        async for line in _lines(response):
            if line == "data: [DONE]":
                break
            chunk = json.loads(line.removeprefix("data: "))
            _require("error" not in chunk, line)
            num_chunks += 1
            if on_chunk is not None:
                await on_chunk(response, num_chunks)
            for choice in chunk["choices"]:
                answer.add(choice)
    _require(line == "data: [DONE]", f"the stream ended with {line!r}")
    _require(len(answer.finish_reasons) == body.get("n", 1), f"a choice has no end: {answer.finish_reasons}")
    return answer


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Yield the lines of a stream, without empty ones and comments."""
    async for line in response.aiter_lines():
        if line and not line.startswith(":"):  # a comment: the stream waits for a token
            yield line


def _require_success(status: int, text: str) -> None:
    if status != 200:
        raise (ServerGone if any(code in text for code in PROXY_ERRORS) else RequestFailed)(f"{status}: {text}")


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise RequestFailed(otherwise)


class Target(Protocol):
    """A server under load."""

    @property
    def url(self) -> str: ...

    @property
    def headers(self) -> dict[str, str]:
        """The headers that every request needs."""
        ...


def new_client(server: Target) -> httpx.AsyncClient:
    """Return a client without a limit on its connections."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=server.url, headers=server.headers, timeout=HANG_S, limits=limits)


async def record(server: Target, asked: Sequence[Question]) -> Recorded:
    """Return the requests with the answers of an undisturbed server."""
    async with new_client(server) as client:
        answers = await asyncio.gather(*(ask(client, question) for question in asked))
    return list(zip(asked, answers, strict=True))


@dataclass
class Report:
    """The results of all clients."""

    completed: int = 0
    broken: list[str] = field(default_factory=list)  # connections that broke, each followed by another attempt
    failures: list[str] = field(default_factory=list)

    async def until_completed(self, more: int) -> None:
        """Wait until that many more requests have been completed, or any has failed."""
        wanted = self.completed + more
        await until_async(lambda: self.completed >= wanted or self.failures, f"{more} more requests are completed")

    def check(self) -> None:
        """Fail if a request has failed."""
        assert self.failures == [], f"{len(self.failures)} of {self.completed}: {self.failures[:5]}"


class Clients:
    """Clients that send known requests one after another until the ``running`` block ends.

    Args:
        server: gets the requests.
        asked: the requests with their expected answers.
        count: how many clients there are.
        retries: how often a client repeats a request whose connection broke.
    """

    def __init__(
        self, server: Target, asked: Sequence[tuple[Question, Answer]], *, count: int = 32, retries: int = 0
    ) -> None:
        self.report = Report()
        self._server = server
        self._asked = asked
        self._count = count
        self._retries = retries
        self._stopping = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Report]:
        """Run the clients; at the end each finishes the request it is at."""
        async with new_client(self._server) as client:
            tasks = [asyncio.create_task(self._run(client, number)) for number in range(self._count)]
            try:
                yield self.report
                self._stopping = True
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, client: httpx.AsyncClient, number: int) -> None:
        turn = number  # each client starts at another request
        while not self._stopping:
            question, expected = self._asked[turn % len(self._asked)]
            await self._check(client, question, expected, f"client {number}, request {turn % len(self._asked)}")
            turn += 1

    async def _check(self, client: httpx.AsyncClient, question: Question, expected: Answer, client_name: str) -> None:
        try:
            answer = await self._ask(client, question, client_name)
        except (RequestFailed, AssertionError, httpx.HTTPError, KeyError, ValueError) as error:
            self.report.failures.append(f"{client_name}: {error!r}")
            return
        self.report.completed += 1
        if answer != expected:
            self.report.failures.append(f"{client_name} got another answer: {difference(answer, expected)}")

    async def _ask(self, client: httpx.AsyncClient, question: Question, client_name: str) -> Answer:
        for _ in range(self._retries):
            try:
                return await ask(client, question)
            except (httpx.TransportError, ServerGone) as error:
                self.report.broken.append(f"{client_name}: {error!r}")
        return await ask(client, question)


def difference(answer: Answer, expected: Answer) -> str:
    """Describe the first difference between two answers."""
    for index in expected.token_ids:
        ours, theirs = answer.token_ids[index], expected.token_ids[index]
        if ours != theirs:
            pairs = enumerate(zip(ours, theirs, strict=False))
            index_of_first = next((at for at, (left, right) in pairs if left != right), min(len(ours), len(theirs)))
            return f"choice {index}, {len(ours)} tokens instead of {len(theirs)}, first difference at {index_of_first}"
    return f"the same tokens, but {answer.parts} for {expected.parts}, {answer.finish_reasons}"
