"""Agents of the official clients, with a model that writes each format: three turns with calls, whole and streamed.

The clients send back what they have received, and the next prompt has the calls, their ids and their results.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import anthropic
import openai
import pytest
from starlette.testclient import TestClient

from engine.text.tokenizer import Tokenizer
from tests.deployments import fakes
from tests.deployments.api.openai.test_tool_responses import joined
from tests.deployments.conftest import OpenClient
from tests.deployments.fakes import FakeEngines, output
from tests.parsers.conformance import TOOLS
from tests.parsers.writers import WRITERS, Call

Turn: TypeAlias = tuple[str, str, list[Call]]  # reasoning, content and calls
Agent: TypeAlias = Callable[[TestClient, bool], list[Turn]]
EDIT: Call = (
    "edit",
    {"count": 2, "options": {"a": [True, None]}, "path": "a.txt", "text": 'x = "1"\n'},
)  # Gemma sorts keys
PING: Call = ("ping", {})
FEW = ("gemma4", "glm45", "deepseek_v4", "kimi_k2", "minimax_m2", "openai")


def turns(format: str) -> list[Turn]:
    """Return what a model of a format answers, turn by turn."""
    writer = WRITERS[format]
    thought = "Hmm." if writer.reasoning is not None else ""
    content = "Let me look." if writer.has_text_before_calls else ""
    return [(thought, content, [EDIT]), ("", "", [EDIT, PING]), (thought, "Done.", [])]


def results(calls: list[Call]) -> list[str]:
    return [f"result of {name}" for name, _ in calls]


def chat(client: TestClient, stream: bool) -> list[Turn]:
    """Run an agent of OpenAI's client and the chat API."""
    api = openai.OpenAI(base_url="http://testserver/v1", api_key="x", http_client=client, max_retries=0)
    tools: Any = [{"type": "function", "function": {"name": name, "parameters": TOOLS[name]}} for name in TOOLS]
    messages: list[Any] = [{"role": "user", "content": "Edit it."}]
    taken: list[Turn] = []
    while not taken or taken[-1][2]:
        completion = api.chat.completions.create(
            model="tiny", messages=messages, tools=tools, max_tokens=900, stream=stream
        )
        if stream:
            message, _ = joined([chunk.model_dump(exclude_unset=True) for chunk in completion])  # type: ignore[union-attr]
        else:
            message = completion.choices[0].message.model_dump(exclude_none=True)  # type: ignore[union-attr]
        listed = message.get("tool_calls", [])
        calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in listed]
        taken.append((message.get("reasoning", ""), message.get("content") or "", calls))
        messages.append({key: value for key, value in message.items() if key != "refusal"})
        for call, text in zip(listed, results(calls), strict=True):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"{text} {call['id']}"})
    return taken


def responses(client: TestClient, stream: bool) -> list[Turn]:
    """Run an agent of OpenAI's client and the Responses API."""
    api = openai.OpenAI(base_url="http://testserver/v1", api_key="x", http_client=client, max_retries=0)
    tools: Any = [{"type": "function", "name": name, "parameters": TOOLS[name], "strict": False} for name in TOOLS]
    items: list[Any] = [{"role": "user", "content": "Edit it."}]
    taken: list[Turn] = []
    while not taken or taken[-1][2]:
        response: Any = api.responses.create(
            model="tiny", input=items, tools=tools, max_output_tokens=900, stream=stream
        )
        if stream:
            response = next(event for event in response if event.type == "response.completed").response
        listed = [item for item in response.output if item.type == "function_call"]
        calls = [(item.name, json.loads(item.arguments)) for item in listed]
        thought = "".join(part.text for item in response.output if item.type == "reasoning" for part in item.content)
        taken.append((thought, response.output_text, calls))
        items += [item.model_dump(exclude_none=True) for item in response.output]
        for item, text in zip(listed, results(calls), strict=True):
            result = f"{text} {item.call_id}"
            items.append({"type": "function_call_output", "call_id": item.call_id, "output": result})
    return taken


def messages(client: TestClient, stream: bool) -> list[Turn]:
    """Run an agent of Anthropic's client and the Messages API."""
    api = anthropic.Anthropic(base_url="http://testserver", api_key="x", http_client=client, max_retries=0)
    tools: Any = [{"name": name, "input_schema": TOOLS[name]} for name in TOOLS]
    conversation: list[Any] = [{"role": "user", "content": "Edit it."}]
    taken: list[Turn] = []
    while not taken or taken[-1][2]:
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": 2000, "messages": conversation, "tools": tools}
        asked["thinking"] = {"type": "enabled", "budget_tokens": 1024}
        if stream:
            with api.messages.stream(**asked) as events:
                content: list[Any] = events.get_final_message().content
        else:
            content = api.messages.create(**asked).content
        calls = [(block.name, block.input) for block in content if block.type == "tool_use"]
        texts = {
            kind: "".join(getattr(block, kind) for block in content if block.type == kind)
            for kind in ("text", "thinking")
        }
        taken.append((texts["thinking"], texts["text"], calls))
        ids = [block.id for block in content if block.type == "tool_use"]
        answers = [
            {"type": "tool_result", "tool_use_id": call_id, "content": f"{text} {call_id}"}
            for call_id, text in zip(ids, results(calls), strict=True)
        ]
        conversation += [{"role": "assistant", "content": content}, {"role": "user", "content": answers}]
    return taken


class _InProcess:
    """A transport of an asynchronous client, which sends its requests with a test client in a thread."""

    def __init__(self, client: TestClient) -> None:
        self._client = client

    async def handle_async_request(self, request: Any) -> Any:
        await request.aread()
        response = await asyncio.to_thread(self._client.send, request)
        return type(response)(response.status_code, headers=response.headers, content=response.content)

    async def aclose(self) -> None:
        """The test client stays open."""


def agents_chat(client: TestClient, stream: bool) -> list[Turn]:
    """Run an agent of openai-agents over the chat API."""
    agents = pytest.importorskip("agents", reason="needs the extra `clients`: make test-long installs it")
    return asyncio.run(_run_agent(agents, agents.OpenAIChatCompletionsModel, client, stream))


def agents_responses(client: TestClient, stream: bool) -> list[Turn]:
    """Run an agent of openai-agents over the Responses API."""
    agents = pytest.importorskip("agents", reason="needs the extra `clients`: make test-long installs it")
    return asyncio.run(_run_agent(agents, agents.OpenAIResponsesModel, client, stream))


async def _run_agent(agents: Any, kind: Any, client: TestClient, stream: bool) -> list[Turn]:
    """Run an agent of openai-agents; its Runner calls the tools and sends back what it has received."""

    def tool(name: str) -> Any:
        async def invoke(context: Any, arguments: str) -> str:
            return f"{results([(name, json.loads(arguments))])[0]} {context.tool_call_id}"

        return agents.FunctionTool(name, "", TOOLS[name], invoke, strict_json_schema=False)

    transport: Any = _InProcess(client)
    async with openai.AsyncOpenAI(
        base_url="http://testserver/v1",
        api_key="x",
        http_client=openai.DefaultAsyncHttpxClient(transport=transport),
        max_retries=0,
    ) as api:
        agent = agents.Agent(
            name="editor",
            model=kind(model="tiny", openai_client=api),
            model_settings=agents.ModelSettings(max_tokens=900),
            tools=[tool(name) for name in TOOLS],
        )
        settings = agents.RunConfig(tracing_disabled=True)
        if stream:
            result = agents.Runner.run_streamed(agent, "Edit it.", run_config=settings)
            async for _ in result.stream_events():
                pass
        else:
            result = await agents.Runner.run(agent, "Edit it.", run_config=settings)
    return [_turn(response.output) for response in result.raw_responses]


def _turn(items: list[Any]) -> Turn:
    """Return what the items of one response of openai-agents hold; the chat API's reasoning is a summary there."""
    thoughts = [part.text for item in items if item.type == "reasoning" for part in item.summary or item.content]
    texts = [part.text for item in items if item.type == "message" for part in item.content]
    calls = [(item.name, json.loads(item.arguments)) for item in items if item.type == "function_call"]
    return "".join(thoughts), "".join(texts), calls


AGENTS: list[Any] = [
    *(pytest.param(chat, format) for format in WRITERS),
    *(
        pytest.param(agent, format, marks=() if format in FEW else pytest.mark.long)
        for agent in (responses, messages)
        for format in WRITERS
    ),
    *(
        pytest.param(agent, format, marks=pytest.mark.long)
        for agent in (agents_chat, agents_responses)
        for format in WRITERS
    ),
]


@pytest.fixture(autouse=True)
def long_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines take long conversations."""
    monkeypatch.setattr(fakes, "INFO", replace(fakes.INFO, max_model_len=4096, num_blocks=4096))


@pytest.mark.parametrize(("agent", "format"), AGENTS)
def test_three_turns(
    agent: Agent,
    format: str,
    open_client: OpenClient,
    engines: FakeEngines,
    parsed_path: Path,
    tokenizer: Tokenizer,
) -> None:
    client = open_client(
        model=str(parsed_path), tool_parser=format, reasoning_parser=WRITERS[format].reasoning or "none"
    )
    script = []
    for turn in turns(format):
        ids = [*tokenizer.encode(WRITERS[format].answer(*turn), add_special_tokens=False), 2]  # 2 is EOS
        pieces = [ids[start : start + 3] for start in range(0, len(ids), 3)]
        script.append([output(piece, "stop" if piece is pieces[-1] else None) for piece in pieces])
    engines.scripts = [*script, *script]
    for stream in (False, True):
        taken = [(thought.strip(), content.strip(), calls) for thought, content, calls in agent(client, stream)]
        assert taken == turns(format)
    last = tokenizer.decode(engines.calls[-1][0].prompt_token_ids, skip_special_tokens=False)
    for name, arguments in (EDIT, EDIT, PING):
        assert f"<call>{name}{json.dumps(arguments, ensure_ascii=False)}" in last
    if agent is not agents_chat:  # it sends back reasoning that the answer has under one name; ours have two
        assert ("Hmm." in last) == (WRITERS[format].reasoning is not None)
    results_seen = last.split("result of ")[1:]
    assert len(results_seen) == 3
    for text in results_seen:  # the template writes a result, which ends with its call's id, and that call's id
        ids = text.split("<|im_end|>")[0].split(" ")[1]
        assert ids[: len(ids) // 2] == ids[len(ids) // 2 :]
