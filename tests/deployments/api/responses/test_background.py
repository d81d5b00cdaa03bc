"""Responses in the background: queued, in progress, completed, failed, cancelled, from any ingress."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
from starlette.testclient import TestClient

from deployments.ingress import Ingress
from engine.errors import EngineDeadError, RequestError
from tests.deployments.api.responses.conftest import PATH, comparable, create, rejected
from tests.deployments.api.responses.official import check_response
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
