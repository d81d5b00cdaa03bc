"""A client gets the same content however its tokens are batched, joined, lost, sent again, paused and moved.

The content is compared with that of a stream whose tokens came one by one, past the channel.
"""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments.api.openai.protocol import ChatRequest, CompletionRequest, GenerationRequest
from deployments.requests.generation import Generation
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

MAX_LOSSES = 3  # of a replica; a Generation survives as many
NUM_LATE_ROUNDS = 20
MAX_ROUNDS = 200  # after the disturbances; a stream that has not ended by then hangs

_tokenizer = cache(Tokenizer)

# --- requests and their answers ---------------------------------------------------------------------------------------

TOKENS = st.integers(5, 300)  # bytes of characters too, so that texts are held back
LOGPROBS = st.builds(Logprob, st.floats(-50.0, 0.0), st.integers(1, 9))


@st.composite
def _answers(draw: Any, params: SamplingParams) -> Answer:
    token_ids = draw(st.lists(TOKENS, min_size=1, max_size=12))
    logprobs = None
    if params.logprobs is not None:
        logprobs = [{token_id: draw(LOGPROBS), 301: draw(LOGPROBS)} for token_id in token_ids]
    prompt_logprobs = None
    if params.prompt_logprobs is not None:
        prompt_logprobs = [None, {8: draw(LOGPROBS), 302: draw(LOGPROBS)}]
    return Answer(
        token_ids,
        draw(st.sampled_from(FinishReason)),
        draw(st.none() | st.integers(5, 300) | st.just("why")),
        draw(st.integers(0, 9)),
        ends_empty=draw(st.booleans()),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


@st.composite
def _requests(draw: Any) -> Request:
    fields: dict[str, Any] = {"stream": True, "n": draw(st.integers(1, 3)), "return_token_ids": draw(st.booleans())}
    usage, continuous = draw(st.booleans()), draw(st.booleans())
    fields["stream_options"] = {"include_usage": usage, "continuous_usage_stats": continuous}
    top = draw(st.sampled_from([None, 0, 1]))
    body: GenerationRequest
    if draw(st.booleans()):
        fields |= {} if top is None else {"logprobs": True, "top_logprobs": top}
        body = ChatRequest.model_validate(fields | {"messages": [{"role": "user", "content": "x"}]})
    else:
        fields |= {"logprobs": top, "echo": draw(st.booleans())}
        body = CompletionRequest.model_validate(fields | {"prompt": "x"})
    stop = draw(st.lists(st.text("abcdehikn", min_size=1, max_size=2), max_size=2))
    params = SamplingParams(logprobs=body.num_logprobs, prompt_logprobs=body.num_prompt_logprobs, stop=stop)
    echo = "xy" if getattr(body, "echo", False) else ""
    answers = [draw(_answers(params)) for _ in range(body.num_answers)]
    return Request(body, Prompt(EngineRequest("", [7, 8]), [3], echo), params, answers)


# --- disturbances -----------------------------------------------------------------------------------------------------


class Disturbances:
    """Does one thing after another to a front, until its client has the whole response.

    Args:
        front: with one client.
        data: what to do.
    """

    def __init__(self, front: Front, client: Client, data: st.DataObject) -> None:
        self._front, self._client, self._data = front, client, data
        self._num_losses = 0
        actions = [self.step, self.step, self.move, self.move, self.read, self.cut, self.lose, self.tick, self.connect]
        self._actions = {action.__name__: action for action in [*actions, self.lose_replica]}
        self._names = st.sampled_from([action.__name__ for action in [*actions, self.lose_replica]])

    async def run(self, responding: asyncio.Task[Any]) -> None:
        count = self._draw(0, 40)
        for name in self._data.draw(st.lists(self._names, min_size=count, max_size=count), label="disturbances"):
            self._actions[name]()
            await settle()
            if responding.done():
                return

    def _draw(self, low: int, high: int) -> int:
        return self._data.draw(st.integers(low, high))

    def step(self) -> None:
        for engine in self._front.engines.values():
            engine.step(self._draw(0, 4))

    def move(self) -> None:
        for line in self._front.network.lines:
            line.move(self._draw(0, 6))

    def read(self) -> None:
        self._client.allow(self._draw(1, 3))

    def cut(self) -> None:
        for line in self._front.network.lines:
            if self._draw(0, 1):
                line.cut(self._draw(0, 3))

    def connect(self) -> None:
        for line in self._front.network.lines:
            line.connect()

    def lose(self) -> None:
        for line in self._front.network.lines:
            line.lose(self._draw(0, 2))

    def tick(self) -> None:
        self._front.tick()

    def lose_replica(self) -> None:
        """Kill a replica, or let it close its connection to the ingress."""
        if self._num_losses == MAX_LOSSES:
            return
        self._num_losses += 1
        replica = self._data.draw(st.sampled_from(["r1", "r2"]))
        has_other = not any(router.is_dead for name in self._front.servers for router in self._front.routers(name))
        if has_other and self._draw(0, 1):
            self._front.kill(replica)
        else:
            self._front.forget_ingress(replica)


async def _delivered(request: Request, tokenizer: Tokenizer, data: st.DataObject) -> tuple[Content, list[Generation]]:
    """Return what a client of a disturbed front gets; nothing is left of its request afterwards."""
    network = Network()
    with network.installed(), patch.object(dispatch_module, "MAX_QUEUED_LOGPROBS", 6):
        front, client = Front(network, request.answer), Client()
        await settle()
        await front.run_quietly()
        responding = asyncio.create_task(respond(front.dispatcher, request, tokenizer, client))
        try:
            await settle()
            await Disturbances(front, client, data).run(responding)
            await _finish(front, client, responding, data)
            await _assert_nothing_is_left(front)
        finally:
            responding.cancel()
            await asyncio.gather(responding, return_exceptions=True)
            front.close()
    assert client.has_ended
    return Content.of(client.body), responding.result()


async def _finish(front: Front, client: Client, responding: asyncio.Task[Any], data: st.DataObject) -> None:
    """Let the stream end without disturbances; some clients read only when the engines have nothing more to do."""
    num_steps, reads_late = data.draw(st.integers(1, 5)), data.draw(st.booleans())
    for number in range(MAX_ROUNDS):
        if responding.done():
            return
        if number > NUM_LATE_ROUNDS or not reads_late:
            client.allow(10)
        await front.run_quietly(num_steps)
        front.tick()
    raise AssertionError("the stream hangs")


async def _assert_nothing_is_left(front: Front) -> None:
    for _ in range(20):
        await front.run_quietly()
        front.tick()
    for link in front.links:
        assert not link.num_streams
        assert not len(link._connection._outbox)
    assert not front.dispatcher._waiting
    assert not front.dispatcher._watch._watched
    assert front.dispatcher.queued() == (0, 0)
    for name, server in front.servers.items():
        if any(router.is_dead for router in front.routers(name)):
            continue
        assert not front.engines[name].running
        assert not server.num_requests
        for ingress in server._ingresses.values():
            assert ingress.connection.acknowledged == ingress.connection.last_number


# --- tests ------------------------------------------------------------------------------------------------------------


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data(), request=_requests())
def test_a_stream_has_the_content_of_one_that_got_every_token_by_itself(
    data: st.DataObject, request: Request, tokenizer_path: Path
) -> None:
    tokenizer = _tokenizer(tokenizer_path)

    async def both() -> None:
        expected, alone = await respond_undisturbed(request, tokenizer)
        content, generations = await _delivered(request, tokenizer, data)
        assert content == expected
        for ours, theirs in zip(generations, alone, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert ours.logprobs == theirs.logprobs
            assert ours.prompt_logprobs == theirs.prompt_logprobs
            assert ours.num_cached_tokens == theirs.num_cached_tokens
            assert ours.attempts[-1].timing is not None

    asyncio.run(both())
