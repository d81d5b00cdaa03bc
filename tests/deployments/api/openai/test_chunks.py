"""The bytes of a stream's events: those of its chunks as dicts, whichever fields are encoded once."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.types import Message

from deployments.api.openai.chunks import ChunkWriter
from deployments.api.openai.protocol import ChatRequest, CompletionRequest, GenerationRequest
from deployments.api.openai.response_writers import ChatWriter, CompletionWriter, ResponseWriter
from deployments.api.writers import ResponseHead, Usage
from deployments.requests.generation import Delta
from deployments.requests.prompt import Prompt
from engine.outputs import FinishReason, Logprob
from engine.request import EngineRequest
from engine.text.tokenizer import Tokenizer
from tests.deployments.conftest import OpenClient
from tests.deployments.fakes import FakeEngines, output
from tests.waiting import until_in_loop

TEXTS = st.text(max_size=6) | st.sampled_from(['"', "%s%(text)s%%", "\\", "\n\x00\x7f\u2028", "</s>🎉"])
LOGPROB = st.builds(Logprob, st.floats(-1e4, 0.0), st.integers(1, 9))


_tokenizer = cache(Tokenizer)


class Answer:
    """What a writer reads of a Generation."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.prompt_logprobs = None
        self.token_ids: list[int] = []
        self.num_cached_tokens = 3
        self.num_accepted_predicted, self.num_rejected_predicted = 4, 1


@st.composite
def _bodies(draw: Any) -> GenerationRequest:
    includes, continuous = draw(st.tuples(st.booleans(), st.booleans()))
    fields: dict[str, Any] = {
        "n": draw(st.integers(1, 3)),
        "return_token_ids": draw(st.sampled_from([None, False, True])),
    }
    fields |= {"stream": True}
    if draw(st.booleans()):
        fields["stream_options"] = {"include_usage": includes, "continuous_usage_stats": continuous}
    logprobs = draw(st.sampled_from([None, 0, 2]))
    if draw(st.booleans()):
        fields |= {"messages": [{"role": "user", "content": "x"}]}
        fields |= {} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}
        return ChatRequest.model_validate(fields)
    return CompletionRequest.model_validate(fields | {"prompt": "x", "echo": draw(st.booleans()), "logprobs": logprobs})


@st.composite
def _deltas(draw: Any, body: GenerationRequest) -> list[Delta]:
    counts = [draw(st.integers(0, 4)) for _ in range(body.num_answers)]
    deltas = [_delta(draw, body, index) for index, count in enumerate(counts) for _ in range(count)]
    deltas = draw(st.permutations(deltas))
    for index in draw(st.permutations(range(body.num_answers))):
        last = _delta(draw, body, index)
        last.finish_reason = draw(st.sampled_from([*FinishReason, "length"]))
        last.stop_reason = draw(st.none() | st.integers(0, 9) | TEXTS)
        deltas.append(last)
    return deltas


def _delta(draw: Any, body: GenerationRequest, index: int) -> Delta:
    token_ids = draw(st.lists(st.integers(5, 300), max_size=3))
    logprobs = None
    if body.num_logprobs is not None:
        logprobs = [{token_id: draw(LOGPROB), 9: draw(LOGPROB)} for token_id in token_ids]
    return Delta(index, draw(TEXTS), token_ids, logprobs=logprobs)


def _writer(body: GenerationRequest, tokenizer: Tokenizer) -> ResponseWriter:
    kind = ChatWriter if isinstance(body, ChatRequest) else CompletionWriter
    return kind(ResponseHead('%d "id" %(text)s', 1_700_000_000, "a 100% model"), body, tokenizer)


def _expected(writer: ResponseWriter, generations: list[Any], deltas: list[Delta], body: GenerationRequest) -> bytes:
    """Return the events of chunks that are written as dicts."""
    options, started, chunks = body.stream_options, set(), []
    for delta in deltas:
        generations[delta.index].token_ids += delta.token_ids
        chunk = writer.delta_chunk(delta, generations[delta.index], first=delta.index not in started)
        started.add(delta.index)
        if options is not None and options.include_usage and options.continuous_usage_stats:
            chunk["usage"] = writer.usage_fields(Usage.of(generations, body.num_generated))
        elif options is not None and options.include_usage:
            chunk["usage"] = None
        chunks.append(chunk)
    if options is not None and options.include_usage:
        chunks.append(writer.usage_chunk(Usage.of(generations, body.num_generated)))
    events = b"".join(
        b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n" for chunk in chunks
    )
    return events + b"data: [DONE]\n\n"


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), body=_bodies())
def test_the_bytes_are_those_of_the_dicts(data: st.DataObject, body: GenerationRequest, tokenizer_path: Path) -> None:
    tokenizer, deltas = _tokenizer(tokenizer_path), data.draw(_deltas(body))

    def answers() -> list[Any]:
        return [Answer(Prompt(EngineRequest("", [7, 8]), [], "%echo")) for _ in range(body.num_answers)]

    generations = answers()
    chunks, events = ChunkWriter(_writer(body, tokenizer), generations, body), b""
    for delta in deltas:
        generations[delta.index].token_ids += delta.token_ids
        events += chunks.chunk(delta)
    assert events + chunks.end() == _expected(_writer(body, tokenizer), answers(), deltas, body)


# --- the messages of the response -------------------------------------------------------------------------------------


async def _stream(app: Any, body: dict[str, Any], *, disconnect_after: int = 10**6) -> list[Message]:
    """Return the ASGI messages of a streamed completion, whose client disconnects after so many of them."""
    sent: list[Message] = []
    gone, requests = asyncio.Event(), [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> Message:
        if requests:
            return requests.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)
        if len(sent) >= disconnect_after:
            gone.set()
        await asyncio.sleep(0)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
    await app(scope, receive, send)
    return sent


async def test_the_last_events_end_the_response(open_client: OpenClient, engines: FakeEngines) -> None:
    engines.scripts = [[output([70]), output([71]), output([72], "stop")]]
    options = {"include_usage": True}
    sent = await _stream(open_client().app, {"prompt": "a", "stream": True, "stream_options": options})
    assert [message.get("more_body") for message in sent] == [None, True, True, False]
    assert [message.get("body", b"").count(b"data: ") for message in sent] == [0, 1, 1, 3]
    assert sent[-1]["body"].endswith(b"data: [DONE]\n\n")


async def test_chunks_pass_no_middleware(
    open_client: OpenClient, engines: FakeEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start and the end of a response pass all of it."""
    engines.scripts = [[output([70]), output([71]), output([72], "stop")]]
    passed: list[str] = []

    class Spy:
        def __init__(self, app: Any, **options: Any) -> None:
            self._app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            async def spying(message: Message) -> None:
                passed.append(f"{message['type']} {message.get('more_body')}")
                await send(message)

            await self._app(scope, receive, spying)

    monkeypatch.setattr("deployments.api.application.CountRequests", Spy)
    await _stream(open_client().app, {"prompt": "a", "stream": True})
    assert [event for event in passed if event.startswith("http")] == [
        "http.response.start None",
        "http.response.body False",
    ]


async def test_a_client_that_disconnects_ends_the_stream_and_leaves_no_task(
    open_client: OpenClient, engines: FakeEngines
) -> None:
    engines.scripts = [[output([70])] * 1000]
    before = asyncio.all_tasks()
    app = open_client().app
    sent = await _stream(app, {"prompt": "a", "stream": True}, disconnect_after=3)
    assert 3 <= len(sent) <= 6
    assert all(message.get("more_body", True) for message in sent)
    # The fake engine's own generator is closed by the event loop.
    await until_in_loop(lambda: asyncio.all_tasks() <= before, "no task is left", details=asyncio.all_tasks)
    assert engines.dispatches[0].ended is not None
