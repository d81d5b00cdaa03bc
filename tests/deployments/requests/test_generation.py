"""One answer whose replicas die, are full, reject it, or end early."""

from __future__ import annotations

import gc
import logging
import weakref
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError, TaskCancelledError
from ray.serve.exceptions import RequestCancelledError

from deployments.errors import ReplicasLostError, as_api_error
from deployments.requests.generation import Delta, Generation
from deployments.requests.prompt import Prompt
from deployments.requests.replication import Replication
from deployments.transport.request_channel.dispatch import Dispatch
from deployments.transport.request_channel.errors import HandedOverError, StreamPausedError
from engine.errors import EngineDeadError, OverloadedError, RequestError
from engine.kv.prefix_hash import hash_blocks
from engine.options.structured_outputs import StructuredOutputsParams
from engine.outputs import EngineOutput
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.deployments.fakes import FakeEngines, FakeText, Script, output


def _generation(
    scripts: list[Script], *, stop: str | None = None, prompt_only: bool = False, **params: Any
) -> tuple[Generation, FakeEngines]:
    engines = FakeEngines(scripts)
    request = EngineRequest("id", [1, 2, 3], SamplingParams(**({"max_tokens": 6} | params)))
    text: Any = FakeText(stop)
    return Generation(engines, request, Prompt(request, [77]), text, prompt_only=prompt_only), engines


async def _all(generation: Generation) -> list[Delta]:
    return [delta async for delta in generation.deltas()]


async def test_tokens_become_deltas() -> None:
    generation, engines = _generation([[output([5], cached=2), output([6, 7], "stop", cached=2)]])
    deltas = await _all(generation)
    assert "".join(delta.text for delta in deltas) == "<5><6><7>"
    assert [delta.finish_reason for delta in deltas] == [None, "stop"]
    assert (generation.token_ids, generation.num_cached_tokens, generation.replica) == ([5, 6, 7], 2, "r1")
    assert engines.calls[0][1] == {"block_hashes": [77], "avoid": []}
    assert engines.dispatches[0].ended is not None


async def test_a_stop_string_ends_the_request_at_the_replica_too() -> None:
    generation, engines = _generation([[output([5]), output([6, 7]), output([8])]], stop="<7>")
    deltas = await _all(generation)
    assert [delta.text for delta in deltas] == ["<5>", "<6>"]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "<7>")
    assert engines.dispatches[0].ended is not None


async def test_tokens_after_a_stop_string_are_not_counted() -> None:
    generation, _ = _generation([[output([5]), output([6, 7, 8, 9])]], stop="<7>")
    deltas = await _all(generation)
    assert [delta.token_ids for delta in deltas] == [[5], [6, 7]]
    assert generation.token_ids == [5, 6, 7]


@pytest.mark.parametrize("loss", [ActorDiedError(), EngineDeadError("gone")])
async def test_after_a_loss_the_next_replica_continues_the_answer(loss: Exception) -> None:
    first: Script = [output([5]), output([6, 7]), loss]
    second: Script = [output([8], replica="r2", cached=4), output([9, 10], "length", replica="r2", cached=4)]
    generation, engines = _generation([first, second], min_tokens=4, temperature=0)
    deltas = await _all(generation)
    assert "".join(delta.text for delta in deltas) == "<5><6><7><8><9><10>"
    request, kwargs = engines.calls[1]
    assert (request.prompt_token_ids, request.output_token_ids) == ([1, 2, 3], [5, 6, 7])
    assert request.params == engines.calls[0][0].params  # the engine counts what was generated before
    assert request.request_id != "id"
    assert kwargs["avoid"] == ["r1"]
    assert generation.num_cached_tokens == 0  # of the prompt as the client sent it
    assert generation.replica == "r2"


async def test_logprobs_survive_a_loss() -> None:
    first: Script = [output([5], logprobs=[-0.5], prompt_logprobs=True), output([6], logprobs=[-1.5]), ActorDiedError()]
    second: Script = [output([7, 8], "length", logprobs=[-2.0, -4.0], replica="r2")]
    form = StructuredOutputsParams(regex="a+")
    asked: dict[str, Any] = {"frequency_penalty": 1.0, "structured_outputs": form, "logprobs": 0, "prompt_logprobs": 0}
    generation, engines = _generation([first, second], **asked)
    deltas = await _all(generation)
    assert [
        logprobs[token].logprob for d in deltas for token, logprobs in zip(d.token_ids, d.logprobs or (), strict=True)
    ] == [
        -0.5,
        -1.5,
        -2.0,
        -4.0,
    ]
    assert generation.mean_logprob == -2.0
    assert generation.prompt_logprobs is not None
    params = engines.calls[1][0].params
    assert (params.frequency_penalty, params.structured_outputs, params.logprobs) == (1.0, form, 0)
    assert params.prompt_logprobs is None  # not computed a second time


async def test_before_the_first_token_the_same_request_is_sent_again() -> None:
    generation, engines = _generation([[ActorDiedError()], [output([5], "stop")]], prompt_logprobs=1)
    await _all(generation)
    assert engines.calls[1][0].params == engines.calls[0][0].params
    assert engines.calls[1][0].output_token_ids == []


async def test_logprobs_after_a_stop_string_are_cut_with_their_tokens() -> None:
    script: Script = [output([5], logprobs=[-1.0]), output([6, 7, 8], logprobs=[-2.0, -3.0, -4.0])]
    generation, _ = _generation([script], stop="<7>", logprobs=0)
    deltas = await _all(generation)
    assert [len(delta.logprobs or ()) for delta in deltas] == [1, 2]
    assert generation.mean_logprob == -2.0


async def test_prompt_only_drops_the_token_that_the_engine_generates() -> None:
    generation, _ = _generation([[output([5], "stop", logprobs=[-1.0], prompt_logprobs=True)]], prompt_only=True)
    deltas = await _all(generation)
    assert [(delta.text, delta.token_ids, delta.finish_reason, delta.logprobs) for delta in deltas] == [
        ("", [], "length", [])
    ]
    assert generation.prompt_logprobs is not None
    assert generation.mean_logprob == float("-inf")


async def test_too_many_losses_are_an_error() -> None:
    generation, engines = _generation([[output([5]), ActorDiedError()]], max_tokens=100)
    with pytest.raises(ReplicasLostError, match="4 replicas were lost") as caught:
        await _all(generation)
    answer = as_api_error(caught.value)
    assert (answer.status, answer.code, answer.retry_after_s) == (503, "replica_lost", 1)
    assert answer.message == "4 replicas were lost while they served this request; try again"
    assert len(engines.calls) == 4


async def test_a_full_replica_is_no_loss_and_another_one_is_tried() -> None:
    full = OverloadedError("full")
    full.replica = "r1"
    generation, engines = _generation([[full], [output([5], "stop", replica="r2")]])
    await _all(generation)
    assert [call[1]["avoid"] for call in engines.calls] == [[], ["r1"]]


async def test_a_loss_is_no_refusal_and_a_refusal_no_loss() -> None:
    """A request may be moved and then find a full replica: each of the two has a limit of its own."""
    full = OverloadedError("full")
    full.replica = "r2"
    scripts: list[Script] = [[output([5]), ActorDiedError()], [full], [output([6], "stop", replica="r3")]]
    generation, engines = _generation(scripts)
    await _all(generation)
    assert generation.token_ids == [5, 6]
    assert generation.num_migrations == 1
    assert [call[1]["avoid"] for call in engines.calls] == [[], ["r1"], ["r1", "r2"]]


async def test_a_full_replica_that_is_avoided_already_or_has_no_name_ends_the_request() -> None:
    """Then no other replica is left, or none can be avoided."""
    lost, full, nameless = EngineDeadError("gone"), OverloadedError("full"), OverloadedError("full")
    lost.replica = full.replica = "r1"
    answer = [output([5], "stop", replica="r2")]
    for scripts in ([[lost], [full], answer], [[nameless], answer]):
        generation, engines = _generation(scripts)
        with pytest.raises(OverloadedError):
            await _all(generation)
        assert len(engines.calls) == len(scripts) - 1


async def test_when_all_replicas_are_full_the_request_fails() -> None:
    scripts: list[Script] = []
    for number in range(9):
        full = OverloadedError("full")
        full.replica = f"r{number}"
        scripts.append([full])
    generation, engines = _generation(scripts)
    with pytest.raises(OverloadedError):
        await _all(generation)
    assert len(engines.calls) == 2
    overload = OverloadedError("full")
    overload.replica = "r1"
    generation, engines = _generation([[overload]])  # the only replica there is
    with pytest.raises(OverloadedError):
        await _all(generation)
    assert len(engines.calls) == 2


async def test_replicas_that_die_before_a_token_are_avoided_by_name() -> None:
    dead = []
    for name in ("r1", "r2"):
        dead.append(EngineDeadError("gone"))
        dead[-1].replica = name
    generation, engines = _generation([[dead[0]], [dead[1]], [output([5], "stop", replica="r3")]])
    await _all(generation)
    assert [call[1]["avoid"] for call in engines.calls] == [[], ["r1"], ["r1", "r2"]]
    assert generation.replica == "r3"


async def test_a_stream_that_ends_without_a_reason_is_a_loss() -> None:
    generation, engines = _generation([[output([5])], [output([6], "length", replica="r2")]])
    assert [delta.finish_reason for delta in await _all(generation)] == [None, "length"]
    assert engines.calls[1][0].output_token_ids == [5]


async def test_an_answer_that_moves_takes_the_hashes_of_its_own_blocks_along() -> None:
    request = EngineRequest("id", [1, 2, 3], SamplingParams(max_tokens=6))
    prompt = Prompt(request, [], root=9, block_size=2)
    prompt = replace(prompt, block_hashes=hash_blocks([1, 2, 3], 2, 9))
    scripts: list[Script] = [[output([5]), output([6, 7]), EngineDeadError("gone")], [output([8], "length")]]
    engines, text = FakeEngines(scripts), FakeText()
    await _all(Generation(engines, request, prompt, text))  # type: ignore[arg-type]
    assert [call[1]["block_hashes"] for call in engines.calls] == [
        hash_blocks([1, 2, 3], 2, 9),
        hash_blocks([1, 2, 3, 5, 6, 7], 2, 9),
    ]
    assert prompt.block_hashes == hash_blocks([1, 2, 3], 2, 9)


async def test_an_answer_that_is_handed_over_continues_with_its_replica_as_a_source() -> None:
    handed_over = HandedOverError("shuts down")
    handed_over.replica = "r1"
    scripts: list[Script] = [
        [output([5]), handed_over],
        [output([6], replica="r2"), EngineDeadError("gone")],
        [output([7], "length")],
    ]
    generation, engines = _generation(scripts)
    assert [delta.text for delta in await _all(generation)] == ["<5>", "<6>", "<7>"]
    assert [call[1].get("handed_over_by") for call in engines.calls] == [None, "r1", None]
    assert [call[1]["avoid"] for call in engines.calls] == [[], [], ["r2"]]
    assert generation.num_migrations == 1  # no replica was lost when the first one handed it over


async def test_a_paused_answer_continues_wherever_it_is_sent_and_loses_no_replica() -> None:
    """Its client has read what there was."""
    paused: list[Script] = [[output([5 + number], logprobs=[-1.0]), StreamPausedError("slow")] for number in range(9)]
    generation, engines = _generation([*paused, [output([14], "length", logprobs=[-2.0])]], max_tokens=20, logprobs=0)
    assert [delta.text for delta in await _all(generation)] == [f"<{token}>" for token in range(5, 15)]
    assert [call[1]["avoid"] for call in engines.calls] == [[]] * 10
    assert engines.calls[-1][0].output_token_ids == list(range(5, 14))
    assert len({call[0].request_id for call in engines.calls}) == 10
    assert generation.num_migrations == 0
    assert generation.num_logprobs == 10
    assert not any(attempt.request.output_token_ids for attempt in generation.attempts)  # no copies are kept


class _Pausing(FakeEngines):
    """Each request's outputs have arrived in a Dispatch when it is paused."""

    def send(self, request: EngineRequest, block_hashes: Any, **how: Any) -> Any:
        dispatch = Dispatch(request, block_hashes)
        for item in super().send(request, block_hashes, **how).script:
            assert isinstance(item, EngineOutput)
            dispatch.put(item)
        dispatch.fail(StreamPausedError("slow"))
        return dispatch


async def test_an_answer_that_was_continued_is_freed_without_a_garbage_collection() -> None:
    """It holds its prompt and maybe all log-probabilities, and an ingress seldom collects old objects."""
    engines: Any = _Pausing([[output([5])], [output([6], "length")]])
    text: Any = FakeText()
    generation = Generation(engines, EngineRequest("id", [1]), Prompt(EngineRequest("", [1]), []), text)
    gc.disable()
    try:
        await _all(generation)
        assert len(generation.attempts) == 2
        freed = weakref.ref(generation)
        del generation
        assert freed() is None
    finally:
        gc.enable()


async def test_a_stream_does_not_keep_its_logprobs() -> None:
    request = EngineRequest("id", [1], SamplingParams(max_tokens=2, logprobs=0))
    text: Any = FakeText()
    engines = FakeEngines([[output([5], logprobs=[-1.0]), output([6], "length", logprobs=[-2.0])]])
    generation = Generation(engines, request, Prompt(EngineRequest("", [1]), []), text, keeps_logprobs=False)
    assert [len(delta.logprobs or ()) for delta in await _all(generation)] == [1, 1]
    assert generation.num_logprobs == 0


@pytest.mark.parametrize("error", [TaskCancelledError(), GetTimeoutError(), RequestCancelledError("x")])
async def test_a_cancelled_request_is_not_sent_again(error: Exception) -> None:
    generation, engines = _generation([[output([5]), error]])
    with pytest.raises(type(error)):
        await _all(generation)
    assert len(engines.calls) == 1


async def test_an_invalid_request_is_not_sent_again() -> None:
    generation, engines = _generation([[RequestError("is bad", param="prompt")]])
    with pytest.raises(RequestError):
        await _all(generation)
    assert len(engines.calls) == 1
    assert (generation.token_ids, generation.num_cached_tokens) == ([], 0)


async def test_closing_a_generation_cancels_the_call() -> None:
    generation, engines = _generation([[output([5]), output([6])]])
    async with aclosing(generation.deltas()) as deltas:
        await anext(deltas)
    assert engines.dispatches[0].ended is not None


class CopyingEngines(FakeEngines):
    """A dispatcher that lets neighbours copy, until ``error`` is set."""

    error: Exception | None = None
    length_at_copy = 0

    def copy(self, dispatch: Dispatch, hashes: list[int], token_ids: list[int]) -> float:
        self.length_at_copy = len(token_ids)
        if self.error is not None:
            raise self.error
        return len(token_ids) + 1


def _copied_generation(scripts: list[Script]) -> tuple[Generation, CopyingEngines]:
    unused: Any = None
    engines = CopyingEngines(scripts, replication=Replication(unused, 1, unused))
    request = EngineRequest("id", [1, 2, 3], SamplingParams(max_tokens=6))
    prompt = Prompt(request, hash_blocks([1, 2, 3], 2, 9), root=9, block_size=2)
    text: Any = FakeText()
    return Generation(engines, request, prompt, text), engines


async def test_a_copy_that_fails_is_logged_and_fails_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    generation, engines = _copied_generation([[output([5]), output([6]), output([7], "stop")]])
    engines.error = EngineDeadError("of the copy")
    with caplog.at_level(logging.ERROR, "ray.serve"):
        assert "".join(delta.text for delta in await _all(generation)) == "<5><6><7>"
    assert len(engines.calls) == 1  # it has not moved
    (record,) = caplog.records
    assert record.getMessage() == "the KV of id is copied no further"


async def test_tokens_reach_the_client_before_they_are_copied() -> None:
    generation, engines = _copied_generation([[output([5]), output([6]), output([7], "stop")]])
    lengths = [(len(generation.token_ids), engines.length_at_copy) async for _ in generation.deltas()]
    assert lengths == [(1, 0), (2, 1), (3, 2)]


async def test_the_blocks_of_a_request_that_was_sent_do_not_grow_with_its_answer() -> None:
    first: Script = [output([4]), ActorDiedError()]
    generation, engines = _copied_generation([first, [output([5]), output([6]), output([7], "stop")]])
    await _all(generation)
    assert [len(dispatch.block_hashes) for dispatch in engines.dispatches] == [1, 2]
