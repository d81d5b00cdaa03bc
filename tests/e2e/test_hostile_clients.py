"""Clients that mean harm or are broken: each gets an answer, none costs another client anything."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable
from itertools import islice

import httpx
import pytest

from tests.e2e.conftest import Server
from tests.e2e.hostile import Answer, Sent, each_once, exchange, json_error, mixtures, request
from tests.e2e.test_vanishing_clients import Usage

AT_ONCE = 400
QUESTION = {"prompt": "A KV cache keeps", "max_tokens": 16, "temperature": 0}
# HAProxy's parser has a text of its own for what is no HTTP; no configuration changes it.
PARSER_ERRORS = {400, 408, 414, 422, 501}


def _is_acceptable(answer: Answer) -> bool:
    """Say whether an answer is a success, a JSON error that is no fault of the server, or of HAProxy's parser."""
    if answer.status == 0:  # of HTTP/2, or the connection was closed: by a client's own half-close for example
        return True
    if answer.status in PARSER_ERRORS and answer.headers.get("content-type") == "text/html":
        return True
    if answer.status < 400:
        return True
    is_json = json_error(answer) is not None or answer.headers.get("content-length") == "0" or not answer.body
    return is_json and (answer.status < 500 or answer.status in (501, 503))


async def send_all(server: Server, requests: Iterable[Sent]) -> Counter[int]:
    """Send requests, many at a time; return how many got which status, and fail at one that is not acceptable."""
    statuses, room = Counter[int](), asyncio.Semaphore(AT_ONCE)

    async def send(sent: Sent) -> None:
        async with room:
            answer = await exchange(server.port, sent)
        assert _is_acceptable(answer), (sent, answer)
        statuses[answer.status] += 1

    async with asyncio.TaskGroup() as tasks:
        for sent in requests:
            tasks.create_task(send(sent))
    return statuses


def _text(client: httpx.Client) -> str:
    return str(client.post("/v1/completions", json=QUESTION).raise_for_status().json()["choices"][0]["text"])


async def test_strange_requests_get_an_answer_and_leave_nothing(server: Server, client: httpx.Client) -> None:
    before = _text(client)
    statuses = await send_all(server, each_once())
    statuses += await send_all(server, islice(mixtures(random.Random(1)), 600))
    print(statuses)
    assert {200, 400, 404, 405} <= statuses.keys()
    # Other tests may have kept connections open.
    assert not any((await Usage(server).until_nothing_is_used(but=("clients",))).values())
    assert _text(client) == before


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("Content-Length", "2000000")], 413),
        ([("Content-Length", "9")], 408),
    ],
)
async def test_a_body_that_is_not_read_closes_the_connection(
    server: Server, headers: list[tuple[str, str]], status: int
) -> None:
    keep_alive = [("Connection", "keep-alive"), *headers]
    answer = await exchange(server.port, Sent("body", request("POST", "/v1/completions", keep_alive, b"{")))
    assert (answer.status, answer.headers["connection"]) == (status, "close")
    assert json_error(answer) is not None
