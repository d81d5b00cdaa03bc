"""Structured outputs: from response_format and structured_outputs to the engine's parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayTaskError
from starlette.testclient import TestClient

from engine.errors import RequestError
from engine.options.structured_outputs import StructuredOutputsParams
from tests.deployments.api.conftest import Answers, OpenClient
from tests.deployments.fakes import FakeEngines

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "the cache"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON_OBJECT = {"response_format": {"type": "json_object"}}


def _json_schema(described: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": described}}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        (JSON_OBJECT, StructuredOutputsParams(json_object=True)),
        (_json_schema({"name": "x", "schema": SCHEMA, "strict": True}), StructuredOutputsParams(json=SCHEMA)),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputsParams(json=SCHEMA)),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutputsParams(regex="a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputsParams(choice=["a", "b"])),
        ({"structured_outputs": {"grammar": "start: A", "json": None}}, StructuredOutputsParams(grammar="start: A")),
    ],
)
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_structured_outputs_of_the_engine_request(
    client: TestClient, engines: FakeEngines, path: str, body: dict[str, Any], expected: StructuredOutputsParams | None
) -> None:
    prompt = CHAT if path.startswith("chat") else {"prompt": "a"}
    answer = client.post(f"/v1/{path}", json=prompt | body)
    assert answer.status_code == 200, answer.text
    assert engines.calls[0][0].params.structured_outputs == expected


@pytest.mark.parametrize(
    ("body", "param", "shown"),
    [
        (_json_schema(None), "response_format", "schema"),
        (_json_schema({"name": "x"}), "response_format", "schema"),
        (_json_schema({"name": "x", "schema": None}), "response_format", "schema"),
        ({"response_format": {}}, "response_format", "None"),
        ({"response_format": "json"}, "response_format", "'json'"),
        ({"response_format": {"type": "yaml"}}, "response_format", "yaml"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "json and regex"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "regexp"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs", "5"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "choice"),
        (JSON_OBJECT | {"structured_outputs": {"regex": "a"}}, "structured_outputs", "both"),
        ({"guided_json": SCHEMA}, "guided_json", 'structured_outputs: {"json": ...}'),
        ({"guided_regex": "a"}, "guided_regex", 'structured_outputs: {"regex": ...}'),
        ({"guided_choice": ["a"]}, "guided_choice", "structured_outputs"),
        ({"guided_grammar": "a"}, "guided_grammar", "structured_outputs"),
        ({"guided_decoding_backend": "x"}, "guided_decoding_backend", "leave it out"),
    ],
)
def test_an_incomplete_form_is_refused(client: TestClient, body: dict[str, Any], param: str, shown: str) -> None:
    answer = client.post("/v1/chat/completions", json=CHAT | body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert shown in answer.json()["error"]["message"]


def test_a_schema_that_is_nested_too_deep_is_refused(client: TestClient) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(100):
        schema = {"not": schema}
    answer = client.post("/v1/chat/completions", json=CHAT | _json_schema({"name": "x", "schema": schema}))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"
    assert "64" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_compilers_error_names_the_field_of_the_request(
    client: TestClient, engines: FakeEngines, stream: bool
) -> None:
    error = RequestError("cannot be compiled: no such type 'x'", param="structured_outputs", part="json")
    engines.scripts = [[RayTaskError("generate", "traceback", error)]]
    body = CHAT | {"stream": stream}
    answer = client.post("/v1/chat/completions", json=body | _json_schema({"name": "x", "schema": SCHEMA}))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"
    assert answer.json()["error"]["message"].startswith("response_format.json_schema cannot be compiled: no such type")
    direct = client.post("/v1/chat/completions", json=body | {"structured_outputs": {"json": SCHEMA}})
    assert direct.json()["error"]["param"] == "structured_outputs"


@pytest.mark.parametrize(
    ("parser", "opening"), [("deepseek_r1", ""), ("qwen3", "<think>\n"), ("openai_gptoss", ""), ("cohere_command3", "")]
)
def test_an_answer_that_a_grammar_forms_is_content(
    open_client: OpenClient, parsed_path: Path, answers: Answers, parser: str, opening: str
) -> None:
    """The grammar holds from the first token on: the answer does not continue the reasoning that the prompt opens."""
    client = open_client(model=str(parsed_path), reasoning_parser=parser)
    text = '{"a": 1}'
    body = CHAT | JSON_OBJECT | {"chat_template_kwargs": {"opening": opening}}
    answers(text)
    whole = client.post("/v1/chat/completions", json=body).json()
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    answers(text)
    events = client.post("/v1/chat/completions", json=body | {"stream": True}).text.split("\n\n")
    deltas = [json.loads(event[6:])["choices"][0]["delta"] for event in events if event.startswith("data: {")]
    assert "".join(delta.get("content") or "" for delta in deltas) == text
    assert not any("reasoning" in delta for delta in deltas)
    answers(text)
    form = {"type": "json_schema", "schema": SCHEMA}
    body = {"model": "tiny", "max_tokens": 9, "messages": CHAT["messages"], "output_config": {"format": form}}
    assert client.post("/v1/messages", json=body).json()["content"] == [{"type": "text", "text": text}]
    answers(text)
    body = {"model": "tiny", "input": "a", "text": {"format": form | {"name": "x"}}}
    (item,) = client.post("/v1/responses", json=body).json()["output"]
    assert item["content"][0]["text"] == text
