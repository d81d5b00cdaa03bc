"""The writers of POST /v1/responses: a whole response, and the events of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from deployments.api.openai.answer_formats import AnswerFormat
from deployments.api.openai.logprobs import chat_logprobs
from deployments.api.openai.protocol import ChatRequest
from deployments.api.responses.event_log import encode_events
from deployments.api.responses.output import Output, Token
from deployments.api.responses.output_items import StreamEvent
from deployments.api.responses.protocol import ResponseRequest
from deployments.api.responses.resource import ResponseResource
from deployments.api.writers import Answer, ResponseHead, Usage
from deployments.errors import ApiError
from deployments.requests.generation import Delta, Generation
from engine.outputs import FinishReason
from engine.text.tokenizer import Tokenizer

__all__ = ["BACKGROUND_STAGES", "Keep", "ResponseEvents", "ResponseWriter", "ResponseWriters"]

BACKGROUND_STAGES = ("created", "queued")

Keep = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class ResponseWriters:
    """Makes the writers of one request's response.

    Attributes:
        answer_format: the format of the answer; None if its text is its content.
        request: the body.
        keep: stores a response that has ended; None if it is not to be stored.
    """

    answer_format: AnswerFormat | None
    request: ResponseRequest
    keep: Keep | None
    id_prefix: str = "resp_"

    def whole(self, head: ResponseHead, body: ChatRequest, tokenizer: Tokenizer) -> ResponseWriter:
        """Return the writer of a whole response."""
        return ResponseWriter(self._resource(head), self._output(body, tokenizer), self.keep)

    def events(
        self, head: ResponseHead, body: ChatRequest, tokenizer: Tokenizer, generations: Sequence[Generation]
    ) -> ResponseEvents:
        """Return the writer of a stream."""
        return ResponseEvents(
            self._resource(head),
            self._output(body, tokenizer),
            self.keep,
            generations[0],
            is_background=self.request.background is True,
        )

    def _resource(self, head: ResponseHead) -> ResponseResource:
        return ResponseResource(head, self.request, is_stored=self.keep is not None)

    def _output(self, body: ChatRequest, tokenizer: Tokenizer) -> Output:
        top = body.num_logprobs
        if top is None:
            return Output(self.answer_format, None)

        def logprobs(tokens: Sequence[Token]) -> list[dict[str, Any]]:
            shown = [token for token in tokens if not tokenizer.is_special(token[0])]
            ranked = [logprob or {} for _, logprob in shown]
            token_ids = [token_id for token_id, _ in shown]
            entries: list[dict[str, Any]] = chat_logprobs(tokenizer, token_ids, ranked, top)["content"]
            return entries

        return Output(self.answer_format, logprobs)


class ResponseWriter:
    """Writes a whole response."""

    def __init__(self, resource: ResponseResource, output: Output, keep: Keep | None) -> None:
        self._resource = resource
        self._output = output
        self._keep = keep

    def response(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """Return the response, which has one answer."""
        (answer,) = answers
        generation, start = answer.generation, 0
        for index, (text, count) in enumerate(zip(answer.pieces, answer.token_counts, strict=True)):
            tokens = slice(start, start + count)
            logprobs = generation.logprobs[tokens] or None
            final = index == len(answer.pieces) - 1
            _exhaust(self._output.feed(text, generation.token_ids[tokens], logprobs, final=final))
            start += count
        _exhaust(self._output.finish(is_complete=answer.finish_reason == FinishReason.STOP))
        response = self._resource.ended(
            generation.params,
            self._output.items(),
            usage,
            num_reasoning_tokens=self._output.num_reasoning_tokens,
            finish_reason=answer.finish_reason,
        )
        if self._keep is not None:
            self._keep(response)
        return response


def _exhaust(events: Iterable[StreamEvent]) -> None:
    for _ in events:
        pass


class ResponseEvents:
    """Writes the events of a streamed response."""

    num_choices = 1

    def __init__(
        self,
        resource: ResponseResource,
        output: Output,
        keep: Keep | None,
        generation: Generation,
        *,
        is_background: bool = False,
    ) -> None:
        self._resource = resource
        self._output = output
        self._keep = keep
        self._generation = generation
        self._finish_reason: str | None = None
        # In the background the first events are written before there is an answer.
        self._first_stages = ("in_progress",) if is_background else ("created", "in_progress")
        self._num_events = len(BACKGROUND_STAGES) if is_background else 0
        self._has_started = False

    def chunk(self, delta: Delta) -> bytes:
        """Return the events of one delta; the first ones say that the response has been created."""
        events = b"" if self._has_started else self._start()
        self._finish_reason = delta.finish_reason
        final = delta.finish_reason is not None
        return events + self._encode(self._output.feed(delta.text, delta.token_ids, delta.logprobs, final=final))

    def end(self) -> bytes:
        """Return the events that end the last item and the response."""
        events = self._encode(self._output.finish(is_complete=self._finish_reason == FinishReason.STOP))
        response = self._resource.ended(
            self._generation.params,
            self._output.items(),
            Usage.of([self._generation], 1),
            num_reasoning_tokens=self._output.num_reasoning_tokens,
            finish_reason=self._finish_reason,
        )
        if self._keep is not None:
            self._keep(response)
        return events + self._encode([{"type": f"response.{response['status']}", "response": response}])

    def error(self, error: ApiError) -> bytes:
        """Return the event of a stream that has failed; such a response is stored only in the background."""
        response = self._resource.failed(self._generation.params, self._output.items(), error)
        return self._encode([{"type": "response.failed", "response": response}])

    def _start(self) -> bytes:
        self._has_started = True
        response = self._resource.in_progress(self._generation.params)
        return self._encode({"type": f"response.{stage}", "response": response} for stage in self._first_stages)

    def _encode(self, events: Iterable[StreamEvent]) -> bytes:
        numbered = list(events)
        first, self._num_events = self._num_events, self._num_events + len(numbered)
        return encode_events(numbered, first)
