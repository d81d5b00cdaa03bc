"""A replica is killed during its streams: they continue on another one, and the replica is replaced."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.load import ask, new_client, questions
from tests.e2e.losses import MIGRATIONS, until_complete
from tests.e2e.server import Server, running_server

BODY: dict[str, Any] = {
    "prompt": "Tell me a long story about rivers",
    "max_tokens": 300,
    "temperature": 0,
    "ignore_eos": True,
}
# Parameters with state over all tokens: penalties, random draws, and the grammar.
SEVERAL = BODY | {
    "n": 2,
    "temperature": 0.8,
    "seed": 11,
    "logprobs": 2,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.1,
    "max_tokens": 200,
    "structured_outputs": {"regex": "([a-z]{3,7} ){300}"},
}


@dataclass
class Streamed:
    """The content of a stream, by choice."""

    text: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    logprobs: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    tokens: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))


EVENTS_BEFORE_LOSS = 2
MAX_LOSSES = 4  # the last ones are only needed if engines finish streams before a client reads their first events


async def _streamed(client: httpx.AsyncClient, body: dict[str, Any], kill: dict[str, int] | None = None) -> Streamed:
    """Read one stream; kill its replica, one of ``kill``, after some events."""
    streamed, events = Streamed(), 0
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                choice = chunk["choices"][0]
                streamed.text[choice["index"]] += choice["text"]
                if choice["logprobs"] is not None:
                    streamed.logprobs[choice["index"]] += choice["logprobs"]["token_logprobs"]
                    streamed.tokens[choice["index"]] += choice["logprobs"]["tokens"]
                events += 1
            if kill and events == EVENTS_BEFORE_LOSS:
                os.kill(kill[answer.headers["x-pagoda-replica"]], signal.SIGKILL)
                kill = None
    assert line in ("", "data: [DONE]")
    return streamed


async def _streamed_after_a_loss(client: httpx.AsyncClient, server: Server, body: dict[str, Any]) -> Streamed:
    """Read a stream whose replica is killed; the stream had not ended before."""
    for _ in range(MAX_LOSSES):
        pids, moved = server.engine_pids(), server.total(MIGRATIONS)
        streamed = await _streamed(client, body, kill=pids)
        if server.total(MIGRATIONS) > moved:
            return streamed
        await _until_both_run(server)
    pytest.fail("every stream ended before its replica was killed")


async def _until_both_run(server: Server, *, ingresses: int = 1) -> None:
    await until_complete(server, engines=2, ingresses=ingresses)


async def test_a_killed_replica_loses_no_token_and_is_replaced(server: Server) -> None:
    async with new_client(server) as client:
        expected = await _streamed(client, BODY)
        assert await _streamed_after_a_loss(client, server, BODY) == expected
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=BODY | {"max_tokens": 4, "prompt": f"After {i}"}) for i in range(8))
        )
        assert [answer.status_code for answer in answers] == [200] * 8
    await _until_both_run(server)


@pytest.mark.exhaustive(
    "restarts a replica; the streams of tests/e2e/test_losses.py that continue in CI have tool calls"
)
async def test_an_answer_continues_in_the_middle_of_its_tool_calls(server: Server) -> None:
    calls = next(question for question in questions(10) if question.body.get("tool_choice") == "required")
    async with new_client(server) as client:
        expected = await ask(client, calls)
        [parts] = expected.parts.values()
        assert [kind for kind, _ in parts[:2]] == ["call", "arguments"]

        moved = server.total(MIGRATIONS)
        for _ in range(MAX_LOSSES):
            await _until_both_run(server)
            pids = server.engine_pids()

            async def kill(response: httpx.Response, number: int, pids: dict[str, int] = pids) -> None:
                if number == EVENTS_BEFORE_LOSS:
                    os.kill(pids[response.headers["x-pagoda-replica"]], signal.SIGKILL)

            assert await ask(client, calls, on_chunk=kill) == expected
            if server.total(MIGRATIONS) > moved:
                break
    assert server.total(MIGRATIONS) == moved + 1
    await _until_both_run(server)


@pytest.mark.long
async def test_several_choices_with_logprobs_continue_unchanged(public_server: Server) -> None:
    await _until_both_run(public_server, ingresses=2)
    async with new_client(public_server) as client:
        expected = await _streamed(client, SEVERAL)
        after_loss = await _streamed_after_a_loss(client, public_server, SEVERAL)
    assert after_loss.text == expected.text
    assert after_loss.tokens == expected.tokens
    assert expected.text[0] != expected.text[1]
    for index in range(2):
        assert len(expected.logprobs[index]) == 200
        assert after_loss.logprobs[index] == pytest.approx(expected.logprobs[index], abs=1e-3)
        assert set(expected.text[index]) <= set("abcdefghijklmnopqrstuvwxyz ")
    await _until_both_run(public_server, ingresses=2)


@pytest.mark.exhaustive("a server of its own for models on transformers' modules; other models migrate in CI")
async def test_streams_of_a_model_on_transformers_modules_continue(tmp_path: Path) -> None:
    def change(args: dict[str, Any]) -> None:
        args["engine"] |= {"dtype": "float32", "model_impl": "transformers"}

    bodies = [BODY | {"prompt": f"Tell me story {i} about rivers", "max_tokens": 100 + 40 * i} for i in range(5)]
    bodies.append(SEVERAL)
    with running_server(tmp_path, change) as own:
        async with new_client(own) as client:
            expected = [await _streamed(client, body) for body in bodies]
            first, rest = (
                _streamed_after_a_loss(client, own, bodies[0]),
                [_streamed(client, body) for body in bodies[1:]],
            )
            moved = await asyncio.gather(first, *rest)
        assert [streamed.text for streamed in moved] == [streamed.text for streamed in expected]
        assert len({streamed.text[0] for streamed in moved}) == len(bodies)
        await _until_both_run(own)
