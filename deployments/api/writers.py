"""What writes the response to a request, whole or as a stream: the interface between Serving and the endpoints.

Each API (OpenAI's chat and completions, responses, messages) has its own writers. This module knows no API's fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from deployments.errors import ApiError
from deployments.requests.generation import Delta, Generation
from engine.text.tokenizer import Tokenizer

__all__ = ["Answer", "EventWriter", "ResponseHead", "Usage", "WholeWriter", "Writers", "best_answers"]

Body = TypeVar("Body", contravariant=True)


@dataclass(frozen=True)
class ResponseHead:
    """What all parts of one response share.

    Attributes:
        id: of the response.
        created: Unix time in seconds.
        model: the served name.
    """

    id: str
    created: int
    model: str


@dataclass(frozen=True)
class Usage:
    """Token counts of a response. A prompt counts once, however many answers it has."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, from the prefix cache
    completion_tokens: int
    accepted_predicted: int = 0  # tokens of the client's prediction
    rejected_predicted: int = 0

    @classmethod
    def of(cls, generations: Sequence[Generation], num_generated: int) -> Usage:
        """Return the counts so far; ``num_generated`` is the number of answers to each prompt."""
        firsts = generations[::num_generated]
        return cls(
            sum(len(generation.prompt.token_ids) for generation in firsts),
            sum(generation.num_cached_tokens for generation in firsts),
            sum(len(generation.token_ids) for generation in generations),
            sum(generation.num_accepted_predicted for generation in generations),
            sum(generation.num_rejected_predicted for generation in generations),
        )


@dataclass(slots=True)
class Answer:
    """One answer of a whole response, collected from its deltas."""

    generation: Generation
    pieces: list[str] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)  # of each piece
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        self.pieces.append(delta.text)
        self.token_counts.append(len(delta.token_ids))
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    @property
    def text(self) -> str:
        """The answer's text."""
        return "".join(self.pieces)


def best_answers(answers: Sequence[Answer], num_generated: int, n: int) -> list[Answer]:
    """Return the ``n`` best of each prompt's ``num_generated`` answers by mean log-probability, the best first."""
    if num_generated == n:
        return list(answers)
    best: list[Answer] = []
    for start in range(0, len(answers), num_generated):
        of_prompt = answers[start : start + num_generated]
        best += sorted(of_prompt, key=lambda answer: answer.generation.mean_logprob, reverse=True)[:n]
    return best


class WholeWriter(Protocol):
    """Writes whole responses. It may be used in another thread than the event loop's."""

    def response(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """Return the body of the response."""


class EventWriter(Protocol):
    """Writes the server-sent events of one streamed response."""

    @property
    def num_choices(self) -> int:
        """Number of answers in the stream."""

    def chunk(self, delta: Delta) -> bytes:
        """Return the events of one delta; nothing if there is nothing to send yet."""

    def end(self) -> bytes:
        """Return the events after the last delta of the last answer."""

    def error(self, error: ApiError) -> bytes:
        """Return the events of a stream that has failed, instead of what remains."""


class Writers(Protocol, Generic[Body]):
    """Makes the writers of one request's response."""

    @property
    def id_prefix(self) -> str:
        """The start of the response's id."""

    def whole(self, head: ResponseHead, body: Body, tokenizer: Tokenizer) -> WholeWriter:
        """Return the writer of a whole response; ``tokenizer`` is for the tokens' texts."""

    def events(
        self, head: ResponseHead, body: Body, tokenizer: Tokenizer, generations: Sequence[Generation]
    ) -> EventWriter:
        """Return the writer of a stream; there is one generation for each answer."""
