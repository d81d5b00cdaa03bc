"""Responses that are kept: retrieved, continued, listed and deleted, from any ingress."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.testclient import TestClient

from engine.errors import EngineDeadError
from tests.deployments.api.conftest import Answers
from tests.deployments.api.responses.conftest import PATH, comparable, create, rejected, stream
from tests.deployments.api.responses.official import check_items
from tests.deployments.api.responses.test_create import ANSWER, TOOLS
from tests.deployments.conftest import OpenClient
from tests.deployments.fakes import FakeEngines, output

UNKNOWN = "resp_" + "0" * 32


def test_a_response_is_retrieved_and_deleted(client: TestClient) -> None:
    response = create(client)
    path = f"{PATH}/{response['id']}"
    assert client.get(path).json() == response
    assert client.delete(path).json() == {"id": response["id"], "object": "response", "deleted": True}
    for again in (client.get(path), client.delete(path), client.get(f"{path}/input_items")):
        assert again.status_code == 404
        error = again.json()["error"]
        assert (error["code"], error["type"]) == ("response_not_found", "not_found_error")
        assert f"response '{response['id']}' is not kept" in error["message"]
        assert "memory of the ingress" in error["message"]
        assert "3600 s" in error["message"]


def test_a_streamed_response_is_kept(client: TestClient) -> None:
    last = stream(client)[-1]["response"]
    assert client.get(f"{PATH}/{last['id']}").json() == last


def test_what_is_not_stored(client: TestClient, engines: FakeEngines) -> None:
    response = create(client, store=False)
    assert response["store"] is False
    assert client.get(f"{PATH}/{response['id']}").status_code == 404
    engines.calls.clear()
    engines.scripts = [[output([70]), EngineDeadError("lost")], [EngineDeadError("lost")]]
    failed = stream(client)[-1]["response"]
    assert failed["status"] == "failed"
    assert client.get(f"{PATH}/{failed['id']}").status_code == 404


def test_a_server_may_keep_none(open_client: OpenClient) -> None:
    client = open_client(limits={"max_stored_responses": 0})
    response = create(client, store=True)
    assert response["store"] is False
    assert client.get(f"{PATH}/{response['id']}").status_code == 404


def test_no_client_chooses_the_id(client: TestClient) -> None:
    headers = {"X-Request-Id": "mine"}
    ids = {client.post(PATH, json={"input": "Hi", "request_id": "mine"}, headers=headers).json()["id"] for _ in "ab"}
    assert len(ids) == 2
    assert not any("mine" in item_id for item_id in ids)


def test_a_conversation_goes_on(client: TestClient, engines: FakeEngines, tokenizer_path: Any) -> None:
    first = create(client, instructions="Be brief.")
    said = first["output"][0]["content"][0]["text"]
    second = create(client, input="And?", previous_response_id=first["id"], instructions="Be long.")
    assert second["previous_response_id"] == first["id"]
    create(client, input="And?", previous_response_id=second["id"])
    by_hand = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": said}]
    by_hand += [{"role": "user", "content": "And?"}, {"role": "assistant", "content": said}]
    create(client, input=[*by_hand[:2], {"role": "user", "content": "And?"}], instructions="Be long.")
    create(client, input=[*by_hand, {"role": "user", "content": "And?"}])  # instructions are not carried over
    prompts = [request.prompt_token_ids for request, _ in engines.calls]
    assert prompts[1] == prompts[3]
    assert prompts[2] == prompts[4]


def test_a_conversation_with_calls_goes_on(parsed: TestClient, answers: Answers, engines: FakeEngines) -> None:
    answers(ANSWER)
    first = create(parsed, tools=TOOLS, max_output_tokens=90)
    calls = [item for item in first["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "1"} for call in calls]
    answers("Done.")
    create(parsed, input=results, previous_response_id=first["id"], tools=TOOLS)
    create(parsed, input=[{"role": "user", "content": "Hi"}, *first["output"], *results], tools=TOOLS)
    prompts = [request.prompt_token_ids for request, _ in engines.calls]
    assert prompts[1] == prompts[2]
    assert rejected(parsed, input=results, tools=TOOLS)["param"] == "input[0].call_id"


def test_items_are_referred_to_by_their_ids(
    parsed: TestClient, answers: Answers, engines: FakeEngines, open_client: OpenClient, parsed_path: Any
) -> None:
    answers(ANSWER)
    first = create(parsed, tools=TOOLS, max_output_tokens=90)
    by_id = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    del by_id[0]["type"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "1"}
        for item in first["output"]
        if item["type"] == "function_call"
    ]
    user = {"role": "user", "content": "Hi"}
    other = open_client(model=str(parsed_path))
    create(parsed, input=[user, *first["output"], *results], tools=TOOLS)
    last = [create(client, input=[user, *by_id, *results], tools=TOOLS) for client in (parsed, other)]
    prompts = [request.prompt_token_ids for request, _ in engines.calls]
    assert prompts[1] == prompts[2] == prompts[3]
    listed = parsed.get(f"{PATH}/{last[1]['id']}/input_items", params={"order": "asc"}).json()["data"]
    assert [item["id"] for item in listed[1:5]] == [item["id"] for item in first["output"]]
    third = open_client(model=str(parsed_path))  # it finds items at both of the others
    both = [user, *by_id, *results, {"type": "item_reference", "id": last[1]["output"][0]["id"]}]
    assert create(third, input=both, tools=TOOLS)["status"] == "completed"
    parsed.delete(f"{PATH}/{first['id']}")
    error = rejected(other, 404, input=[user, *by_id])
    assert (error["param"], error["code"]) == ("input[1].id", "item_not_found")
    assert rejected(other, 404, input=[{"type": "item_reference", "id": "x"}])["param"] == "input[0].id"


def test_a_deleted_or_unknown_response_cannot_be_continued(client: TestClient) -> None:
    for unknown in (UNKNOWN, "resp_1", "x" * 1000):
        error = rejected(client, previous_response_id=unknown)
        assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")
    first = create(client)
    second = create(client, previous_response_id=first["id"])
    client.delete(f"{PATH}/{first['id']}")
    create(client, previous_response_id=second["id"])  # which has the whole conversation


def test_a_response_that_reached_a_limit_can_be_continued(client: TestClient, engines: FakeEngines) -> None:
    engines.scripts = [[output([70], "length")], [output([71, 2], "stop")]]
    first = create(client)
    assert first["status"] == "incomplete"
    assert create(client, previous_response_id=first["id"])["status"] == "completed"


def test_input_items(parsed: TestClient) -> None:
    given = [
        {"role": "user", "content": "Weather?", "id": "msg_mine"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hmm."}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "sunny"}]},
        {"role": "assistant", "content": "Sunny."},
        {"role": "user", "content": [{"type": "input_text", "text": "Thanks"}]},
    ]
    first = create(parsed, input=given, instructions="Not an item.")
    second = create(parsed, input="Bye", previous_response_id=first["id"])

    def listed(response: dict[str, Any], **query: Any) -> dict[str, Any]:
        answer = parsed.get(f"{PATH}/{response['id']}/input_items", params=query)
        assert answer.status_code == 200, answer.text
        page: dict[str, Any] = answer.json()
        check_items(page)
        return page

    items = listed(first, order="asc")["data"]
    kinds = [item["type"] for item in items]
    assert kinds == ["message", "reasoning", "function_call", "function_call_output", "message", "message"]
    assert (items[0]["id"], items[3]["output"]) == ("msg_mine", "sunny")
    assert len({item["id"] for item in items}) == 6
    everything = listed(second)
    assert [comparable(item) for item in everything["data"][::-1][:6]] == [comparable(item) for item in items]
    assert everything["data"][0]["content"][0]["text"] == "Bye"
    assert everything["data"][1]["content"] == first["output"][0]["content"]
    assert (len(everything["data"]), everything["has_more"]) == (8, False)
    page = listed(second, limit=3)
    assert (page["data"], page["has_more"]) == (everything["data"][:3], True)
    assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][2]["id"])
    assert listed(second, limit=5, after=page["last_id"])["data"] == everything["data"][3:]
    assert listed(second, after=everything["last_id"])["data"] == []


@pytest.mark.parametrize("query", [{"limit": 0}, {"limit": 101}, {"limit": "x"}, {"order": "up"}, {"after": "msg_x"}])
def test_bad_pages_are_rejected(client: TestClient, query: dict[str, Any]) -> None:
    answer = client.get(f"{PATH}/{create(client)['id']}/input_items", params=query)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(query))


def test_another_ingress_finds_continues_and_deletes(open_client: OpenClient, ingresses: list[Any]) -> None:
    maker, other = open_client(), open_client()
    first = create(maker)
    path = f"{PATH}/{first['id']}"
    assert other.get(path).json() == first
    assert other.get(f"{path}/input_items").json()["data"][0]["content"][0]["text"] == "Hi"
    second = create(other, previous_response_id=first["id"])
    assert maker.get(f"{PATH}/{second['id']}").json() == second
    assert other.delete(path).json()["deleted"]
    assert maker.get(path).status_code == 404
    (gone,) = [ingress for ingress in ingresses if asyncio.run(ingress.stored_response(second["id"]))[1] is not None]
    ingresses.remove(gone)
    answer = maker.get(f"{PATH}/{second['id']}")
    assert answer.status_code == 404
    assert "memory of the ingress" in answer.json()["error"]["message"]
