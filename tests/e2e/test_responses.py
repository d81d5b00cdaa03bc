"""The Responses API with the official client, on the shared server; and on the one with two ingresses."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from tests.deployments.api.responses.official import check_events, check_items, check_response, events_of
from tests.e2e.losses import stopped_engines
from tests.e2e.server import Server
from tests.waiting import HANG_S, until

ASKED: Any = {"model": "pagoda-demo", "input": "What is a KV cache?", "max_output_tokens": 40, "temperature": 0}
SHORT = ASKED | {"max_output_tokens": 2}
ENDLESS = ASKED | {"max_output_tokens": 1800, "extra_body": {"ignore_eos": True, "min_tokens": 1800}}
MANY = 8
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo", "Lima"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def api(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=HANG_S, max_retries=0) as client:
        yield client


def test_whole_and_streamed(api: openai.OpenAI, client: httpx.Client) -> None:
    whole = api.responses.create(**ASKED)
    assert whole.output_text
    assert whole.status in ("completed", "incomplete")
    with api.responses.stream(
        **{name: value for name, value in ASKED.items() if name != "max_output_tokens"}
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.output_text == text
    assert text.startswith(whole.output_text)
    raw = client.post("/v1/responses", json=ASKED)
    check_response(raw.json())
    streamed = check_events(events_of(client.post("/v1/responses", json=ASKED | {"stream": True}).text))
    assert streamed["output"][0]["content"] == raw.json()["output"][0]["content"]
    assert streamed["usage"]["output_tokens"] == raw.json()["usage"]["output_tokens"]


def test_a_conversation_reuses_the_prefix_cache(api: openai.OpenAI) -> None:
    first = api.responses.create(**ASKED | {"input": "Why is a KV cache paged?"})
    second = api.responses.create(**ASKED | {"input": "And who invented it?", "previous_response_id": first.id})
    assert first.usage is not None
    assert second.usage is not None
    tokens = first.usage.total_tokens
    # All blocks of 16 tokens of the first prompt and its answer, but for the last token, which has no keys yet.
    assert (
        second.usage.input_tokens_details.cached_tokens >= (tokens - 1) // 16 * 16 > first.usage.input_tokens // 16 * 16
    )
    items = api.responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in items] == ["message"] * 3
    assert api.responses.retrieve(second.id).output_text == second.output_text
    api.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="memory of the ingress"):
        api.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        api.responses.create(**ASKED, previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"


def test_forced_calls_and_their_outputs(api: openai.OpenAI) -> None:
    asked = ASKED | {"tools": [WEATHER], "max_output_tokens": 80}
    answer = api.responses.create(**asked, tool_choice={"type": "function", "name": "get_weather"})
    (call,) = answer.output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["city"] in ("Oslo", "Lima")
    with api.responses.stream(**asked, tool_choice="required", parallel_tool_calls=False) as stream:
        (streamed,) = stream.get_final_response().output
    assert streamed.type == "function_call"
    assert streamed.parsed_arguments["city"] in ("Oslo", "Lima")
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}]
    last = api.responses.create(**asked | {"input": result}, previous_response_id=answer.id, tool_choice="none")
    assert last.output[0].type == "message"


def test_text_in_a_form(api: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "name": "city", "schema": WEATHER["parameters"], "strict": True}
    answer = api.responses.create(**ASKED, text={"format": form})
    assert json.loads(answer.output_text)["city"] in ("Oslo", "Lima")
    with pytest.raises(openai.BadRequestError) as caught:
        api.responses.create(**ASKED, text={"format": form | {"schema": {"type": "x"}}})
    assert caught.value.param == "text.format.schema"


def test_log_probabilities(api: openai.OpenAI) -> None:
    answer = api.responses.create(**ASKED, include=["message.output_text.logprobs"], top_logprobs=2)
    message = answer.output[0]
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


def test_a_client_that_disconnects_aborts_and_stores_nothing(server: Server, client: httpx.Client) -> None:
    """It is sent again if its answer ends before the client can leave."""
    body = ASKED | {"stream": True, "max_output_tokens": 1800, "ignore_eos": True, "min_tokens": 1800}
    for attempt in range(5):
        headers = {"X-Request-Id": f"left-{attempt}"}
        with client.stream("POST", "/v1/responses", json=body, headers=headers) as stream:
            created = next(line for line in stream.iter_lines() if line.startswith("data: "))
        line = server.wait_for_line(f"id=left-{attempt} ")
        if "reason=abort" in line:
            break
    assert "reason=abort status=499" in line
    response_id = json.loads(created.removeprefix("data: "))["response"]["id"]
    assert client.get(f"/v1/responses/{response_id}").status_code == 404


def test_in_the_background(server: Server, api: openai.OpenAI) -> None:
    started = api.responses.create(**ASKED, background=True)
    assert started.status == "queued"

    def ended() -> Response | None:
        response = api.responses.retrieve(started.id)
        return None if response.status in ("queued", "in_progress") else response

    response = until(ended, "the response ends")
    assert response is not None
    assert response.output_text == api.responses.create(**ASKED).output_text
    with stopped_engines(server):  # or it might end by itself
        endless = api.responses.create(**ENDLESS, background=True, extra_headers={"X-Request-Id": "cancelled"})
        assert api.responses.cancel(endless.id).status == "cancelled"
    assert api.responses.retrieve(endless.id).status == "cancelled"
    line = server.wait_for_line("id=cancelled ")
    assert "reason=abort status=499" in line


# --- with two ingresses -----------------------------------------------------------------------------------------------


def _send(server: Server, method: str, path: str, **options: Any) -> httpx.Response:
    """Send a request on a connection of its own."""
    return httpx.request(method, f"{server.url}/v1/responses{path}", headers=server.headers, timeout=HANG_S, **options)


def _send_many(server: Server, method: str, path: str, **options: Any) -> list[httpx.Response]:
    """Send requests at once, so that they reach both ingresses."""
    with ThreadPoolExecutor(MANY) as threads:
        return list(threads.map(lambda _: _send(server, method, path, **options), range(MANY)))


def _ingresses(server: Server, path: str) -> set[str]:
    """Return the ingresses that have answered requests for a path."""
    counted = [dict(labels) for name, labels in server.metrics() if name == "pagoda_http_requests_total"]
    return {labels["ingress"] for labels in counted if (labels["path"], labels["status"]) == (path, "200")}


@pytest.mark.long
def test_every_ingress_finds_what_another_one_keeps(public_server: Server) -> None:
    stored: list[dict[str, Any]] = []

    def both_store() -> bool:
        stored.extend(answer.json() for answer in _send_many(public_server, "POST", "", json=SHORT))
        return len(_ingresses(public_server, "/v1/responses")) == 2

    until(both_store, "both ingresses store responses")  # HAProxy may not know the second one yet
    for response in stored[-MANY:]:
        path = f"/{response['id']}"
        assert all(answer.json() == response for answer in _send_many(public_server, "GET", path))
    assert len(_ingresses(public_server, "other")) == 2
    continued = SHORT | {"previous_response_id": stored[-1]["id"]}
    assert {answer.status_code for answer in _send_many(public_server, "POST", "", json=continued)} == {200}
    check_items(_send(public_server, "GET", f"/{stored[-1]['id']}/input_items").json())
    deleted = {answer.status_code for answer in _send_many(public_server, "DELETE", path)}
    assert deleted == {200, 404}  # once
    assert {answer.status_code for answer in _send_many(public_server, "GET", path)} == {404}
    body = ASKED | ENDLESS["extra_body"] | {"max_output_tokens": 1800, "background": True}
    with stopped_engines(public_server):  # or it might end by itself
        path = f"/{_send(public_server, 'POST', '', json=body).json()['id']}"
        cancelled = [answer.json() for answer in _send_many(public_server, "POST", f"{path}/cancel")]
    assert {response["status"] for response in cancelled} == {"cancelled"}
    assert {answer.json()["status"] for answer in _send_many(public_server, "GET", path)} == {"cancelled"}
    _kill_an_ingress(public_server)
    assert {_send(public_server, "GET", f"/{response['id']}").status_code for response in stored[:-1]} == {200, 404}


def _kill_an_ingress(server: Server) -> None:
    """Kill one ingress, and wait until it has been replaced and gets no more requests."""
    os.kill(next(iter(server.pids("ingress").values())), signal.SIGKILL)
    until(lambda: len(server.live_pids("ingress")) == 2, "the ingress is replaced")
    until(lambda: all(_is_healthy(server) for _ in range(10)), "ten requests succeed, one after the other")


def _is_healthy(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/health", timeout=HANG_S).is_success
    except httpx.TransportError:
        return False


def test_a_stream_in_the_background_outlives_its_client(api: openai.OpenAI) -> None:
    asked: Any = ASKED | {"max_output_tokens": 400, "extra_body": {"ignore_eos": True, "min_tokens": 400}}
    with api.responses.create(**asked, background=True, stream=True) as stream:
        first = next(iter(stream))
    assert first.type == "response.created"
    response_id = first.response.id
    events = list(api.responses.retrieve(response_id, stream=True, starting_after=first.sequence_number))
    assert [event.sequence_number for event in events] == list(range(1, len(events) + 1))
    last = events[-1]
    assert last.type == "response.incomplete"
    assert api.responses.retrieve(response_id) == last.response
    assert list(api.responses.retrieve(response_id, stream=True, starting_after=5)) == events[5:]
