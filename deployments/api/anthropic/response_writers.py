"""The responses of POST /v1/messages: a message, or the server-sent events that add up to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deployments.api.anthropic.content import BlockEvents, content_blocks, encode_event
from deployments.api.error_responses import error_body
from deployments.api.openai.answer_formats import AnswerFormat
from deployments.api.openai.protocol import ChatRequest
from deployments.api.writers import Answer, ResponseHead, Usage
from deployments.errors import ApiError
from deployments.parsers.answer_parser import AnswerParser
from deployments.parsers.call_ids import RANDOM_IDS, NewId
from deployments.parsers.events import Content, Event
from deployments.requests.generation import Delta, Generation
from engine.outputs import FinishReason
from engine.text.tokenizer import Tokenizer

__all__ = ["MessagesWriters"]

_PING = encode_event({"type": "ping"})


@dataclass(frozen=True)
class MessagesWriters:
    """The writers of POST /v1/messages.

    Attributes:
        answer_format: the format of the answers; None if their text is their content.
    """

    answer_format: AnswerFormat | None
    id_prefix: str = "msg_"

    def whole(self, head: ResponseHead, body: ChatRequest, tokenizer: Tokenizer) -> MessageWriter:
        """Return the writer of a whole response."""
        return MessageWriter(head, body, self)

    def events(
        self, head: ResponseHead, body: ChatRequest, tokenizer: Tokenizer, generations: Sequence[Generation]
    ) -> MessageEvents:
        """Return the writer of a stream."""
        return MessageEvents(head, body, self, generations)

    def new_parser(self) -> AnswerParser | None:
        """Return the parser of one answer; None if its text is its content."""
        return None if self.answer_format is None else self.answer_format.new_parser()

    @property
    def new_id(self) -> NewId:
        """Makes the ids of one answer's calls."""
        ids = RANDOM_IDS if self.answer_format is None else self.answer_format.call_ids
        return ids.counter("toolu_")


class MessageWriter:
    """Writes whole responses."""

    def __init__(self, head: ResponseHead, body: ChatRequest, writers: MessagesWriters) -> None:
        self._head = head
        self._body = body
        self._writers = writers

    def response(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """Return the message."""
        answer = answers[0]
        parser = self._writers.new_parser()
        blocks = content_blocks(_parsed(parser, answer.text, final=True), self._writers.new_id)
        stop = _stop(answer, answer.generation, self._body, parser)
        return _message(self._head, blocks, usage) | stop


class MessageEvents:
    """Writes the server-sent events of one response."""

    num_choices = 1

    def __init__(
        self, head: ResponseHead, body: ChatRequest, writers: MessagesWriters, generations: Sequence[Generation]
    ) -> None:
        self._head = head
        self._body = body
        self._generations = generations
        self._parser = writers.new_parser()
        self._blocks = BlockEvents(writers.new_id)
        self._has_started = False
        self._last: Delta | None = None

    def chunk(self, delta: Delta) -> bytes:
        """Return the events of one delta; the first ones include the start of the message."""
        start = "" if self._has_started else self._start()
        self._has_started = True
        is_last = delta.finish_reason is not None
        events = self._blocks.write(_parsed(self._parser, delta.text, final=is_last))
        if is_last:
            self._last = delta
            events += self._blocks.end()
        return (start + events).encode()

    def end(self) -> bytes:
        """Return why the message ended, its usage, and the end of the stream."""
        assert self._last is not None
        stop = _stop(self._last, self._generations[0], self._body, self._parser)
        event = {"type": "message_delta", "delta": stop, "usage": _usage_fields(self._usage())}
        return (encode_event(event) + encode_event({"type": "message_stop"})).encode()

    def error(self, error: ApiError) -> bytes:
        """Return the event of a stream that has failed."""
        return encode_event(error_body(error)).encode()

    def _start(self) -> str:
        """Return the start. The first tokens have come, so it is known how many of the prompt were cached."""
        return encode_event({"type": "message_start", "message": _message(self._head, [], self._usage())}) + _PING

    def _usage(self) -> Usage:
        return Usage.of(self._generations, 1)


def _parsed(parser: AnswerParser | None, text: str, *, final: bool) -> list[Event]:
    """Return the events of a piece of an answer's text."""
    if parser is not None:
        return parser.feed(text, final=final)
    return [Content(text)] if text else []


def _message(head: ResponseHead, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
    return {
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage_fields(usage),
    }


def _usage_fields(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _stop(
    end: Answer | Delta, generation: Generation, body: ChatRequest, parser: AnswerParser | None
) -> dict[str, Any]:
    """Return why an answer has ended, as the Messages API names it."""
    if end.finish_reason == FinishReason.LENGTH:
        limit, requested = generation.params.max_tokens, body.requested_tokens
        is_shortened = limit is not None and requested is not None and limit < requested
        return {
            "stop_reason": "model_context_window_exceeded" if is_shortened else "max_tokens",
            "stop_sequence": None,
        }
    if isinstance(end.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_reason}
    has_calls = parser is not None and parser.num_calls > 0
    return {"stop_reason": "tool_use" if has_calls else "end_turn", "stop_sequence": None}
