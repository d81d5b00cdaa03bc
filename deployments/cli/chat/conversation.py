"""Conversation: the messages so far, the next request, and the rounds of tool calls before an answer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployments.cli.chat.answer import Answer
from deployments.cli.chat.tools import DEFINITIONS, result_of
from deployments.cli.client import ServerClient
from engine.errors import ConfigError

__all__ = ["Conversation", "Settings"]

MAX_ROUNDS = 4  # of tool calls before an answer
USAGE = {"include_usage": True, "continuous_usage_stats": True}


@dataclass(slots=True)
class Settings:
    """What each request has beside its messages; None: the server's default."""

    model: str
    system: str = ""
    use_tools: bool = False
    temperature: float | None = None
    max_tokens: int | None = None

    @property
    def body(self) -> dict[str, Any]:
        """The fields of a request."""
        options = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        body: dict[str, Any] = {"model": self.model, "stream_options": USAGE}
        body |= {name: value for name, value in options.items() if value is not None}
        return body | {"tools": DEFINITIONS} if self.use_tools else body


Show = Callable[[str, str], None]  # a part of the reasoning, and of the text


@dataclass(slots=True)
class Conversation:
    """One conversation with a server's model.

    Args:
        client: of the server.
        settings: of the requests; may change between two of them.
        clock: returns seconds.
    """

    client: ServerClient
    settings: Settings
    clock: Callable[[], float] = time.perf_counter
    messages: list[dict[str, Any]] = field(default_factory=list)
    _saved_to: set[Path] = field(default_factory=set)

    def ask(self, question: str, show: Show) -> Iterator[Answer]:
        """Send a question; yield the answer, before it each answer that calls tools, whose calls then run.

        What the user interrupts stays a part of the conversation; a question that fails does not.

        Raises:
            ServerError: a request fails.
        """
        length = len(self.messages)
        self.messages.append({"role": "user", "content": question})
        try:
            for _ in range(MAX_ROUNDS):
                answer = self._answer(show)
                self.messages.append(answer.message)
                yield answer
                if not answer.calls or answer.was_stopped:
                    return
                self.messages += [self._run(call) for call in answer.calls]
        except Exception:
            del self.messages[length:]
            raise

    def _answer(self, show: Show) -> Answer:
        answer = Answer(self.clock())
        system = [{"role": "system", "content": self.settings.system}] if self.settings.system else []
        events = self.client.stream(
            "/v1/chat/completions", self.settings.body | {"messages": [*system, *self.messages]}
        )
        try:
            for event in events:
                show(*answer.add(event, self.clock()))
        except KeyboardInterrupt:
            events.close()  # type: ignore[attr-defined]  # the server notices the closed connection
            answer.was_stopped = True
            answer.calls.clear()
        return answer

    def _run(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        result = result_of(self.client, function["name"], function["arguments"])
        return {"role": "tool", "tool_call_id": call["id"], "content": result}

    def save(self, path: Path) -> None:
        """Write the model and the messages as JSON.

        Raises:
            ConfigError: the file exists and is not one of this conversation, or it cannot be written.
        """
        if path.exists() and path.resolve() not in self._saved_to:
            raise ConfigError("exists", param="/save", value=str(path), remedy="give a new file's name")
        system = [{"role": "system", "content": self.settings.system}] if self.settings.system else []
        document = {"model": self.settings.model, "messages": [*system, *self.messages]}
        try:
            path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            problem, remedy = f"cannot be written ({error.strerror})", "give a file in a directory that you can write"
            raise ConfigError(problem, param="/save", value=str(path), remedy=remedy) from None
        self._saved_to.add(path.resolve())
