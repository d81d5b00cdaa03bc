"""Answer: one streamed answer of the model: its text and tool calls, and the tokens and times of its request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Answer"]

ALL_AT_ONCE_S = 0.05


@dataclass(slots=True)
class Answer:
    """Collects the events of a stream. Times are seconds of one clock.

    Attributes:
        sent_at: when the request was sent.
        text: of the answer so far.
        calls: of tools, in the API's format.
        was_stopped: the user has interrupted it.
    """

    sent_at: float
    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    first_at: float | None = None
    last_at: float = 0.0
    was_stopped: bool = False
    _first_tokens: int = 1

    def add(self, event: dict[str, Any], now: float) -> tuple[str, str]:
        """Take an event; return the new parts of the reasoning and of the text."""
        self.usage = event.get("usage") or self.usage
        if not event["choices"]:
            return "", ""
        choice = event["choices"][0]
        delta = choice["delta"]
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        text, calls = delta.get("content") or "", delta.get("tool_calls") or ()
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if reasoning or text or calls:
            self.last_at = now
            if self.first_at is None:
                self.first_at = now
                self._first_tokens = (self.usage or {}).get("completion_tokens") or 1
        self.text += text
        for call in calls:
            self._add_call(call)
        return reasoning, text

    def _add_call(self, part: dict[str, Any]) -> None:
        """The first part of a call has its id and name; all have parts of its arguments."""
        index, function = part["index"], part["function"]
        while len(self.calls) <= index:
            self.calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        call = self.calls[index]
        call["id"] = part.get("id") or call["id"]
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        return message | {"tool_calls": self.calls} if self.calls else message

    @property
    def facts(self) -> str:
        """The first token's time, the speed, and how much of the prompt was cached; as far as they are known.

        The speed is that after the first event; over the whole time if all tokens came at once.
        """
        parts = []
        if self.first_at is not None:
            parts.append(f"first token {1e3 * (self.first_at - self.sent_at):.0f} ms")
        if self.usage is not None:
            num_tokens, asked = self.usage["completion_tokens"], self.usage["prompt_tokens"]
            if self.first_at is not None and num_tokens > 1:
                parts.append(f"{self._tokens_per_s(num_tokens):.1f} tokens/s")
            parts.append(f"{num_tokens} tokens")
            cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            parts.append(f"{cached} of {asked} prompt tokens cached")
        if self.was_stopped:
            parts.append("stopped")
        elif self.finish_reason == "length":
            parts.append("cut at the limit of tokens")
        return " · ".join(parts)

    def _tokens_per_s(self, num_tokens: int) -> float:
        assert self.first_at is not None
        seconds = self.last_at - self.first_at
        if seconds > ALL_AT_ONCE_S:
            return (num_tokens - self._first_tokens) / seconds
        return num_tokens / max(self.last_at - self.sent_at, 1e-9)
