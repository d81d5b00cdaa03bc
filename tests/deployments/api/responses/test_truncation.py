"""Inputs that are too long for the context: rejected, or without their first turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.testclient import TestClient

from deployments.api.responses.input_items import InputItem, parse_conversation
from deployments.api.responses.truncation import last_turns
from tests.deployments.api.responses.conftest import PATH, post, rejected
from tests.deployments.fakes import FakeEngines


def conversation(num_turns: int) -> list[dict[str, Any]]:
    items = [
        {"role": role, "content": f"{role[0]}{turn}"} for turn in range(num_turns) for role in ("user", "assistant")
    ]
    return [*items, {"role": "user", "content": "Last?"}]


async def test_as_few_turns_as_possible_are_dropped() -> None:
    items = parse_conversation(conversation(20))
    for limit in range(len(items) + 3):
        calls: list[int] = []

        async def fits(some: Sequence[InputItem], limit: int = limit, calls: list[int] = calls) -> bool:
            calls.append(len(some))
            return len(some) <= limit

        rest = await last_turns(items, fits)
        assert len(calls) <= 5
        if limit == 0:
            assert rest is None
        else:
            assert rest is not None
            assert rest == items[-len(rest) :]
            assert len(rest) == min(limit if limit % 2 else limit - 1, 39)


def test_only_auto_truncates(client: TestClient, engines: FakeEngines) -> None:
    items = conversation(100)
    error = rejected(client, input=items)
    assert error["param"] == "input"
    assert "1024" in error["message"]
    body = post(client, input=items, truncation="auto")
    assert body["truncation"] == "auto"
    rest = client.get(f"{PATH}/{body['id']}/input_items", params={"limit": 100, "order": "asc"}).json()["data"]
    assert 1 < len(rest) < len(items)
    assert [item["content"][0]["text"] for item in rest] == [item["content"] for item in items[-len(rest) :]]
    num_tokens = len(engines.calls[0][0].prompt_token_ids)
    assert num_tokens < 1024
    one_more = items[-len(rest) - 2 :]
    assert rejected(client, input=one_more)["param"] == "input"
    assert rejected(client, input="Why? " * 1000, truncation="auto")["param"] == "input"


def test_tokens_are_counted(client: TestClient, engines: FakeEngines) -> None:
    asked = {"input": conversation(3), "instructions": "Be brief."}
    counted = client.post(f"{PATH}/input_tokens", json=asked).json()
    usage = post(client, **asked)["usage"]
    assert counted == {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}
    assert client.post(f"{PATH}/input_tokens", json={"input": 3}).json()["error"]["param"] == "input"
