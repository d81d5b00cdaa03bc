"""The OpenAI response bodies: whole answers, stream chunks, usage, and their SSE framing.

Plain dicts, built once a chunk on the hot path; what they mean is the API's business, how the tokens came about is
not known here.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments.generation import Delta, Generation

__all__ = ["DONE", "Answer", "ChatFormat", "CompletionFormat", "Format", "sse"]

DONE = b"data: [DONE]\n\n"


def sse(body: dict[str, Any]) -> bytes:
    """Return ``body`` as one server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


@dataclass(slots=True)
class Answer:
    """One whole answer, gathered from its deltas."""

    generation: Generation
    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, delta: Delta) -> None:
        """Append what a batch brought."""
        self.pieces.append(delta.text)
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    @property
    def text(self) -> str:
        """The answer's text."""
        return "".join(self.pieces)


class Format(ABC):
    """How one endpoint writes its answers.

    Args:
        response_id: the id that all chunks of a response share.
        created: Unix time in seconds, shared likewise.
        model: the served name.
        with_token_ids: whether the client asked for token ids.
    """

    whole: str  # the ``object`` of a whole response
    chunk: str  # the ``object`` of a stream's chunk

    def __init__(self, response_id: str, created: int, model: str, *, with_token_ids: bool) -> None:
        self._id = response_id
        self._created = created
        self._model = model
        self._with_token_ids = with_token_ids

    def response(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the whole, non-streamed response."""
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        body = self._head(self.whole) | {"choices": choices, "usage": usage([answer.generation for answer in answers])}
        return body | self._response_extras(answers[0].generation)

    def delta_chunk(self, index: int, delta: Delta, generation: Generation, *, first: bool) -> dict[str, Any]:
        """Return the chunk for one delta of the choice ``index``."""
        choice: dict[str, Any] = {"index": index, **self._delta(delta, first=first), "logprobs": None}
        choice["finish_reason"] = delta.finish_reason
        choice["stop_reason"] = delta.stop_reason
        if self._with_token_ids:
            choice["token_ids"] = delta.token_ids
            if first:
                choice["prompt_token_ids"] = generation.prompt.token_ids
        return self._head(self.chunk) | {"choices": [choice]}

    def usage_chunk(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """Return the last chunk of a stream that includes usage."""
        return self._head(self.chunk) | {"choices": [], "usage": usage(generations)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, **self._message(answer.text), "logprobs": None}
        choice["finish_reason"] = answer.finish_reason
        choice["stop_reason"] = answer.stop_reason
        if self._with_token_ids:
            choice["token_ids"] = answer.generation.token_ids
            choice["prompt_token_ids"] = answer.generation.prompt.token_ids
        return choice

    def _response_extras(self, generation: Generation) -> dict[str, Any]:
        return {}

    @abstractmethod
    def _message(self, text: str) -> dict[str, Any]:
        """Return a whole choice's text in this endpoint's shape."""

    @abstractmethod
    def _delta(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        """Return a delta's text in this endpoint's shape."""


class ChatFormat(Format):
    """POST /v1/chat/completions."""

    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def _message(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        content = {"content": delta.text}
        return {"delta": {"role": "assistant", **content} if first else content}

    def _response_extras(self, generation: Generation) -> dict[str, Any]:
        return {"prompt_token_ids": generation.prompt.token_ids} if self._with_token_ids else {}


class CompletionFormat(Format):
    """POST /v1/completions."""

    whole = "text_completion"
    chunk = "text_completion"

    def _message(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _delta(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        return {"text": delta.text}


def usage(generations: Sequence[Generation]) -> dict[str, Any]:
    """Return the token counts of a response so far."""
    prompt = sum(len(generation.prompt.token_ids) for generation in generations)
    completion = sum(len(generation.token_ids) for generation in generations)
    cached = sum(generation.num_cached_tokens for generation in generations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
