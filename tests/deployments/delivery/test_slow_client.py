"""A client that reads nothing: the others get their tokens at the same steps, and little is kept for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from deployments.api.openai.protocol import ChatRequest
from deployments.requests.prompt import Prompt
from deployments.transport.request_channel import dispatch as dispatch_module
from engine.outputs import FinishReason, Logprob
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer
from tests.deployments.delivery.front import Client, Front, Request, respond, respond_undisturbed, settle
from tests.deployments.delivery.network import Network
from tests.deployments.delivery.scripted_engine import Answer
from tests.deployments.delivery.sse_content import Content

OTHERS, TOKENS = 8, 60
SLOW_TOKENS, MAX_QUEUED = 300, 50
SLOW = 100  # the first token of its prompt


def _request(first_token: int, length: int, top: int | None) -> Request:
    token_ids = [5 + (first_token + 7 * position) % 290 for position in range(length)]
    logprobs = None if top is None else [{token_id: Logprob(-1.0, 1), 301: Logprob(-2.0, 2)} for token_id in token_ids]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "stream": True, "return_token_ids": True}
    if top is not None:
        body |= {"logprobs": True, "top_logprobs": top}
    answer = Answer(token_ids, FinishReason.LENGTH, None, 0, ends_empty=False, logprobs=logprobs, prompt_logprobs=None)
    prompt = Prompt(EngineRequest("", [first_token]), [])
    return Request(ChatRequest.model_validate(body), prompt, SamplingParams(logprobs=top), [answer])


async def _run(tokenizer: Tokenizer, slow: Request | None) -> tuple[list[list[int]], Content | None, list[int]]:
    """Return the bytes that each of the others had after each step, the slow client's content, its steps of waiting."""
    asked = {number: _request(number, TOKENS, None) for number in range(7, 7 + OTHERS)}
    asked |= {} if slow is None else {SLOW: slow}
    network, clients, progress, queued = Network(), {number: Client() for number in asked}, [], [0]

    def answer(request: EngineRequest) -> Answer:
        return asked[request.prompt_token_ids[0]].answer(request)

    with network.installed():
        front = Front(network, answer)
        await settle()
        await front.run_quietly()
        tasks = [asyncio.create_task(respond(front.dispatcher, asked[n], tokenizer, clients[n])) for n in asked]
        await settle()
        for number, client in clients.items():
            client.allow(0 if number == SLOW else 10_000)
        for _ in range(2 * TOKENS):
            await front.run_quietly()
            front.tick()
            progress.append([len(client.body) for number, client in clients.items() if number != SLOW])
            queued += [stream._num_logprobs for link in front.links for stream in link._streams.values()]
        assert not any(engine.running for engine in front.engines.values()), "the slow client's request still runs"
        for _ in range(10 * SLOW_TOKENS):
            if all(task.done() for task in tasks):
                break
            clients[SLOW].allow(1)
            await front.run_quietly()
            front.tick()
        await asyncio.gather(*tasks)
        front.close()
    return progress, None if slow is None else Content.of(clients[SLOW].body), queued


async def test_a_client_that_reads_nothing_slows_no_other_and_gets_its_answer_when_it_reads(
    tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch_module, "MAX_QUEUED_LOGPROBS", MAX_QUEUED)
    tokenizer, slow = Tokenizer(tokenizer_path), _request(SLOW, SLOW_TOKENS, 1)
    alone, _, _ = await _run(tokenizer, None)
    beside, content, queued = await _run(tokenizer, slow)
    assert beside == alone
    assert len({tuple(content) for content in alone}) >= TOKENS
    assert MAX_QUEUED // 2 < max(queued) <= MAX_QUEUED
    expected, _ = await respond_undisturbed(slow, tokenizer)
    assert content == expected
