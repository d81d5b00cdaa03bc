"""ParsedChatWriter and ParsedChunkWriter: chat responses whose answers are parsed into content, reasoning and calls.

The answers of all other requests are written by ChatWriter and ChunkWriter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deployments.api.openai.answer_formats import AnswerFormat
from deployments.api.openai.chunks import ChunkWriter, encode_event
from deployments.api.openai.protocol import GenerationRequest
from deployments.api.openai.response_writers import ChatWriter
from deployments.api.writers import Answer, ResponseHead
from deployments.parsers.answer_parser import AnswerParser
from deployments.parsers.call_ids import NewId
from deployments.parsers.events import CallArguments, CallStart, Content, Event, Reasoning
from deployments.parsers.reasoning_tokens import ReasoningTokens
from deployments.requests.generation import Delta, Generation
from engine.outputs import FinishReason
from engine.text.tokenizer import Tokenizer

__all__ = ["ParsedChatWriter", "ParsedChunkWriter", "finish_reason"]

_TOOL_CALLS = "tool_calls"  # the finish_reason of an answer that ends with tool calls


class ParsedChatWriter(ChatWriter):
    """POST /v1/chat/completions with answers in a format."""

    def __init__(
        self, head: ResponseHead, request: GenerationRequest, tokenizer: Tokenizer, answer_format: AnswerFormat
    ) -> None:
        super().__init__(head, request, tokenizer)
        self.format = answer_format
        self._reasoning: dict[int, ReasoningTokens] = {}  # by choice

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning so far, in all answers."""
        return sum(reasoning.total for reasoning in self._reasoning.values())

    def count_reasoning(self, index: int, token_ids: Sequence[int], parser: AnswerParser) -> None:
        """Count the tokens of reasoning in a piece of a choice, which ``parser`` has just been fed."""
        if index not in self._reasoning:
            self._reasoning[index] = self.format.new_reasoning_tokens()
        self._reasoning[index].add(token_ids, parser)

    def _count_whole(self, index: int, answer: Answer, parser: AnswerParser) -> None:
        """Count the tokens of reasoning in a whole answer, which ``parser`` has been fed."""
        token_ids = answer.generation.token_ids
        if not parser.has_reasoning:
            return
        if self.format.end_of_reasoning in token_ids or parser.kind is Reasoning:
            self.count_reasoning(index, token_ids, parser)
            return
        parser, start = self.format.new_parser(), 0  # piece by piece, as a stream
        for text, count in zip(answer.pieces, answer.token_counts, strict=True):
            end = start + count
            parser.feed(text, final=end == len(token_ids))
            self.count_reasoning(index, token_ids[start:end], parser)
            start = end

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        parser = self.format.new_parser()
        events = parser.feed(answer.text, final=True)
        self._count_whole(index, answer, parser)
        choice = super()._choice(index, answer)
        fields = self.fields(events, parser, self.new_call_ids())
        choice["message"] = {"role": "assistant", "content": None, "refusal": None, **fields}
        for call in choice["message"].get("tool_calls", ()):
            del call["index"]
        echoed = answer.generation.prompt.echo_text
        if echoed or not events:
            choice["message"]["content"] = echoed + (choice["message"]["content"] or "")
        choice["finish_reason"] = finish_reason(choice["finish_reason"], parser)
        return choice

    def new_call_ids(self) -> NewId:
        """Return what makes the ids of one answer's calls."""
        return self.format.call_ids.counter("call_")

    def fields(self, events: Sequence[Event], parser: AnswerParser, new_id: NewId) -> dict[str, Any]:
        """Return the fields of a message, or of a delta of one, that ``parser`` has just made of its text."""
        text: dict[type[Event], str] = {}
        calls: list[dict[str, Any]] = []
        index = parser.num_calls - sum(isinstance(event, CallStart) for event in events)
        for event in events:
            if isinstance(event, CallStart):
                calls.append(_new_call(index, event, new_id(event)))
                index += 1
            elif isinstance(event, CallArguments):
                if not calls:
                    calls.append({"index": index - 1, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += event.text
            else:
                text[type(event)] = text.get(type(event), "") + event.text
        fields: dict[str, Any] = {}
        if Reasoning in text:
            fields |= {"reasoning": text[Reasoning], "reasoning_content": text[Reasoning]}
        if Content in text:
            fields["content"] = text[Content]
        return fields | ({"tool_calls": calls} if calls else {})


class ParsedChunkWriter(ChunkWriter):
    """Writes the events of a response whose answers are parsed while they arrive.

    Text that the parser holds back makes no event, unless there are log-probabilities or token ids to send with it.
    """

    def __init__(self, writer: ParsedChatWriter, generations: Sequence[Generation], body: GenerationRequest) -> None:
        super().__init__(writer, generations, body)
        self._chat = writer
        self._parsers = [writer.format.new_parser() for _ in generations]
        self._new_ids = [writer.new_call_ids() for _ in generations]
        self._has_started = [False] * len(generations)

    def chunk(self, delta: Delta) -> bytes:
        """Return the event of one delta; nothing if there is nothing to send."""
        parser, first = self._parsers[delta.index], not self._has_started[delta.index]
        events = parser.feed(delta.text, final=delta.finish_reason is not None)
        fields = self._chat.fields(events, parser, self._new_ids[delta.index])
        self._chat.count_reasoning(delta.index, delta.token_ids, parser)
        has_more = self._has_logprobs or self._has_token_ids or self._continuous_usage
        if not (fields or first or delta.finish_reason is not None or has_more):
            return b""
        self._has_started[delta.index] = True
        chunk = self._chunk(delta, first=first)
        choice = chunk["choices"][0]
        if first:
            echoed = self._generations[delta.index].prompt.echo_text
            fields = {"role": "assistant", **fields, "content": echoed + fields.get("content", "")}
        choice["delta"] = fields
        choice["finish_reason"] = finish_reason(delta.finish_reason, parser)
        return encode_event(chunk)


def _new_call(index: int, call: CallStart, call_id: str) -> dict[str, Any]:
    return {"index": index, "id": call_id, "type": "function", "function": {"name": call.name, "arguments": ""}}


def finish_reason(reason: str | None, parser: AnswerParser) -> str | None:
    """Return why an answer has ended, as the OpenAI API names it."""
    return _TOOL_CALLS if reason == FinishReason.STOP and parser.num_calls else reason
