"""The outputs of a dispatch, from the link to the reader."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deployments.transport.request_channel.dispatch import Dispatch
from engine.errors import EngineDeadError
from engine.outputs import RequestTiming
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.deployments.fakes import output


def _dispatch(**params: Any) -> Dispatch:
    return Dispatch(EngineRequest("id", [1, 2, 3], SamplingParams(**params)))


@pytest.mark.parametrize(("params", "streams"), [({}, True), ({"temperature": 0.0, "beam_width": 2}, False)])
def test_a_dispatch_knows_whether_its_tokens_come_together(params: dict[str, Any], streams: bool) -> None:
    assert _dispatch(**params).streams_tokens is streams


async def test_what_has_arrived_meanwhile_is_one_output() -> None:
    dispatch = _dispatch()
    dispatch.put(output([5], cached=2))
    for token in (6, 7):
        dispatch.put_token(token)
    dispatch.put(output([8], "stop", cached=2))
    dispatch.fail(EngineDeadError("too late"))
    taken = await dispatch.next()
    assert taken is not None
    assert taken.token_ids == [5, 6, 7, 8]
    assert taken.finish_reason == "stop"
    assert (dispatch.num_tokens, dispatch.num_cached_tokens) == (4, 2)


async def test_tokens_that_are_taken_together_name_their_replica() -> None:
    dispatch = _dispatch()
    dispatch.replica = "r1"
    for token in (6, 7):
        dispatch.put_token(token)
    taken = await dispatch.next()
    assert taken is not None
    assert (taken.token_ids, taken.replica) == ([6, 7], "r1")


async def test_the_first_error_comes_after_the_outputs_and_stays() -> None:
    dispatch = _dispatch()
    dispatch.put_token(5)
    dispatch.fail(TimeoutError("inside"))
    dispatch.fail(EngineDeadError("later"))
    taken = await dispatch.next()
    assert taken is not None
    assert taken.token_ids == [5]
    for _ in range(2):
        with pytest.raises(TimeoutError, match="inside"):
            await dispatch.next()


async def test_a_wait_ends_with_an_output_an_error_or_a_wake() -> None:
    dispatch = _dispatch()
    for end, expected in ((dispatch.wake, None), (lambda: dispatch.put_token(5), [5])):
        reading = asyncio.create_task(dispatch.next())
        await asyncio.sleep(0)
        assert dispatch.wait_in_progress is not None
        end()
        end()  # the wait is over already
        taken = await reading
        assert (None if taken is None else taken.token_ids[:1]) == expected
        assert dispatch.wait_in_progress is None
    reading = asyncio.create_task(dispatch.next())
    await asyncio.sleep(0)
    dispatch.fail(EngineDeadError("gone"))
    with pytest.raises(EngineDeadError):
        await reading


async def test_each_answer_of_a_search_is_taken_by_itself() -> None:
    dispatch = _dispatch(temperature=0.0, beam_width=2)
    for index in range(2):
        dispatch.put(output([7 + index], "length", index=index))
    first, second = await dispatch.next(), await dispatch.next()
    assert first is not None
    assert second is not None
    assert [(output.index, output.token_ids) for output in (first, second)] == [(0, [7]), (1, [8])]


async def test_the_times_of_an_attempt() -> None:
    dispatch = _dispatch()
    assert (dispatch.first_token, dispatch.last_token, dispatch.timing) == (None, None, None)
    dispatch.put_token(5)
    await dispatch.next()
    first = dispatch.first_token
    assert first is not None
    assert dispatch.started <= first == dispatch.last_token
    timing = RequestTiming(0.1, 0.2, 0.3)
    dispatch.put(output([6], "stop", timing=timing))
    await dispatch.next()
    assert dispatch.first_token == first
    assert dispatch.last_token is not None
    assert dispatch.last_token >= first
    assert dispatch.timing == timing
