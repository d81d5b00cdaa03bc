"""However an answer is cut into pieces, the events of a stream add up to the output of the whole response."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.api.openai.answer_formats import AnswerFormat
from deployments.api.responses.output import Output
from deployments.api.responses.protocol import ResponseRequest
from deployments.api.responses.resource import ResponseResource
from deployments.api.responses.writers import ResponseEvents
from deployments.api.writers import ResponseHead
from deployments.parsers.registry import Parsers
from deployments.requests.generation import Delta, Generation
from deployments.requests.prompt import Prompt
from engine.outputs import Logprob
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.deployments.api.responses.conftest import comparable
from tests.deployments.api.responses.official import check_events, events_of
from tests.deployments.parsers.shapes import TOOLS
from tests.deployments.parsers.test_chunking import EXTRA, FAMILIES, JSON_PIECES, cut, markers

NO_LOGPROBS: dict[str, Any] = {"token": "a", "bytes": [97], "logprob": -1.0, "top_logprobs": []}


class Generated:
    """A generation whose tokens are characters."""

    def __init__(self, text: str) -> None:
        self.params = SamplingParams(max_tokens=10_000)
        self.prompt = Prompt(EngineRequest("", [1, 2, 3]), [])
        self.token_ids = [ord(character) for character in text]
        self.num_cached_tokens = 0
        self.num_accepted_predicted = self.num_rejected_predicted = 0


def answer_format(names: tuple[str | None, str | None], prompt: str = "") -> AnswerFormat:
    family = Parsers(*names).family(TOOLS if names[0] else None, prompt)
    assert family is not None
    return AnswerFormat(family)


def written(form: AnswerFormat, pieces: list[str], finish_reason: str = "stop") -> dict[str, Any]:
    """Return the response at the end of a stream whose answer comes in pieces."""
    generation = Generated("".join(pieces))
    resource = ResponseResource(ResponseHead("resp_1", 1, "m"), ResponseRequest(input="Hi"), is_stored=False)
    events = ResponseEvents(resource, Output(form, None), None, cast(Generation, generation))
    sent = b"".join(events.chunk(Delta(0, piece, [ord(character) for character in piece])) for piece in pieces)
    sent += events.chunk(Delta(0, "", [], finish_reason)) + events.end()
    return check_events(events_of(sent.decode()))


def without_counts(response: dict[str, Any]) -> dict[str, Any]:
    """Return what does not depend on the cut: the tokens of a piece all belong to one item."""
    usage = response["usage"] | {"output_tokens_details": None}
    fields: dict[str, Any] = comparable(response | {"usage": usage})
    return fields


@pytest.mark.parametrize("family", FAMILIES)
def test_every_shape(family: str) -> None:
    names, shapes = FAMILIES[family]
    for shape in shapes:
        whole = written(answer_format(names), [shape.text])
        assert without_counts(written(answer_format(names), list(shape.text))) == without_counts(whole), shape.name


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_random_text_however_it_is_cut(family: str, data: Any) -> None:
    names, shapes = FAMILIES[family]
    pieces = st.sampled_from([*markers(*names), *JSON_PIECES, *EXTRA, *(shape.text for shape in shapes)])
    text = "".join(data.draw(st.lists(pieces | st.text(max_size=3), max_size=8)))
    positions = data.draw(st.lists(st.integers(0, max(1, len(text))), max_size=10))
    reason = data.draw(st.sampled_from(["stop", "length"]))
    whole = written(answer_format(names), [text], reason)
    streamed = written(answer_format(names), cut(text, positions), reason)
    assert without_counts(streamed) == without_counts(whole)
    assert whole["output"]
    assert all(item["status"] == "completed" for item in whole["output"][:-1])
    assert (whole["output"][-1]["status"] == "completed") == (reason == "stop")
    details = streamed["usage"]["output_tokens_details"]
    assert 0 <= details["reasoning_tokens"] <= len(text)


def test_no_token_has_its_log_probabilities_twice() -> None:
    """A piece may have several messages: its tokens belong to the last."""
    text = 'a<tool_call>{"name": "f", "arguments": {}}</tool_call>b'
    output = Output(answer_format(("hermes", None)), lambda tokens: [NO_LOGPROBS for _ in tokens])
    list(output.feed(text, [ord(character) for character in text], None, final=True))
    list(output.finish(is_complete=True))
    messages = [item for item in output.items() if item["type"] == "message"]
    logprobs = [part["logprobs"] for message in messages for part in message["content"]]
    assert [len(position) for position in logprobs] == [0, len(text)]


def test_each_token_has_its_log_probabilities() -> None:
    with pytest.raises(ValueError, match="shorter"):
        list(Output(None, None).feed("ab", [70, 71], [{70: Logprob(-1.0, 1)}], final=False))
