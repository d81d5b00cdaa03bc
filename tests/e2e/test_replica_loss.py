"""A replica is killed during its streams: they continue on another one, and the replica is replaced."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Server, running_server
from tests.e2e.load import ask, new_client, questions

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


async def _streamed(client: httpx.AsyncClient, server: Server, body: dict[str, Any], *, kill: bool) -> Streamed:
    """Read one stream; with ``kill``, kill its replica after five events."""
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
            if kill and events == 5:
                pids = await asyncio.to_thread(server.engine_pids)
                os.kill(pids[answer.headers["x-pagoda-replica"]], signal.SIGKILL)
                kill = False
    assert line in ("", "data: [DONE]")
    assert not kill
    return streamed


async def _wait_for_both_replicas(server: Server) -> None:
    deadline = time.monotonic() + 60
    while len(server.metric("pagoda_num_requests_running")) < 2:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.5)


async def test_a_killed_replica_loses_no_token_and_is_replaced(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        expected = await _streamed(client, server, BODY, kill=False)
        assert await _streamed(client, server, BODY, kill=True) == expected
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=BODY | {"max_tokens": 4, "prompt": f"After {i}"}) for i in range(8))
        )
        assert [answer.status_code for answer in answers] == [200] * 8
    await _wait_for_both_replicas(server)
    assert sum(value for (name, _), value in server.metrics().items() if name == "pagoda_request_migrations_total") >= 1


async def test_an_answer_goes_on_in_the_middle_of_its_tool_calls(server: Server) -> None:
    await _wait_for_both_replicas(server)
    calls = next(one for one in questions(10) if one.body.get("tool_choice") == "required")
    async with new_client(server.url) as client:
        expected = await ask(client, calls)
        [parts] = expected.parts.values()
        assert [kind for kind, _ in parts[:2]] == ["call", "arguments"]

        pids = await asyncio.to_thread(server.engine_pids)  # before: the answer would go on meanwhile, to its end

        async def kill(response: httpx.Response, number: int) -> None:
            if number == 5:
                os.kill(pids[response.headers["x-pagoda-replica"]], signal.SIGKILL)

        moved = sum(server.metric("pagoda_request_migrations_total").values())
        assert await ask(client, calls, on_chunk=kill) == expected
    assert sum(server.metric("pagoda_request_migrations_total").values()) == moved + 1
    await _wait_for_both_replicas(server)


@pytest.mark.long
async def test_several_choices_with_logprobs_continue_unchanged(public_server: Server) -> None:
    await _wait_for_both_replicas(public_server)
    async with httpx.AsyncClient(base_url=public_server.url, headers=public_server.headers, timeout=120) as client:
        expected = await _streamed(client, public_server, SEVERAL, kill=False)
        after_loss = await _streamed(client, public_server, SEVERAL, kill=True)
    assert after_loss.text == expected.text
    assert after_loss.tokens == expected.tokens
    assert expected.text[0] != expected.text[1]
    for index in range(2):
        assert len(expected.logprobs[index]) == 200
        assert after_loss.logprobs[index] == pytest.approx(expected.logprobs[index], abs=1e-3)
        assert set(expected.text[index]) <= set("abcdefghijklmnopqrstuvwxyz ")
    await _wait_for_both_replicas(public_server)


@pytest.mark.long
async def test_streams_of_a_model_on_transformers_modules_go_on(tmp_path: Path) -> None:
    def change(args: dict[str, Any]) -> None:
        args["engine"] |= {"dtype": "float32", "model_impl": "transformers"}

    bodies = [BODY | {"prompt": f"Tell me story {i} about rivers", "max_tokens": 100 + 40 * i} for i in range(5)]
    bodies.append(SEVERAL)
    with running_server(tmp_path, change) as own:
        async with httpx.AsyncClient(base_url=own.url, timeout=120) as client:
            expected = [await _streamed(client, own, body, kill=False) for body in bodies]
            moved = await asyncio.gather(*(_streamed(client, own, body, kill=body is bodies[0]) for body in bodies))
        assert [one.text for one in moved] == [one.text for one in expected]
        assert len({one.text[0] for one in moved}) == len(bodies)
        assert sum(own.metric("pagoda_request_migrations_total").values()) >= 1
        await _wait_for_both_replicas(own)
