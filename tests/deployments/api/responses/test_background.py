"""Responses in the background: queued, in progress, completed, failed, cancelled, from any ingress."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from typing import Any
from unittest.mock import MagicMock

import pytest
from starlette.testclient import TestClient

from deployments.api.responses import event_log, kept_responses
from deployments.errors import ApiError
from deployments.ingress import Ingress
from deployments.request_log.record import CLIENT_CLOSED, RequestRecord
from engine.errors import EngineDeadError, RequestError
from tests.deployments.api.responses.conftest import PATH, comparable, create, rejected, stream
from tests.deployments.api.responses.official import check_events, check_response, events_of
from tests.deployments.conftest import OpenClient
from tests.deployments.fakes import FakeDispatch, FakeEngines, output
from tests.waiting import until, until_in_loop

HELD = [output([70]), None, output([71, 2], "stop", cached=4)]  # None: until the test lets it go on


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Engines send what comes after a None of their scripts once this is set."""
    released = threading.Event()

    async def wait(dispatch: FakeDispatch) -> None:
        await until_in_loop(released.is_set, "the test lets the engine go on")

    monkeypatch.setattr(FakeDispatch, "wait", wait)
    return released


def start(client: TestClient, **body: Any) -> str:
    """Return the id of a response in the background."""
    response = create(client, background=True, **body)
    assert (response["status"], response["background"], response["output"]) == ("queued", True, [])
    return str(response["id"])


def retrieve(client: TestClient, response_id: str) -> dict[str, Any]:
    answer = client.get(f"{PATH}/{response_id}")
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    check_response(response)
    return response


def until_it_is(client: TestClient, response_id: str, status: str) -> dict[str, Any]:
    return until(
        lambda: response if (response := retrieve(client, response_id))["status"] == status else None,
        f"the response is {status}",
    )


def test_a_response_goes_through_its_stages_at_every_ingress(
    open_client: OpenClient, engines: FakeEngines, release: threading.Event
) -> None:
    maker, other = open_client(), open_client()
    engines.scripts = [[None, *HELD]]
    response_id = start(maker, metadata={"a": "b"})
    assert retrieve(other, response_id)["status"] == "queued"
    engines.scripts = [HELD]
    response_id = start(maker, metadata={"a": "b"})
    for client in (maker, other):
        until_it_is(client, response_id, "in_progress")
        error = rejected(client, previous_response_id=response_id)
        assert error["param"] == "previous_response_id"
        assert "is in_progress; give one that is completed" in error["message"]
        (item,) = client.get(f"{PATH}/{response_id}/input_items").json()["data"]
        assert item["content"][0]["text"] == "Hi"
    release.set()
    ended = until_it_is(other, response_id, "completed")
    assert maker.get(f"{PATH}/{response_id}").json() == ended
    direct = create(maker, metadata={"a": "b"})
    assert comparable(ended) == comparable(direct) | {"background": True}
    assert create(other, previous_response_id=response_id)["status"] == "completed"


def test_a_response_is_cancelled_from_another_ingress(
    open_client: OpenClient, engines: FakeEngines, release: threading.Event
) -> None:
    maker, other = open_client(), open_client()
    engines.scripts = [HELD]
    response_id = start(maker)
    until_it_is(maker, response_id, "in_progress")
    cancelled = other.post(f"{PATH}/{response_id}/cancel")
    assert cancelled.status_code == 200, cancelled.text
    check_response(cancelled.json())
    assert (cancelled.json()["status"], cancelled.json()["id"]) == ("cancelled", response_id)
    until(lambda: engines.dispatches[-1].ended, "the engine's request is aborted")
    for client in (maker, other):  # a second time changes nothing
        assert client.post(f"{PATH}/{response_id}/cancel").json() == cancelled.json() == retrieve(client, response_id)
        assert "is cancelled" in rejected(client, previous_response_id=response_id)["message"]


def test_a_response_is_cancelled_before_it_starts(client: TestClient, ingress: Ingress) -> None:
    """The task that computes it may not have run yet."""
    background = ingress.endpoints.responses.kept.background
    real = background.start

    def start_and_cancel(request: Any, items: Any, head: Any, *rest: Any) -> Any:
        response = real(request, items, head, *rest)
        background.cancel(head.id)
        return response

    background.start = start_and_cancel  # type: ignore[method-assign]
    response_id = start(client)
    assert retrieve(client, response_id)["status"] == "cancelled"
    until(lambda: not ingress._unfinished, "the request has ended")


def test_what_has_ended_is_not_cancelled(client: TestClient) -> None:
    response_id = start(client)
    ended = until_it_is(client, response_id, "completed")
    assert client.post(f"{PATH}/{response_id}/cancel").json() == ended
    direct = client.post(f"{PATH}/{create(client)['id']}/cancel")
    assert direct.status_code == 400
    assert "not created with background=true" in direct.json()["error"]["message"]
    for unknown in ("resp_" + "0" * 32, "resp_1"):
        answer = client.post(f"{PATH}/{unknown}/cancel")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")


def test_a_response_that_is_deleted_ends_and_does_not_come_back(
    open_client: OpenClient, engines: FakeEngines, release: threading.Event, ingresses: list[Any]
) -> None:
    maker, other = open_client(), open_client()
    engines.scripts = [HELD]
    response_id = start(maker)
    assert other.delete(f"{PATH}/{response_id}").json()["deleted"]
    until(lambda: engines.dispatches[-1].ended, "the engine's request is aborted")
    ingresses[0].endpoints.responses.kept.background.complete({"id": response_id, "output": [], "status": "completed"})
    assert maker.get(f"{PATH}/{response_id}").status_code == 404


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        (RequestError("is bad", param="structured_outputs"), "invalid_prompt", "text.format is bad"),
        (EngineDeadError("gone"), "server_error", "1 replicas were lost"),
    ],
)
def test_a_response_that_fails_says_why(
    open_client: OpenClient, engines: FakeEngines, failure: Exception, code: str, message: str
) -> None:
    client = open_client(limits={"max_migrations": 0})
    engines.scripts = [[output([70]), failure]]
    response_id = start(client, text={"format": {"type": "json_object"}})
    failed = until_it_is(client, response_id, "failed")
    assert failed["error"]["code"] == code
    assert message in failed["error"]["message"], failed
    assert "is failed" in rejected(client, previous_response_id=response_id)["message"]


def started_stream(client: TestClient, ingress: Any) -> str:
    """Return the id of a stream in the background; its client, in a thread, gets the events at its end."""

    def follow() -> None:
        with suppress(Exception):  # a test may end, and close its client, while the stream goes on
            client.post(PATH, json={"input": "Hi", "background": True, "stream": True})

    threading.Thread(target=follow, daemon=True).start()
    logs = ingress.endpoints.responses.kept.background._logs
    return str(until(lambda: next(iter(logs), None), "the response is created"))


def followed(client: TestClient, response_id: str, known: int = -1) -> list[dict[str, Any]]:
    """Return the events of a stream in the background after a known one."""
    query = {"stream": "true"} | ({"starting_after": str(known)} if known >= 0 else {})
    answer = client.get(f"{PATH}/{response_id}", params=query)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events_of(answer.text, known + 1)


def test_a_stream_in_the_background_is_that_of_a_waiting_client(client: TestClient) -> None:
    direct = stream(client)
    events = stream(client, background=True)
    ended = check_events(events)
    assert comparable(ended) == comparable(check_events(direct)) | {"background": True}
    kinds = [event["type"] for event in events]
    assert kinds.pop(1) == "response.queued"
    assert kinds == [event["type"] for event in direct]
    until_it_is(client, ended["id"], "completed")
    assert retrieve(client, ended["id"]) == ended


def test_a_stream_is_followed_from_any_event_at_every_ingress(
    open_client: OpenClient,
    engines: FakeEngines,
    release: threading.Event,
    ingresses: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_log, "COMMENT_S", 0.01)  # several are over before the next event
    maker, other = open_client(), open_client()
    engines.scripts = [[None, *HELD]]
    response_id = started_stream(maker, ingresses[0])
    assert retrieve(other, response_id)["status"] == "queued"
    waiting = ThreadPoolExecutor(1).submit(followed, maker, response_id, 1)
    until(lambda: ingresses[0].endpoints.responses.kept.background._logs[response_id]._waiters, "a client waits")
    threading.Timer(0.1, release.set).start()
    events = followed(other, response_id)
    assert waiting.result() == events[2:]
    assert check_events(deepcopy(events)) == until_it_is(maker, response_id, "completed")
    assert len(events) > 6
    for client in (maker, other):  # also after its end
        assert followed(client, response_id) == events
        for known in (0, 4, len(events) - 2):
            assert followed(client, response_id, known) == events[known + 1 :]
        after_the_end = {"stream": "true", "starting_after": str(len(events) + 5)}
        assert client.get(f"{PATH}/{response_id}", params=after_the_end).text == ""


def test_a_stream_in_the_background_ends_with_a_failure(open_client: OpenClient, engines: FakeEngines) -> None:
    client = open_client(limits={"max_migrations": 0})
    for script in ([EngineDeadError("gone")], [output([70]), EngineDeadError("gone")]):
        engines.scripts = [script]
        events = stream(client, background=True)
        last = events[-1]
        assert last["type"] == "response.failed"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        failed = until_it_is(client, last["response"]["id"], "failed")
        assert failed["error"] == last["response"]["error"]
        assert followed(client, failed["id"]) == events


@pytest.mark.parametrize("ending", ["cancel", "delete"])
def test_a_stream_ends_when_its_response_is_cancelled_or_deleted(
    ending: str, client: TestClient, ingress: Ingress, engines: FakeEngines, release: threading.Event
) -> None:
    engines.scripts = [HELD]
    response_id = started_stream(client, ingress)
    until_it_is(client, response_id, "in_progress")
    end = client.post(f"{PATH}/{response_id}/cancel") if ending == "cancel" else client.delete(f"{PATH}/{response_id}")
    assert end.status_code == 200
    until(lambda: engines.dispatches[-1].ended, "the engine's request is aborted")
    if ending == "cancel":
        kinds = [event["type"] for event in followed(client, response_id)]
        assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    else:
        assert client.get(f"{PATH}/{response_id}?stream=true").status_code == 404


def test_a_client_that_follows_a_deleted_response_gets_an_end(
    open_client: OpenClient, ingresses: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = open_client()
    monkeypatch.setattr(kept_responses, "COMMENT_S", 0.01)
    response_id = check_events(stream(client, background=True))["id"]
    kept = ingresses[0].endpoints.responses.kept
    find, first = kept._find_events, []

    async def find_and_delete(*arguments: Any) -> Any:
        first.append(await find(*arguments))
        kept.delete_own(response_id)
        return first[-1]

    kept._find_events = find_and_delete
    assert client.get(f"{PATH}/{response_id}?stream=true").text.strip(":\n") == ""
    assert first[0] is not None
    assert first[1:] == [None] * 5


def test_events_beyond_the_limit_are_not_kept_and_the_response_is(open_client: OpenClient) -> None:
    client = open_client(limits={"max_stored_response_bytes": 4000})
    ended = check_events(stream(client, background=True))
    assert retrieve(client, ended["id"]) == ended
    answer = client.get(f"{PATH}/{ended['id']}?stream=true")
    assert answer.status_code == 400
    assert "limits.max_stored_response_bytes" in answer.json()["error"]["message"]


def test_a_client_that_leaves_its_background_stream_has_not_aborted_it() -> None:
    record = RequestRecord("1", PATH)
    assert record.client_disconnected
    record.background = MagicMock()
    assert not record.client_disconnected
    record.error = ApiError(CLIENT_CLOSED, "the response was cancelled")
    assert record.client_disconnected


def test_what_cannot_be_followed(client: TestClient) -> None:
    for response_id in (create(client)["id"], start(client)):
        until_it_is(client, response_id, "completed")
        answer = client.get(f"{PATH}/{response_id}?stream=true")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")
        assert "background=true and stream=true" in answer.json()["error"]["message"]
    answer = client.get(f"{PATH}/resp_{'0' * 32}?stream=true")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
    ended = check_events(stream(client, background=True))
    for wrong in ("-1", "x", "1" * 40):
        answer = client.get(f"{PATH}/{ended['id']}", params={"stream": "true", "starting_after": wrong})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "starting_after")


def test_what_cannot_be_computed_in_the_background(open_client: OpenClient) -> None:
    error = rejected(open_client(), background=True, store=False)
    assert (error["param"], "leave out store" in error["message"]) == ("background", True)
    error = rejected(open_client(limits={"max_stored_responses": 0}), background=True)
    assert (error["param"], "limits.max_stored_responses" in error["message"]) == ("background", True)
    assert rejected(open_client(), background=True, top_k=-5)["param"] == "top_k"  # at once


def test_a_request_ends_when_its_response_does(
    client: TestClient,
    ingress: Ingress,
    engines: FakeEngines,
    release: threading.Event,
    serve_log: list[logging.LogRecord],
) -> None:
    """A pod that drains waits for it, and the log line has its tokens."""
    engines.scripts = [HELD]
    response_id = start(client)
    until_it_is(client, response_id, "in_progress")
    assert len(ingress._unfinished) == 1
    assert not [line for line in serve_log if "request finished" in line.getMessage()]
    release.set()
    until_it_is(client, response_id, "completed")
    until(lambda: not ingress._unfinished, "the request has ended")
    line = next(line.getMessage() for line in serve_log if "request finished" in line.getMessage())
    assert "output_tokens=3" in line
    assert "reason=stop status=200" in line
    engines.scripts = [HELD]
    release.clear()
    until_it_is(client, cancelled := start(client), "in_progress")
    client.post(f"{PATH}/{cancelled}/cancel")
    until(lambda: not ingress._unfinished, "the request has ended")
    assert "reason=abort status=499" in serve_log[-1].getMessage()
