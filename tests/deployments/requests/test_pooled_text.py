"""One text whose replicas die, are full, reject it, or compute what no client can use; and requests of many texts."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import pytest

from deployments.api.pooling.protocol import TextRequest
from deployments.api.pooling.serving import MAX_IN_FLIGHT, PoolingServing
from deployments.config import AppConfig
from deployments.errors import ReplicasLostError, UnusableOutputError, as_api_error
from deployments.request_log.log import RequestLog
from deployments.request_log.record import RequestRecord, current_record, set_current_record
from deployments.requests.pooled_text import PooledText, TextTokens
from engine.errors import EngineDeadError, OverloadedError, RequestError
from engine.outputs import EngineOutput, FinishReason
from engine.pooling.params import PoolingParams
from engine.request import EngineRequest
from tests.deployments.fakes import FakeDispatch, FakeEngines, Script

VECTOR = array("f", [0.5, 2.0]).tobytes()


def vector(replica: str = "r1") -> EngineOutput:
    return EngineOutput("id", 0, [], FinishReason.STOP, is_last=True, replica=replica, pooled=VECTOR)


def tokens(*token_ids: int) -> TextTokens:
    return TextTokens(array("i", token_ids), PoolingParams())


def pooled(scripts: list[Script]) -> tuple[PooledText, FakeEngines]:
    engines = FakeEngines(scripts)
    return PooledText(engines, tokens(1, 2), EngineRequest("id", []), max_migrations=3), engines


async def test_a_text_becomes_a_vector() -> None:
    text, engines = pooled([[None, vector()]])
    assert await text.result(inf) == VECTOR
    assert (text.replica, text.finish_reason, text.num_migrations) == ("r1", "stop", 0)
    assert [request.prompt_token_ids for request, _ in engines.calls] == [[1, 2]]
    assert [attempt.request.prompt_token_ids for attempt in text.attempts] == [[]]  # a request may have 2,048 texts
    assert all(dispatch.ended is not None for dispatch in engines.dispatches)


def _lost(replica: str) -> EngineDeadError:
    error = EngineDeadError("gone")
    error.replica = replica
    return error


async def test_another_replica_computes_the_text_of_a_lost_one() -> None:
    text, engines = pooled([[_lost("r1")], [vector("r2")]])
    assert await text.result(inf) == VECTOR
    assert (text.replica, text.num_migrations, len(text.attempts)) == ("r2", 1, 2)
    assert engines.calls[1][1]["avoid"] == ["r1"]
    assert engines.calls[1][0].request_id != engines.calls[0][0].request_id


async def test_too_many_losses_are_an_error() -> None:
    text, _ = pooled([[_lost(f"r{index}")] for index in range(5)])
    with pytest.raises(ReplicasLostError):
        await text.result(inf)


async def test_a_full_replica_is_avoided_once() -> None:
    full = OverloadedError("full")
    full.replica = "r1"
    text, _ = pooled([[full], [vector("r2")]])
    assert await text.result(inf) == VECTOR
    assert text.num_migrations == 0


async def test_an_invalid_text_is_not_sent_again() -> None:
    text, engines = pooled([[RequestError("is wrong")]])
    with pytest.raises(RequestError):
        await text.result(inf)
    assert len(engines.calls) == 1


async def test_what_is_not_finite_is_an_error_with_a_message() -> None:
    bad = EngineOutput("id", 0, [], FinishReason.ABORT, "is not finite", is_last=True, replica="r1")
    text, engines = pooled([[bad]])
    with pytest.raises(UnusableOutputError) as caught:
        await text.result(inf)
    error = as_api_error(caught.value)
    assert (error.status, error.code, error.message) == (500, "unusable_output", "is not finite")
    assert len(engines.calls) == 1


# --- requests of many texts -------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Stuck(FakeDispatch):
    """A text that is computed once ``go`` is set."""

    go: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self) -> EngineOutput | None:
        return FakeDispatch.take(self) if self.go.is_set() else None

    async def wait(self) -> None:
        await self.go.wait()


class StuckEngines(FakeEngines):
    """Engines that compute nothing until they are told to; they note how many texts they have at most."""

    def __init__(self) -> None:
        super().__init__([])
        self.go = asyncio.Event()
        self.most = 0

    def send(self, request: EngineRequest, block_hashes: Any, *, avoid: Any, deadline: float) -> FakeDispatch:
        self.calls.append((request, {}))
        dispatch = _Stuck(request, block_hashes, avoid, deadline, script=[vector()], go=self.go)
        self.dispatches.append(dispatch)
        self.most = max(self.most, sum(dispatch.ended is None for dispatch in self.dispatches))
        return dispatch


class _Prompts:
    async def get(self) -> Any:
        return self

    tokenizer = None


@pytest.fixture
def record() -> RequestRecord:
    set_current_record(RequestRecord("request-7", "/v1/embeddings", client="192.0.2.1"))
    return current_record()


def serving(engines: FakeEngines, tokenizer_path: Path) -> PoolingServing:
    config = AppConfig.parse({"model": str(tokenizer_path), "task": "embed"})
    prompts: Any = _Prompts()
    dispatcher: Any = engines
    return PoolingServing(config, dispatcher, prompts, RequestLog(config.logging))


TEXTS = [tokens(index, 1) for index in range(3 * MAX_IN_FLIGHT)]


async def test_a_request_has_a_bounded_number_of_texts_at_the_engines(
    record: RequestRecord, tokenizer_path: Path
) -> None:
    engines = StuckEngines()
    task = asyncio.create_task(serving(engines, tokenizer_path).compute(TEXTS, TextRequest(priority=2)))
    while len(engines.calls) < MAX_IN_FLIGHT:
        await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(engines.calls) == MAX_IN_FLIGHT
    engines.go.set()
    result = await task
    assert result.results == [VECTOR] * len(TEXTS)
    assert (result.num_tokens, result.replica) == (2 * len(TEXTS), "r1")
    assert engines.most == MAX_IN_FLIGHT
    assert [request.prompt_token_ids[0] for request, _ in engines.calls] == list(range(len(TEXTS)))
    assert {request.priority for request, _ in engines.calls} == {2}
    assert len({request.client for request, _ in engines.calls}) == 1  # they take turns with other requests
    assert record.num_prompt_tokens == 2 * len(TEXTS)


async def test_a_client_that_disconnects_cancels_its_texts(record: RequestRecord, tokenizer_path: Path) -> None:
    engines = StuckEngines()
    task = asyncio.create_task(serving(engines, tokenizer_path).compute(TEXTS, TextRequest()))
    while len(engines.calls) < MAX_IN_FLIGHT:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(engines.calls) == MAX_IN_FLIGHT
    assert all(dispatch.ended is not None for dispatch in engines.dispatches)


async def test_a_text_that_fails_ends_the_others(record: RequestRecord, tokenizer_path: Path) -> None:
    engines = StuckEngines()
    task = asyncio.create_task(serving(engines, tokenizer_path).compute(TEXTS, TextRequest()))
    while len(engines.calls) < MAX_IN_FLIGHT:
        await asyncio.sleep(0)
    engines.dispatches[5].script[:] = [RequestError("is wrong")]
    engines.go.set()
    with pytest.raises(RequestError, match="is wrong"):
        await task
    assert all(dispatch.ended is not None for dispatch in engines.dispatches)
