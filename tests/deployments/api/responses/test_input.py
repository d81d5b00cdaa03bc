"""The input of a request: which items become which messages, and what is rejected."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from deployments.api.responses.input_items import messages_of, parse_conversation
from tests.deployments.api.responses.conftest import post, rejected
from tests.deployments.api.responses.test_create import TOOLS

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hmm."}]}


def messages(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return messages_of(parse_conversation(list(items)))


def test_messages() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    said = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed"}
    said["content"] = [{"type": "output_text", "text": "c", "annotations": []}]  # type: ignore[assignment]
    assert messages({"role": "user", "content": parts}, said, {"role": "developer", "content": "d"}) == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
        {"role": "developer", "content": "d"},
    ]
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert messages(refusal) == [{"role": "assistant", "content": "No."}]


def test_the_items_of_an_answer_are_one_message() -> None:
    said = {"role": "assistant", "content": "Let me see."}
    second = CALL | {"call_id": "c2"}
    answer, result = messages(THOUGHT, said, CALL, second, RESULT)
    assert (answer["reasoning"], answer["content"]) == ("Hmm.", "Let me see.")
    assert [call["id"] for call in answer["tool_calls"]] == ["c1", "c2"]
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    assert len(messages(said, said)) == 2
    assert len(messages(CALL, said)) == 2
    assert len(messages(said, THOUGHT, said)) == 2
    assert [sorted(message) for message in messages(THOUGHT, CALL)] == [["reasoning", "role", "tool_calls"]]


def test_reasoning_without_text_is_left_out() -> None:
    assert messages({"type": "reasoning", "summary": [], "encrypted_content": "x"}) == []
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}
    assert messages(summary) == [{"role": "assistant", "reasoning": "s"}]


def test_a_conversation_with_calls(parsed: TestClient) -> None:
    user = {"role": "user", "content": "What is the weather?"}
    assert post(parsed, input=[user, THOUGHT, CALL, RESULT], tools=TOOLS)["status"] == "completed"


FILE = {"type": "input_file", "file_id": "file_1"}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": 3}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": "a"}, {"role": "user"}]}, "input[1].content"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": [{"type": "smell"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "telepathy"}]}, "input[0]"),
        ({"input": ["Hi"]}, "input[0]"),
        ({"input": [{}]}, "input[0].role"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": [CALL | {"arguments": {}}]}, "input[0].arguments"),
        ({"input": [RESULT]}, "input[0].call_id"),
        ({"input": [RESULT, CALL]}, "input[0].call_id"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_logprobs": -2}, "top_logprobs"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"include": ["everything"]}, "include[0]"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "hammer", "name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": ["function"], "name": "f"}]}, "tools[0].type"),
        ({"tools": [*TOOLS, *TOOLS]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "perhaps"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "h"}}, "tool_choice"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "f"}, {"type": "function", "name": "h"}],
                },
            },
            "tool_choice.tools[1].name",
        ),
        ({"truncation": "never"}, "truncation"),
        ({"top_k": -5}, "top_k"),
        ({"seed": "x"}, "seed"),
        ({"previous_response_id": 3}, "previous_response_id"),
        ({"input": "x" * 30_000}, "input"),
    ],
)
def test_what_is_invalid_is_named_by_its_path(client: TestClient, body: dict[str, Any], param: str) -> None:
    error = rejected(client, **body)
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"input": [{"role": "user", "content": [FILE]}]}, "input[0].content[0]"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0]"),
        ({"input": [CALL, RESULT | {"output": [FILE]}]}, "input[1].output[0]"),
    ],
)
def test_what_is_known_but_not_offered(client: TestClient, body: dict[str, Any], param: str) -> None:
    error = rejected(client, 501, **body)
    assert (error["type"], error["param"]) == ("not_implemented_error", param)
    assert "not offered" in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0]"),
        ({"input": [CALL, RESULT | {"output": [IMAGE]}]}, "input[1].output[0]"),
    ],
)
def test_images_are_rejected(client: TestClient, body: dict[str, Any], param: str) -> None:
    error = rejected(client, 400, **body)
    assert error["param"] == param
    problem = "content of type 'input_image' is not supported: models are served for text, without images; send text"
    assert error["message"] == f"{param}: {problem}"


def test_the_input_is_required(client: TestClient) -> None:
    answer = client.post("/v1/responses", json={"model": "tiny"})
    assert answer.json()["error"]["message"] == "input is missing; give it"


def test_a_form_without_its_schema(client: TestClient) -> None:
    error = rejected(client, text={"format": {"type": "json_schema", "name": "n"}})
    assert error["message"] == "text.format.schema is missing; give it with the type json_schema"


def test_what_changes_nothing_is_accepted(client: TestClient) -> None:
    include = ["reasoning.encrypted_content", "web_search_call.action.sources"]
    neutral = {"background": False, "conversation": None, "tools": [], "tool_choice": "auto", "include": include}
    assert post(client, **neutral, stream_options={"include_obfuscation": False}, anything=3)["status"] == "completed"


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("tools", '"tools": [{"type": "function", "name": "f", "parameters": {"maximum": 1e999}}]'),
        (
            "text.format.schema",
            '"text": {"format": {"type": "json_schema", "name": "n", "schema": {"a": 1e999}}}',
        ),
    ],
)
def test_a_number_that_json_cannot_write(client: TestClient, param: str, fields: str) -> None:
    body = '{"input": "Hi", ' + fields + "}"
    answer = client.post("/v1/responses", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_a_schema_that_is_nested_too_deep(client: TestClient) -> None:
    nested: dict[str, Any] = {}
    for _ in range(400):
        nested = {"not": nested}
    tools = [*TOOLS, {"type": "function", "name": "h", "parameters": nested}]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
    error = rejected(client, tools=tools, tool_choice=allowed)
    assert error["param"] == "tools"
    assert "nested deeper" in error["message"]


def test_another_model_is_not_served(client: TestClient) -> None:
    assert rejected(client, 404, model="other")["code"] == "model_not_found"
