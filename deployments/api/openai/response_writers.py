"""The bodies of chat and completion responses: whole ones, chunks of a stream, and usage.

They are plain dicts. ChunkWriter makes bytes of those of a stream. This module knows neither replicas nor HTTP.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from deployments.api.openai.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from deployments.api.openai.protocol import CompletionRequest, GenerationRequest
from deployments.api.writers import Answer, ResponseHead, Usage
from deployments.requests.generation import Delta, Generation
from engine.text.tokenizer import Tokenizer

__all__ = ["ChatWriter", "CompletionWriter", "ResponseWriter"]


class ResponseWriter(ABC):
    """Writes the answers to one request as the response bodies of one endpoint.

    Args:
        head: shared by all chunks of a response.
        request: which fields the client wants.
        tokenizer: for the tokens' texts.
    """

    id_prefix: str  # of the response id
    whole: str  # the ``object`` of a whole response
    chunk: str  # the ``object`` of a stream's chunk

    def __init__(self, head: ResponseHead, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self._head = head
        self._request = request
        self._tokenizer = tokenizer

    def response(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """Return the whole response."""
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        body = self._shared(self.whole) | {"choices": choices, "usage": self.usage_fields(usage)}
        return body | self._response_extras(answers[0].generation)

    def delta_chunk(self, delta: Delta, generation: Generation, *, first: bool) -> dict[str, Any]:
        """Return the chunk for one delta of a choice."""
        choice: dict[str, Any] = {"index": delta.index, **self._delta(delta.text, generation, first=first)}
        choice["logprobs"] = self.logprobs(delta, generation, first=first)
        choice["finish_reason"] = delta.finish_reason
        choice["stop_reason"] = delta.stop_reason
        ids = {"token_ids": delta.token_ids}
        choice |= self._if_wanted(ids | ({"prompt_token_ids": generation.prompt.token_ids} if first else {}))
        return self._shared(self.chunk) | {"choices": [choice]}

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """Return the last chunk of a stream that includes usage."""
        return self._shared(self.chunk) | {"choices": [], "usage": self.usage_fields(usage)}

    def usage_fields(self, usage: Usage) -> dict[str, Any]:
        """Return the ``usage`` of the response."""
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }

    def _shared(self, object_name: str) -> dict[str, Any]:
        return {"id": self._head.id, "object": object_name, "created": self._head.created, "model": self._head.model}

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        generation = answer.generation
        choice: dict[str, Any] = {"index": index, **self._message(answer.text, generation)}
        whole = Delta(index, "", generation.token_ids, logprobs=generation.logprobs)
        choice["logprobs"] = self.logprobs(whole, generation, first=True)
        choice["finish_reason"] = answer.finish_reason
        choice["stop_reason"] = answer.stop_reason
        choice |= self._if_wanted({"token_ids": generation.token_ids, "prompt_token_ids": generation.prompt.token_ids})
        return choice

    def _if_wanted(self, ids: dict[str, list[int]]) -> dict[str, Any]:
        """Return fields with token ids as vLLM does: null if they are declined, and none if they are not asked for."""
        wants_ids = self._request.return_token_ids
        if wants_ids is None:
            return {}
        return dict(ids) if wants_ids else dict.fromkeys(ids)

    def _prompt_logprobs(self, generation: Generation) -> dict[str, Any]:
        """Return vLLM's extra field, null unless it was requested."""
        top = self._request.prompt_logprobs
        if top is None:
            return {"prompt_logprobs": None}
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

    id_prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning so far, in all answers."""
        return 0

    def usage_fields(self, usage: Usage) -> dict[str, Any]:
        """As the base class, with the tokens of reasoning and of the prediction."""
        details = {
            "reasoning_tokens": self.num_reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_predicted,
            "rejected_prediction_tokens": usage.rejected_predicted,
        }
        return super().usage_fields(usage) | {"completion_tokens_details": details}

    def _message(self, text: str, generation: Generation) -> dict[str, Any]:
        content = generation.prompt.echo_text + text
        return {"message": {"role": "assistant", "content": content, "refusal": None}}

    def _delta(self, text: str, generation: Generation, *, first: bool) -> dict[str, Any]:
        if not first:
            return {"delta": {"content": text}}
        return {"delta": {"role": "assistant", "content": generation.prompt.echo_text + text}}

    def delta_chunk(self, delta: Delta, generation: Generation, *, first: bool) -> dict[str, Any]:
        """As the base class; the first chunk has the prompt's ids where a whole response has them, too."""
        chunk = super().delta_chunk(delta, generation, first=first)
        if first:
            chunk |= self._if_wanted({"prompt_token_ids": generation.prompt.token_ids})
        return chunk

    def logprobs(self, delta: Delta, generation: Generation, *, first: bool) -> Any:
        top, as_ids = self._request.num_shown_logprobs, bool(self._request.return_tokens_as_token_ids)
        if top is None:
            return None
        return chat_logprobs(self._tokenizer, delta.token_ids, delta.logprobs or (), top, as_ids=as_ids)

    def _response_extras(self, generation: Generation) -> dict[str, Any]:
        return self._prompt_logprobs(generation) | self._if_wanted({"prompt_token_ids": generation.prompt.token_ids})


class CompletionWriter(ResponseWriter):
    """POST /v1/completions."""

    id_prefix = "cmpl-"
    whole = "text_completion"
    chunk = "text_completion"

    def __init__(self, head: ResponseHead, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        super().__init__(head, request, tokenizer)
        self._echoes = isinstance(request, CompletionRequest) and request.echo
        self._logprobs_of: dict[int, CompletionLogprobs] = {}  # by choice

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        return super()._choice(index, answer) | self._prompt_logprobs(answer.generation)

    def _message(self, text: str, generation: Generation) -> dict[str, Any]:
        return {"text": generation.prompt.echo_text + text}

    def _delta(self, text: str, generation: Generation, *, first: bool) -> dict[str, Any]:
        return {"text": generation.prompt.echo_text + text if first else text}

    def logprobs(self, delta: Delta, generation: Generation, *, first: bool) -> Any:
        top = self._request.num_shown_logprobs
        if top is None:
            return None
        logprobs = self._logprobs_of.get(delta.index)
        if logprobs is None:
            logprobs = self._logprobs_of[delta.index] = CompletionLogprobs(
                self._tokenizer,
                top,
                skip_special_tokens=self._request.skip_special_tokens,
                as_ids=self._request.return_tokens_as_token_ids,
                prompt_token_ids=generation.prompt.token_ids,
                keeps_first_space=self._request.has_structured_output,
            )
        if not (first and self._echoes):
            return logprobs.add(delta.token_ids, delta.logprobs or ())
        prompt = generation.prompt
        of_prompt = generation.prompt_logprobs or [None] * len(prompt.token_ids)  # none if the answer failed at once
        parts = [
            logprobs.add_prompt(prompt.token_ids, of_prompt, prompt.echo_text),
            logprobs.add(delta.token_ids, delta.logprobs or ()),
        ]
        return {name: parts[0][name] + parts[1][name] for name in parts[0]}
