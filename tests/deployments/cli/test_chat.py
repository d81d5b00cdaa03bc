"""`pagoda chat`: a conversation in a pseudo-terminal with a fake server, and the figures of an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deployments.cli.chat.answer import Answer
from deployments.cli.chat.conversation import Conversation, Settings
from deployments.cli.chat.tools import evaluate, result_of
from deployments.cli.client import ServerClient, ServerError
from tests.deployments.cli.fake_server import FakeServer
from tests.deployments.cli.terminal import Terminal, run

CALL = [{"index": 0, "id": "c1", "function": {"name": "calculator", "arguments": '{"expression": "6*7"}'}}]


def test_a_conversation_in_a_terminal(fake: FakeServer, tmp_path: Path) -> None:
    fake.key = "a-key-of-16-characters"
    file = tmp_path / "talk.json"
    with Terminal("chat", fake.url, environment={"PAGODA_API_KEY": fake.key}) as terminal:
        at = terminal.wait_for("you> ")
        terminal.type("/system Be brief.\r")
        at = terminal.wait_for("you> ", after=at)
        terminal.type("Count!\r")
        at = terminal.wait_for("one two three", after=at)
        at = terminal.wait_for("3 tokens · 32 of 40 prompt tokens cached)", after=at)
        at = terminal.wait_for("you> ", after=at)
        terminal.type("/tools on\r")
        at = terminal.wait_for("tools are on", after=at)
        at = terminal.wait_for("you> ", after=at)
        fake.deltas = [[CALL], ["[42] ", "b:x"]]  # the second has what rich would take for markup
        terminal.type("How much?\r")
        at = terminal.wait_for('[calls calculator {"expression": "6*7"}]', after=at)
        at = terminal.wait_for("[42] b:x", after=at)
        at = terminal.wait_for("you> ", after=at)
        terminal.type(f"/save {file}\r")
        at = terminal.wait_for("6 messages are in", after=at)
        at = terminal.wait_for("you> ", after=at)
        terminal.type("/sytem x\r")
        at = terminal.wait_for("'/sytem x' is not a command; /help shows them", after=at)
        terminal.wait_for("you> ", after=at)
        terminal.type("\x04")
        assert terminal.wait() == 0
    first, second, third = (body for _, body in fake.requests)
    system, count = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count!"}
    assert first["messages"] == [system, count]
    assert "tools" not in first
    assert [tool["function"]["name"] for tool in second["tools"]] == ["calculator", "cluster_status"]
    assert third["messages"][-1] == {"role": "tool", "tool_call_id": "c1", "content": '{"result": 42}'}
    saved = json.loads(file.read_text())
    assert saved["model"] == "fake"
    assert saved["messages"] == [*third["messages"], {"role": "assistant", "content": "[42] b:x"}]


def test_an_interrupted_answer_ends_and_the_chat_goes_on(fake: FakeServer) -> None:
    fake.deltas = [["begin ", *(f"{number} " for number in range(1000))]]
    fake.pause_s = 0.05
    with Terminal("chat", fake.url) as terminal:
        terminal.wait_for("you> ")
        terminal.type("Go\r")
        terminal.wait_for("begin")
        terminal.interrupt()
        at = terminal.wait_for("stopped)")
        at = terminal.wait_for("you> ", after=at)
        terminal.type("/history\r")
        at = terminal.wait_for("assistant: begin", after=at)
        terminal.wait_for("you> ", after=at)
        terminal.type("/quit\r")
        assert terminal.wait() == 0


def test_an_error_of_the_server_is_shown_and_the_question_forgotten(fake: FakeServer) -> None:
    fake.status = 400
    with Terminal("chat", fake.url, "--max-tokens", "9") as terminal:
        at = terminal.wait_for("you> ")
        terminal.type("Go\r")
        terminal.wait_for("pagoda: ", after=at)
        at = terminal.wait_for("answers 400: refused; ask for less than 9", after=at)
        at = terminal.wait_for("you> ", after=at)
        terminal.type("/history\r")
        terminal.wait_for("you> ", after=at)
        terminal.type("/quit\r")
        assert terminal.wait() == 0
    assert "user: Go" not in terminal.text


def test_without_a_server() -> None:
    code, text = run("chat", "http://127.0.0.1:9")
    assert code == 1
    assert text.startswith("pagoda: no server answers at http://127.0.0.1:9 (")


def test_a_file_of_another_conversation_is_not_overwritten(fake: FakeServer, tmp_path: Path) -> None:
    conversation = Conversation(ServerClient(fake.url), Settings("fake"))
    (tmp_path / "old").write_text("precious")
    with pytest.raises(ValueError, match="exists; give a new file's name"):
        conversation.save(tmp_path / "old")
    for _ in range(2):
        conversation.save(tmp_path / "new")
    with pytest.raises(ValueError, match="cannot be written"):
        conversation.save(tmp_path / "none" / "new")


def test_a_stream_that_ends_early_is_an_error(fake: FakeServer) -> None:
    fake.breaks_off = True
    with pytest.raises(ServerError, match="broke off"):
        list(ServerClient(fake.url).stream("/v1/chat/completions", {"messages": []}))


# --- figures ----------------------------------------------------------------------------------------------------------


def _event(content: str, tokens: int) -> dict[str, Any]:
    usage = {"prompt_tokens": 40, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 32}}
    return {"choices": [{"delta": {"content": content}}], "usage": usage}


def test_the_speed_is_that_after_the_first_event() -> None:
    answer = Answer(10.0)
    answer.add(_event("", 0), 10.1)  # the role, before the first token
    for second, tokens in ((10.5, 2), (11.5, 12)):
        answer.add(_event("x", tokens), second)
    assert answer.facts == "first token 500 ms · 10.0 tokens/s · 12 tokens · 32 of 40 prompt tokens cached"


def test_the_speed_of_an_answer_that_came_at_once() -> None:
    answer = Answer(10.0)
    answer.add(_event("x", 4), 12.0)
    assert "2.0 tokens/s" in answer.facts


# --- tools ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"), [("2 + 3 * 4", 14), ("-(1 - 4) / 2", 1.5), ("1/3", 0.3333), ("1e3 * .5", 500)]
)
def test_sums(expression: str, value: float) -> None:
    assert evaluate(expression) == value


NOT_SUMS = ["2 ** 9", "f(1)", "1 +", "'a' * 3", "True + 1", "1e308 * 10", "(" * 300, "1+" * 300]


@pytest.mark.parametrize("expression", NOT_SUMS, ids=range(len(NOT_SUMS)))
def test_what_is_not_a_sum(expression: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        evaluate(expression)


@pytest.mark.parametrize(
    ("name", "arguments", "part"),
    [
        ("calculator", '{"expression": "1/0"}', "zero"),
        ("calculator", "{", "Expecting"),
        ("calculator", "{}", "expression"),
        ("rm", "{}", "there is no tool rm"),
    ],
)
def test_a_call_that_is_wrong_has_a_result(name: str, arguments: str, part: str, fake: FakeServer) -> None:
    assert part in json.loads(result_of(ServerClient(fake.url), name, arguments))["error"]


def test_the_clusters_figures(fake: FakeServer) -> None:
    figures = json.loads(result_of(ServerClient(fake.url), "cluster_status", ""))
    assert figures == {"engines": 1, "running": 3, "waiting": 1, "kv_used_percent": 70, "prefix_hit_percent": 67}
