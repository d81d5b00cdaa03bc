"""Bodies of the Messages API: what the chat template and the engine get, and what is rejected."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from deployments.api.anthropic.protocol import MessagesRequest
from deployments.api.body import parse_body
from deployments.api.json_response import encode_json
from engine.text.tokenizer import Tokenizer
from tests.deployments.api.anthropic.sdk import checked_error
from tests.deployments.api.conftest import Answers
from tests.deployments.conftest import OpenClient
from tests.deployments.fakes import FakeEngines

USER = {"role": "user", "content": "hi"}
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "messages": [USER]}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "done"}
CALLED = [USER, {"role": "assistant", "content": [{"type": "text", "text": "Well."}, USE]}]

Rendered = Callable[..., str]


@pytest.fixture
def rendered(parsed: TestClient, answers: Answers, engines: FakeEngines, tokenizer: Tokenizer) -> Rendered:
    """Return a function that sends a body and returns the text of the prompt."""
    answers("ok")

    def send(**fields: Any) -> str:
        answer = parsed.post("/v1/messages", json=BODY | fields)
        assert answer.status_code == 200, answer.text
        return tokenizer.decode(engines.calls[-1][0].prompt_token_ids, skip_special_tokens=False)

    return send


def chat(**fields: Any) -> Any:
    """Return the chat request that a body stands for."""
    return parse_body(MessagesRequest, encode_json(BODY | fields).encode()).chat


def roles(**fields: Any) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in chat(**fields).messages]


def test_the_prompt_of_a_conversation_with_tools(rendered: Rendered) -> None:
    prompt = rendered(system="Be kind.", messages=[*CALLED, {"role": "user", "content": [RESULT]}])
    assert prompt.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n")
    assert '<|im_start|>assistant\nWell.<call>f{"a": 1}<|im_end|>\n<|im_start|>tool\ndonetoolu_1<|im_end|>' in prompt


def test_text_and_blocks_mean_the_same(rendered: Rendered) -> None:
    block = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    blocks = rendered(messages=[{"role": "user", "content": [block]}], system=[{"type": "text", "text": "Be kind."}])
    assert blocks == rendered(system="Be kind.")


def test_tools_as_the_template_gets_them(rendered: Rendered) -> None:
    prompt = rendered(tools=[TOOL | {"description": "An f.", "type": "custom", "cache_control": {"type": "ephemeral"}}])
    assert '<tool>{"name": "f", "description": "An f.", "parameters": {"type": "object"}}' in prompt
    assert "<tool>" not in rendered(tools=[TOOL], tool_choice={"type": "none"})
    assert "<tool>" not in rendered(tools=[], tool_choice={"type": "auto"})


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [(None, False), ({"type": "disabled"}, False), ({"type": "adaptive"}, True), ({"type": "enabled"}, True)],
)
def test_thinking_is_off_unless_it_is_asked_for(rendered: Rendered, thinking: Any, expected: bool) -> None:
    assert rendered(thinking=thinking).endswith("<think></think>") is not expected


def test_a_budget_ends_the_reasoning(rendered: Rendered, engines: FakeEngines) -> None:
    rendered(thinking={"type": "enabled", "budget_tokens": 3})
    budget = engines.calls[-1][0].params.thinking_budget
    assert budget is not None
    assert budget.num_tokens == 3


def test_a_budget_is_no_error_for_a_model_that_does_not_reason(client: TestClient) -> None:
    body = BODY | {"thinking": {"type": "enabled", "budget_tokens": 3}}
    assert client.post("/v1/messages", json=body).status_code == 200


def test_an_answer_continues_the_last_message(rendered: Rendered) -> None:
    prompt = rendered(messages=[USER, {"role": "assistant", "content": "It is"}])
    assert prompt.endswith("<|im_start|>assistant\nIt is")


def test_reasoning_of_earlier_answers(rendered: Rendered) -> None:
    thinking = [{"type": "redacted_thinking", "data": "x"}, {"type": "thinking", "thinking": "Hm.", "signature": ""}]
    said = [*thinking, {"type": "text", "text": "Yes."}]
    prompt = rendered(messages=[USER, {"role": "assistant", "content": said}, USER])
    assert "<|im_start|>assistant\nHm.Yes.<|im_end|>" in prompt


def test_sampling_parameters(rendered: Rendered, engines: FakeEngines) -> None:
    rendered(temperature=0.25, top_p=0.5, top_k=7, stop_sequences=["a", "b"], metadata={"user_id": "u"}, frob=[1])
    params = engines.calls[-1][0].params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.25, 0.5, 7, 4)
    assert tuple(params.stop or ()) == ("a", "b")
    rendered()
    assert engines.calls[-1][0].params.temperature == 0.5  # the checkpoint's own default


@pytest.mark.parametrize(
    ("choice", "expected"), [("auto", "auto"), ("any", "required"), ("none", "none"), ("tool", "f")]
)
def test_the_choice_of_a_tool(choice: str, expected: str) -> None:
    request = chat(tools=[TOOL], tool_choice={"type": choice, "name": "f"} | {"disable_parallel_tool_use": True})
    chosen = request.tool_choice
    assert (chosen if isinstance(chosen, str) else chosen.function.name) == expected
    assert request.max_calls == 1
    assert chat(tools=[TOOL]).max_calls is None


def test_the_form_of_an_answer() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for field in (
        {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        {"output_format": {"type": "json_schema", "schema": schema}},
    ):
        assert json.loads(chat(**field).structured_outputs_params.json) == schema
    assert chat(output_config={"effort": "high"}).reasoning_effort == "high"


# --- turns ------------------------------------------------------------------------------------------------------------


def test_messages_of_one_role_are_one_turn() -> None:
    said = [{"role": "assistant", "content": "b"}, {"role": "assistant", "content": "c"}]
    assert roles(messages=[USER, {"role": "user", "content": "a"}, *said, USER]) == [
        ("user", "hi\na"),
        ("assistant", "b\nc"),
        ("user", "hi"),
    ]


def test_results_follow_their_calls_directly() -> None:
    asked = {"role": "user", "content": [{"type": "text", "text": "And?"}, RESULT]}
    assert roles(messages=[*CALLED, asked])[2:] == [("tool", "done"), ("user", "And?")]


@pytest.mark.parametrize(
    ("content", "is_error", "expected"),
    [
        (None, False, ""),
        (None, True, "Error"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], False, "a\nb"),
        ("no such file", True, "Error: no such file"),
        ("<tool_use_error>no</tool_use_error>", True, "<tool_use_error>no</tool_use_error>"),
    ],
)
def test_results_of_tools(content: Any, is_error: bool, expected: str) -> None:
    result = RESULT | {"content": content, "is_error": is_error}
    message = chat(messages=[*CALLED, {"role": "user", "content": [result]}]).messages[-1]
    assert (message.role, message.content, message.name, message.tool_call_id) == ("tool", expected, "f", "toolu_1")


def test_a_system_message_at_the_start_joins_the_system_prompt() -> None:
    system = {"role": "system", "content": "Be brief."}
    assert roles(system="Be kind.", messages=[system, USER])[0] == ("system", "Be kind.\nBe brief.")


def test_later_system_messages_leave_the_start_of_the_prompt_alone() -> None:
    """Each request of a growing conversation starts with the messages of the one before."""
    note = {"role": "system", "content": "note"}
    marked = "<system-reminder>\nnote\n</system-reminder>"
    result = {"role": "user", "content": [RESULT]}
    talk = [USER, note, *CALLED[1:], result, note, {"role": "assistant", "content": "Done."}, USER, note]
    expected = [
        ("system", "Be kind."),
        ("user", f"hi\n{marked}"),
        ("assistant", "Well."),
        ("tool", f"done\n{marked}"),
        ("assistant", "Done."),
        ("user", f"hi\n{marked}"),
    ]
    assert roles(system="Be kind.", messages=talk) == expected
    for length, num_rendered in ((2, 2), (5, 4)):
        assert roles(system="Be kind.", messages=talk[:length]) == expected[:num_rendered]
    assert roles(messages=[*CALLED, note, result])[2:] == [("tool", f"done\n{marked}")]
    assert roles(messages=[USER, {"role": "assistant", "content": "a"}, note])[2:] == [("user", marked)]


# --- what is rejected -------------------------------------------------------------------------------------------------


def said(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(content)}, USER]}


def offered(**tool: Any) -> dict[str, Any]:
    return {"tools": [TOOL, tool]}


NO_IMAGES = "content of type 'image' is not supported: models are served for text, without images; send text"
REJECTED = [
    ({"max_tokens": None}, 400, "max_tokens=None is invalid"),
    ({"max_tokens": -1}, 400, "max_tokens=-1"),
    ({"max_tokens": "9"}, 400, "max_tokens='9'"),
    ({"messages": []}, 400, "messages=[]"),
    ({"messages": "hi"}, 400, "messages='hi'"),
    ({"messages": [{"content": "hi"}]}, 400, "messages[0].role is missing; give it"),
    ({"messages": [USER, {"role": "user"}]}, 400, "messages[1].content is missing; give it"),
    ({"messages": [{"role": "boss", "content": "hi"}]}, 400, "messages[0].role='boss'"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content=5"),
    ({"messages": [{"role": "user", "content": {"type": "text"}}]}, 400, "messages[0].content={"),
    ({"messages": [{"role": "system", "content": "hi"}]}, 400, "messages has no message of the user"),
    ({"messages": CALLED}, 400, "messages ends with a call of a tool"),
    (said("hi"), 400, "messages[0].content[0]='hi'"),
    (said({"text": "hi"}), 400, "messages[0].content[0].type is missing"),
    (said({"type": "text"}), 400, "messages[0].content[0].text is missing; give it"),
    (said({"type": "text", "text": 7}), 400, "messages[0].content[0].text=7"),
    (said({"type": "text", "text": "a"}, {"type": "image"}), 400, "messages[0].content[1]: " + NO_IMAGES),
    (said({"type": "document", "source": {}}), 501, "messages[0].content[0].type='document' is not offered"),
    (said({"type": "server_tool_use", "id": "a", "name": "b", "input": {}}), 501, "type='server_tool_use'"),
    (said(USE), 400, "type='tool_use' cannot be part of the role user"),
    (said(RESULT, role="assistant"), 400, "type='tool_result' cannot be part of the role assistant"),
    (said({"type": "tool_use", "id": "a", "name": "f"}, role="assistant"), 400, "content[0].input is missing"),
    (said({"type": "thinking"}, role="assistant"), 400, "messages[0].content[0].thinking is missing"),
    (said({"type": "tool_result", "content": "a"}), 400, "messages[0].content[0].tool_use_id is missing"),
    (said(RESULT | {"content": [{"type": "image"}]}), 400, "messages[0].content[0].content[0]: " + NO_IMAGES),
    (said(RESULT | {"content": [{"type": "text"}]}), 400, "messages[0].content[0].content[0].text is missing"),
    ({"system": [{"type": "text"}]}, 400, "system[0].text is missing"),
    ({"system": [{"type": "image"}]}, 400, "system[0]: " + NO_IMAGES),
    ({"system": 5}, 400, "system=5"),
    (offered(name="g"), 400, "tools[1].input_schema is missing"),
    (offered(type="custom", input_schema={}), 400, "tools[1].name is missing"),
    (offered(type="web_search_20250305", name="web_search"), 501, "tools[1].type='web_search_20250305' is not offered"),
    (offered(name="a b", input_schema={}), 400, "tools[1].name='a b'"),
    (offered(**TOOL), 400, "tools has 'f' twice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, 400, "tool_choice names the function 'g'"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, 400, "tool_choice='tool' needs a name"),
    ({"tools": [TOOL], "tool_choice": "auto"}, 400, "tool_choice='auto'"),
    ({"tool_choice": {"type": "any"}}, 400, "tool_choice='required' needs tools"),
    ({"mcp_servers": [{"url": "x"}]}, 501, "mcp_servers is not offered"),
    ({"temperature": 1.5}, 400, "temperature=1.5"),
    ({"top_p": 0}, 400, "top_p=0"),
    ({"top_k": -2}, 400, "top_k=-2"),
    ({"stop_sequences": [""]}, 400, "stop_sequences"),
    ({"stop_sequences": ["a"] * 5}, 400, "stop_sequences"),
    ({"stop_sequences": "a"}, 400, "stop_sequences='a'"),
    ({"thinking": {"type": "maybe"}}, 400, "thinking.type='maybe'"),
    ({"thinking": {"type": "enabled", "budget_tokens": 4}}, 400, "thinking.budget_tokens=4 must be less than max_tok"),
    ({"output_config": {"format": {"type": "json_schema"}}}, 400, "output_config.format.schema is missing"),
    (
        {"output_format": {"type": "json_schema", "schema": {}}, "tools": [TOOL]},
        400,
        "output_config cannot be combined",
    ),
    ({"model": "claude"}, 404, "model 'claude' is not served; choose 'tiny'"),
    ({"messages": [{"role": "user", "content": "a " * 999}]}, 400, "messages has"),
]


@pytest.mark.parametrize(("fields", "status", "shown"), REJECTED)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_names_the_field_by_its_path(
    parsed: TestClient, fields: dict[str, Any], status: int, shown: str, stream: bool
) -> None:
    answer = parsed.post("/v1/messages", json=BODY | fields | {"stream": stream})
    assert answer.status_code == status, answer.text
    error = checked_error(answer.json())
    assert shown in error["message"]
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    assert (answer.headers.get("x-should-retry") == "false") is (status == 501)


def test_the_log_has_the_parameter_that_the_response_does_not(
    parsed: TestClient, serve_log: list[logging.LogRecord]
) -> None:
    for fields in (offered(type="web_search_20250305", name="web_search"), offered(name="g")):
        assert parsed.post("/v1/messages", json=BODY | fields).status_code in (400, 501)
        assert "param=tools" in serve_log[-1].getMessage()


HALF = b'{"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "\\ud800"}]}'


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"max_tokens": NaN}', b"\xff", b"[" * 9000, b'"x"', HALF])
def test_an_invalid_json_body(parsed: TestClient, content: bytes) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = parsed.post(path, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
        assert checked_error(answer.json())["type"] == "invalid_request_error"


def test_the_path_of_beta_clients(parsed: TestClient, answers: Answers) -> None:
    answers("ok")
    assert parsed.post("/v1/messages?beta=true", json=BODY).status_code == 200


def test_the_schema_of_content_takes_text_too() -> None:
    schema = MessagesRequest.model_json_schema()
    for content in (schema["$defs"]["InputMessage"]["properties"]["content"], schema["properties"]["system"]):
        assert {"type": "string"} in content["anyOf"]


def test_many_calls_in_one_turn_are_no_internal_error(parsed: TestClient) -> None:
    calls = [{"role": "assistant", "content": [USE] * 600}] * 2
    answer = parsed.post("/v1/messages", json=BODY | {"messages": [USER, *calls, USER]})
    assert answer.status_code == 400
    assert "messages" in checked_error(answer.json())["message"]


def test_a_long_body_is_translated_in_a_thread(open_client: OpenClient) -> None:
    api = open_client()
    answer = api.post("/v1/messages", json=BODY | {"messages": [{"role": "user", "content": "x" * 2**17}]})
    assert answer.status_code == 400
    assert "characters" in checked_error(answer.json())["message"]
