"""Claude Code's billing header: it is kept out of prompts, so that requests of one conversation share their prefix."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.deployments.conftest import OpenClient
from tests.deployments.fakes import FakeEngines

PROMPT = "You are Claude Code."


def header() -> str:
    nonce = secrets.token_hex(3)[:5]
    return f"x-anthropic-billing-header: cc_version=2.1.177.{nonce[:3]}; cc_entrypoint=cli; cch={nonce};"


def as_text() -> Any:
    return f"{header()}\n{PROMPT}"


def as_block() -> Any:
    return [{"type": "text", "text": header()}, {"type": "text", "text": PROMPT}]


def as_second_block() -> Any:
    return [{"type": "text", "text": PROMPT}, {"type": "text", "text": header()}]


def alone() -> Any:
    return [{"type": "text", "text": header()}]


def prompts(api: TestClient, engines: FakeEngines, system: Any, user: str = "hi") -> list[list[int]]:
    """Return the prompts of two requests."""
    for _ in range(2):
        body = {"model": "tiny", "max_tokens": 2, "system": system(), "messages": [{"role": "user", "content": user}]}
        assert api.post("/v1/messages", json=body).status_code == 200
    return [call[0].prompt_token_ids for call in engines.calls[-2:]]


@pytest.mark.parametrize("system", [as_text, as_block, as_second_block, alone])
def test_prompts_do_not_differ_by_the_header(open_client: OpenClient, engines: FakeEngines, system: Any) -> None:
    first, second = prompts(open_client(), engines, system)
    assert first == second


@pytest.mark.parametrize("system", [as_text, as_block])
def test_the_rest_of_the_system_prompt_stays(open_client: OpenClient, engines: FakeEngines, system: Any) -> None:
    api = open_client()
    assert prompts(api, engines, system)[0] == prompts(api, engines, lambda: PROMPT)[0]
    assert prompts(api, engines, alone)[0] == prompts(api, engines, lambda: None)[0]


def test_the_header_can_be_kept(open_client: OpenClient, engines: FakeEngines) -> None:
    api = open_client(strip_billing_header=False)
    first, second = prompts(api, engines, as_text)
    assert first != second


def test_what_the_user_says_stays(open_client: OpenClient, engines: FakeEngines) -> None:
    api, system = open_client(), lambda: PROMPT
    assert prompts(api, engines, system, header())[0] != prompts(api, engines, system, "hi")[0]
    quoted = "The line x-anthropic-billing-header: is removed."
    assert prompts(api, engines, lambda: quoted)[0] != prompts(api, engines, lambda: "The line ")[0]
