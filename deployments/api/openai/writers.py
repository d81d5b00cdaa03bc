"""ChatWriters and CompletionWriters: which writers the response to a request needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deployments.api.openai.answer_formats import AnswerFormat
from deployments.api.openai.chunks import ChunkWriter
from deployments.api.openai.parsed_writers import ParsedChatWriter, ParsedChunkWriter
from deployments.api.openai.protocol import ChatRequest, CompletionRequest
from deployments.api.openai.response_writers import ChatWriter, CompletionWriter
from deployments.api.writers import ResponseHead
from deployments.requests.generation import Generation
from engine.text.tokenizer import Tokenizer

__all__ = ["ChatWriters", "CompletionWriters"]


@dataclass(frozen=True)
class ChatWriters:
    """The writers of POST /v1/chat/completions.

    Attributes:
        answer_format: the format of the answers; None if their text is their content.
    """

    answer_format: AnswerFormat | None
    id_prefix: str = ChatWriter.id_prefix

    def whole(self, head: ResponseHead, body: ChatRequest, tokenizer: Tokenizer) -> ChatWriter:
        """Return the writer of a whole response."""
        if self.answer_format is None:
            return ChatWriter(head, body, tokenizer)
        return ParsedChatWriter(head, body, tokenizer, self.answer_format)

    def events(
        self, head: ResponseHead, body: ChatRequest, tokenizer: Tokenizer, generations: Sequence[Generation]
    ) -> ChunkWriter:
        """Return the writer of a stream."""
        if self.answer_format is None:
            return ChunkWriter(ChatWriter(head, body, tokenizer), generations, body)
        writer = ParsedChatWriter(head, body, tokenizer, self.answer_format)
        return ParsedChunkWriter(writer, generations, body)


class CompletionWriters:
    """The writers of POST /v1/completions."""

    id_prefix = CompletionWriter.id_prefix

    def whole(self, head: ResponseHead, body: CompletionRequest, tokenizer: Tokenizer) -> CompletionWriter:
        """Return the writer of a whole response."""
        return CompletionWriter(head, body, tokenizer)

    def events(
        self, head: ResponseHead, body: CompletionRequest, tokenizer: Tokenizer, generations: Sequence[Generation]
    ) -> ChunkWriter:
        """Return the writer of a stream."""
        return ChunkWriter(CompletionWriter(head, body, tokenizer), generations, body)
