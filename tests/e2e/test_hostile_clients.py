"""Clients that mean harm or are broken: each gets an answer, none costs another client anything."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable
from itertools import islice

import httpx
import pytest

from tests.e2e.hostile import Answer, Sent, each_once, exchange, in_a_hurry, json_error, mixtures, request, until_closed
from tests.e2e.server import Server
from tests.e2e.strange import HTTP2_PREFACE
from tests.e2e.test_vanishing_clients import Usage

AT_ONCE = 400
QUESTION = {"prompt": "A KV cache keeps", "max_tokens": 16, "temperature": 0}
# The statuses of HAProxy's parser, which has a text of its own for what is not HTTP; no configuration changes it.
PARSER_ERRORS = {400, 408, 422}


def _is_acceptable(sent: Sent, answer: Answer) -> bool:
    """Say whether an answer is a success, a JSON error that is not the fault of the server, or of HAProxy's parser."""
    if answer.status == 0:  # an answer of HTTP/2, or none
        return sent.half_closes or sent.data.startswith(HTTP2_PREFACE)
    if answer.status < 400:
        return True
    if not sent.is_parsed and answer.status in PARSER_ERRORS and answer.headers.get("content-type") == "text/html":
        return True
    has_error = json_error(answer) is not None or sent.data.startswith(b"HEAD ")  # to which no answer has a body
    return has_error and (answer.status < 500 or answer.status in (501, 503))


async def send_all(server: Server, requests: Iterable[Sent]) -> Counter[int]:
    """Send requests, many at a time; return how many got which status, and fail at one that is not acceptable."""
    statuses, room = Counter[int](), asyncio.Semaphore(AT_ONCE)

    async def send(sent: Sent) -> None:
        async with room:
            answer = await exchange(server.port, sent)
        assert _is_acceptable(sent, answer), (sent, answer)
        statuses[answer.status] += 1

    async with asyncio.TaskGroup() as tasks:
        for sent in requests:
            tasks.create_task(send(sent))
    return statuses


def _text(client: httpx.Client) -> str:
    return str(client.post("/v1/completions", json=QUESTION).raise_for_status().json()["choices"][0]["text"])


# Requests whose body is not read, and the status of the answer.
UNREAD: list[tuple[str, list[tuple[str, str]], int]] = [
    ("/v1/messages", [("Content-Length", "2000000")], 413),
    ("/v1/messages", [("Content-Length", "9"), ("Content-Type", "text/plain")], 400),
    ("/v1/none", [("Content-Length", "9")], 404),
    ("/v1/models", [("Content-Length", "9")], 405),
]


async def _check_unread(server: Server, path: str, headers: list[tuple[str, str]], status: int) -> None:
    """Send the beginning of a body: the answer comes, and the connection is closed although it may be kept."""
    keep_alive = [("Connection", "keep-alive"), *headers]
    answer = await until_closed(server.port, Sent("body", request("POST", path, keep_alive, b"{")))
    assert (answer.status, answer.headers["connection"]) == (status, "close")
    assert answer.headers["x-request-id"] == answer.headers.get("request-id", answer.headers["x-request-id"])
    assert json_error(answer) is not None


@pytest.mark.exhaustive("waits ten seconds; CI has the timeouts of bodies without a server")
async def test_a_body_that_never_comes_gets_a_timeout(server: Server) -> None:
    await _check_unread(server, "/v1/messages", [("Content-Length", "9")], 408)


async def test_strange_requests_and_unread_bodies_get_an_answer_and_leave_nothing(
    server: Server, client: httpx.Client
) -> None:
    """No client waits for a timeout; those of test_hostile_load.py do."""
    before = _text(client)
    async with asyncio.TaskGroup() as tasks:
        for path, headers, status in UNREAD:
            tasks.create_task(_check_unread(server, path, headers, status))
        requests = [*each_once(), *islice(mixtures(random.Random(1)), 600)]
        statuses = await send_all(server, map(in_a_hurry, requests))
    print(statuses)
    assert {200, 400, 404, 405} <= statuses.keys()
    await Usage(server).until_nothing_is_used(but=("clients",))  # other tests may have kept connections open
    assert _text(client) == before
