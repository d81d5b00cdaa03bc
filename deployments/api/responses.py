"""The OpenAI response bodies: whole responses, chunks of a stream, and usage.

They are plain dicts. ChunkWriter makes bytes of those of a stream. This module knows neither replicas nor HTTP.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments.api.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from deployments.api.protocol import CompletionRequest, GenerationRequest
from deployments.requests.generation import Delta, Generation
from engine.text.tokenizer import Tokenizer

__all__ = ["Answer", "ChatWriter", "CompletionWriter", "ResponseWriter", "best_answers", "usage"]


@dataclass(slots=True)
class Answer:
    """One answer of a whole response, collected from its deltas."""

    generation: Generation
    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        self.pieces.append(delta.text)
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


class ResponseWriter(ABC):
    """Writes the answers to one request as the response bodies of one endpoint.

    Args:
        response_id: shared by all chunks of a response.
        created: Unix time in seconds, shared by all chunks.
        model: the served name.
        request: which fields the client wants.
        tokenizer: for the tokens' texts.
    """

    id_prefix: str  # of the response id
    whole: str  # the ``object`` of a whole response
    chunk: str  # the ``object`` of a stream's chunk

    def __init__(
        self, response_id: str, created: int, model: str, request: GenerationRequest, tokenizer: Tokenizer
    ) -> None:
        self._id = response_id
        self._created = created
        self._model = model
        self._request = request
        self._tokenizer = tokenizer

    def response(self, answers: Sequence[Answer], tokens: dict[str, Any]) -> dict[str, Any]:
        """Return the whole response; ``tokens`` is its usage."""
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        body = self._head(self.whole) | {"choices": choices, "usage": tokens}
        return body | self._response_extras(answers[0].generation)

    def delta_chunk(self, delta: Delta, generation: Generation, *, first: bool) -> dict[str, Any]:
        """Return the chunk for one delta of a choice."""
        choice: dict[str, Any] = {"index": delta.index, **self._delta(delta.text, generation, first=first)}
        choice["logprobs"] = self.logprobs(delta, generation, first=first)
        choice["finish_reason"] = delta.finish_reason
        choice["stop_reason"] = delta.stop_reason
        if self._request.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if first:
                choice["prompt_token_ids"] = generation.prompt.token_ids
        return self._head(self.chunk) | {"choices": [choice]}

    def usage_chunk(self, tokens: dict[str, Any]) -> dict[str, Any]:
        """Return the last chunk of a stream that includes usage."""
        return self._head(self.chunk) | {"choices": [], "usage": tokens}

    def _head(self, object_name: str) -> dict[str, Any]:
        return {"id": self._id, "object": object_name, "created": self._created, "model": self._model}

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        generation = answer.generation
        choice: dict[str, Any] = {"index": index, **self._message(answer.text, generation)}
        whole = Delta(index, "", generation.token_ids, logprobs=generation.logprobs)
        choice["logprobs"] = self.logprobs(whole, generation, first=True)
        choice["finish_reason"] = answer.finish_reason
        choice["stop_reason"] = answer.stop_reason
        if self._request.return_token_ids:
            choice["token_ids"] = generation.token_ids
            choice["prompt_token_ids"] = generation.prompt.token_ids
        return choice

    def _prompt_logprobs(self, generation: Generation) -> dict[str, Any]:
        """Return vLLM's extra field if it was requested."""
        top = self._request.prompt_logprobs
        if top is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self._tokenizer, generation.prompt_logprobs or (), top)}

    def _response_extras(self, generation: Generation) -> dict[str, Any]:
        return {}

    @abstractmethod
    def _message(self, text: str, generation: Generation) -> dict[str, Any]:
        """Return a whole choice's text in this endpoint's shape."""

    @abstractmethod
    def _delta(self, text: str, generation: Generation, *, first: bool) -> dict[str, Any]:
        """Return a delta's text in this endpoint's shape."""

    @abstractmethod
    def logprobs(self, delta: Delta, generation: Generation, *, first: bool) -> Any:
        """Return the log-probabilities of a delta's tokens in this endpoint's shape; None if not requested."""


class ChatWriter(ResponseWriter):
    """POST /v1/chat/completions."""

    id_prefix = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def _message(self, text: str, generation: Generation) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str, generation: Generation, *, first: bool) -> dict[str, Any]:
        content = {"content": text}
        return {"delta": {"role": "assistant", **content} if first else content}

    def logprobs(self, delta: Delta, generation: Generation, *, first: bool) -> Any:
        top = self._request.num_logprobs
        return None if top is None else chat_logprobs(self._tokenizer, delta.token_ids, delta.logprobs or (), top)

    def _response_extras(self, generation: Generation) -> dict[str, Any]:
        extras = self._prompt_logprobs(generation)
        return extras | ({"prompt_token_ids": generation.prompt.token_ids} if self._request.return_token_ids else {})


class CompletionWriter(ResponseWriter):
    """POST /v1/completions."""

    id_prefix = "cmpl"
    whole = "text_completion"
    chunk = "text_completion"

    def __init__(
        self, response_id: str, created: int, model: str, request: GenerationRequest, tokenizer: Tokenizer
    ) -> None:
        super().__init__(response_id, created, model, request, tokenizer)
        self._echoes = isinstance(request, CompletionRequest) and request.echo
        self._logprobs_of: dict[int, CompletionLogprobs] = {}  # by choice

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        return super()._choice(index, answer) | self._prompt_logprobs(answer.generation)

    def _message(self, text: str, generation: Generation) -> dict[str, Any]:
        return {"text": generation.prompt.echo_text + text}

    def _delta(self, text: str, generation: Generation, *, first: bool) -> dict[str, Any]:
        return {"text": generation.prompt.echo_text + text if first else text}

    def logprobs(self, delta: Delta, generation: Generation, *, first: bool) -> Any:
        top = self._request.num_logprobs
        if top is None:
            return None
        logprobs = self._logprobs_of.get(delta.index)
        if logprobs is None:
            skip = self._request.skip_special_tokens
            logprobs = self._logprobs_of[delta.index] = CompletionLogprobs(
                self._tokenizer, top, skip_special_tokens=skip
            )
        if not (first and self._echoes):
            return logprobs.add(delta.token_ids, delta.logprobs or ())
        prompt = generation.prompt
        of_prompt = generation.prompt_logprobs or [None] * len(prompt.token_ids)  # none if the answer failed at once
        parts = [logprobs.add(prompt.token_ids, of_prompt)]
        logprobs.skip_to(len(prompt.echo_text))
        parts.append(logprobs.add(delta.token_ids, delta.logprobs or ()))
        return {name: parts[0][name] + parts[1][name] for name in parts[0]}


def usage(generations: Sequence[Generation], num_generated: int) -> dict[str, Any]:
    """Return the token counts so far. A prompt counts once, however many answers (``num_generated``) it has."""
    prompt = sum(len(generation.prompt.token_ids) for generation in generations[::num_generated])
    completion = sum(len(generation.token_ids) for generation in generations)
    cached = sum(generation.num_cached_tokens for generation in generations[::num_generated])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
