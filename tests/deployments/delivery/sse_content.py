"""What a client reads from the server-sent events of an answer, however its tokens are spread over them."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Choice:
    """One choice, put together from its chunks."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    prompt_token_ids: list[int] | None = None
    end: tuple[Any, Any] | None = None  # finish_reason, stop_reason
    num_roles: int = 0

    def add(self, chunk: dict[str, Any]) -> None:
        assert self.end is None, "a chunk comes after the end of its choice"
        delta = chunk.get("delta", chunk)
        self.text += delta.get("content", delta.get("text"))
        self.num_roles += "role" in delta
        self.token_ids += chunk.get("token_ids") or []  # null if they were declined
        for name, values in (chunk["logprobs"] or {}).items():
            self.logprobs[name] += values or []
        if "prompt_token_ids" in chunk:
            assert self.prompt_token_ids is None
            self.prompt_token_ids = chunk["prompt_token_ids"]
        if chunk["finish_reason"] is not None:
            self.end = (chunk["finish_reason"], chunk["stop_reason"])


@dataclass
class Content:
    """A whole response."""

    choices: dict[int, Choice] = field(default_factory=lambda: defaultdict(Choice))
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None

    @classmethod
    def of(cls, body: bytes) -> Content:
        """Return the content of a response that ended with [DONE]."""
        *events, done, end = body.split(b"\n\n")
        assert (done, end) == (b"data: [DONE]", b"")
        content, counts = cls(), [0]
        for event in events:
            if event.startswith(b":"):
                continue  # a comment, which a pause of a second brings
            chunk = json.loads(event.removeprefix(b"data: "))
            assert content.usage is None or content.usage["so_far"], "a chunk comes after the usage"
            if "error" in chunk:
                content.error = chunk["error"]
                continue
            for choice in chunk["choices"]:
                content.choices[choice["index"]].add(choice)
            if usage := chunk.get("usage"):
                counts.append(usage["completion_tokens"])
                content.usage = usage | {"so_far": bool(chunk["choices"])}
        assert counts == sorted(counts), "the number of tokens so far falls"
        return content
