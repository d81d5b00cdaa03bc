"""Rejected requests: status code, error body, and no path of the server in the message, over an engine without HTTP."""

from __future__ import annotations

import re
from typing import Any

import pytest
from starlette.testclient import TestClient

from deployments.config import checkout_root
from engine.llm import LLM
from tests.deployments.conftest import OpenClient
from tests.deployments.real_engines import RealEngines

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
CALLED = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
BAD_SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}}

REJECTED = [
    ("completions", {"prompt": ""}, 400, "prompt", "empty"),
    ("completions", {"prompt": []}, 400, "prompt", "[]"),
    ("completions", {"prompt": [10**9]}, 400, "prompt", "1000000000"),
    ("completions", {"prompt": [-1]}, 400, "prompt", "-1"),
    ("completions", {"prompt": [1] * 5000}, 400, "prompt", "5000"),
    ("completions", {"prompt": "word " * 9000}, 400, "prompt", "context"),
    ("completions", {"prompt": "a", "max_tokens": -1}, 400, "max_tokens", "-1"),
    ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "0"),
    ("completions", {"prompt": "a", "max_tokens": "9"}, 400, "max_tokens", "'9'"),
    ("completions", {"prompt": "a", "temperature": 2.5}, 400, "temperature", "2.5"),
    ("completions", {"prompt": "a", "top_p": 0}, 400, "top_p", "0"),
    ("completions", {"prompt": "a", "top_k": -2}, 400, "top_k", "-2"),
    ("completions", {"prompt": "a", "min_p": 1.5}, 400, "min_p", "1.5"),
    ("completions", {"prompt": "a", "seed": 2**64}, 400, "seed", str(2**64)),
    ("completions", {"prompt": "a", "min_tokens": 9, "max_tokens": 4}, 400, "min_tokens", "9"),
    ("completions", {"prompt": "a", "stop": ["1", "2", "3", "4", "5"]}, 400, "stop", "5"),
    ("completions", {"prompt": "a", "stop": [""]}, 400, "stop", "''"),
    ("completions", {"prompt": "a", "stop_token_ids": [10**9]}, 400, "stop_token_ids", "1000000000"),
    ("completions", {"prompt": "a", "cache_salt": ""}, 400, "cache_salt", "''"),
    ("completions", {"prompt": "a", "stream_options": {}}, 400, "stream_options", "stream"),
    ("completions", {"prompt": "a", "model": "gpt-4"}, 404, "model", "gpt-4"),
    ("completions", {"prompt": "a", "n": 0}, 400, "n", "0"),
    ("completions", {"prompt": "a", "n": 2, "temperature": 0}, 400, "n", "2"),
    ("completions", {"prompt": "a", "n": 17}, 400, "n", "16"),
    ("completions", {"prompt": "a", "logprobs": 21}, 400, "logprobs", "21"),
    ("completions", {"prompt": "a", "logit_bias": {"999999": 1}}, 400, "logit_bias", "999999"),
    ("completions", {"prompt": "a", "beam_width": 2}, 501, "beam_width", "2"),
    ("completions", {"prompt": "a", "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens", "0"),
    ("completions", {"prompt": "a", "logprob_token_ids": [5]}, 400, "logprob_token_ids", "logprobs"),
    ("completions", {"prompt": "a", "structured_outputs": {"regex": "("}}, 400, "structured_outputs", "regex"),
    ("completions", {"prompt": "a", "guided_regex": "x"}, 400, "guided_regex", "guided_regex"),
    ("completions", {"prompt": "a", "tools": []}, 400, "tools", "tools is empty; give at least one tool"),
    ("completions", {}, 400, "prompt", "missing"),
    ("chat/completions", {"messages": []}, 400, "messages", "[]"),
    ("chat/completions", {"messages": "hi"}, 400, "messages", "'hi'"),
    ("chat/completions", CHAT | {"messages": [{"role": "", "content": "x"}]}, 400, "messages", "''"),
    ("chat/completions", CHAT | {"messages": [CALLED]}, 501, "messages", "function_call is not offered"),
    ("chat/completions", CHAT | {"chat_template": "{{ x }}"}, 400, "chat_template", "template"),
    ("chat/completions", CHAT | {"tools": [], "tool_choice": "required"}, 400, "tool_choice", "tools"),
    ("chat/completions", CHAT | {"tool_choice": "auto"}, 400, "tool_choice", "auto"),
    ("chat/completions", CHAT | {"response_format": {"type": "json_schema"}}, 400, "response_format", "schema"),
    ("chat/completions", CHAT | BAD_SCHEMA, 400, "response_format", "cannot be compiled"),
    ("chat/completions", CHAT | {"top_logprobs": 2}, 400, "top_logprobs", "2"),
    ("chat/completions", CHAT | {"presence_penalty": 3}, 400, "presence_penalty", "3"),
    ("chat/completions", CHAT | {"tools": [{"type": "function"}]}, 400, "tools", "function"),
    ("chat/completions", CHAT | {"max_completion_tokens": 0}, 400, "max_completion_tokens", "0"),
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(checkout_root() / "demo" / "model"), kv_cache_memory="16MiB")


@pytest.fixture
def engines(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> RealEngines:
    """The engine of ``llm``."""
    real = RealEngines(llm.engine)
    monkeypatch.setattr("deployments.ingress.Dispatcher", lambda *_, **__: real)
    return real


@pytest.fixture
def demo(open_client: OpenClient) -> TestClient:
    """A client of the demo model."""
    return open_client(model=str(checkout_root() / "demo" / "model"), model_name="pagoda-demo")


@pytest.mark.parametrize("stream", [False, True])
def test_the_error_names_the_parameter_and_its_value(demo: TestClient, stream: bool) -> None:
    for path, body, status, param, shown in REJECTED:
        streaming = {"stream": True} if stream and "stream_options" not in body else {}
        answer = demo.post(f"/v1/{path}", json=body | streaming)
        case = f"{path} {body!r:.200}: {answer.text}"
        assert answer.status_code == status, case
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, case
        assert error["param"] == param, case
        assert shown in error["message"], case
        assert len(error["message"]) <= 400, case
        assert not re.search(r"/[\w.-]+/", error["message"].replace("/v1/", "")), case
