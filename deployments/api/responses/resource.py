"""ResponseResource: the response object of the API, at each of its stages."""

from __future__ import annotations

import time
from typing import Any

from deployments.api.responses.protocol import ResponseRequest
from deployments.api.responses.tools import listed_tool
from deployments.api.writers import ResponseHead, Usage
from deployments.errors import ApiError
from engine.outputs import FinishReason
from engine.sampling_params import SamplingParams

__all__ = ["ResponseResource"]

_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class ResponseResource:
    """Writes one response at its stages: in progress, ended, failed.

    Args:
        head: the response's id, time and model.
        request: whose fields a response repeats.
        is_stored: whether the response will be kept.
    """

    def __init__(self, head: ResponseHead, request: ResponseRequest, *, is_stored: bool) -> None:
        self._head = head
        self._request = request
        self._is_stored = is_stored

    def in_progress(self, params: SamplingParams) -> dict[str, Any]:
        """Return the response before its first output item."""
        return self._fields(params)

    def ended(
        self,
        params: SamplingParams,
        output: list[dict[str, Any]],
        usage: Usage,
        *,
        num_reasoning_tokens: int,
        finish_reason: str | None,
    ) -> dict[str, Any]:
        """Return the response with its output: completed, or incomplete if the limit of tokens ended it."""
        ending: dict[str, Any] = {"status": "completed", "completed_at": int(time.time())}
        if finish_reason != FinishReason.STOP:
            ending = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        counts = usage_fields(usage, num_reasoning_tokens)
        return self._fields(params) | ending | {"output": output, "usage": counts}

    def failed(self, params: SamplingParams, output: list[dict[str, Any]], error: ApiError) -> dict[str, Any]:
        """Return the response of a stream that has failed, with the output until then."""
        described = {"code": _ERROR_CODES.get(error.status, "server_error"), "message": error.message}
        return self._fields(params) | {"status": "failed", "error": described, "output": output}

    def _fields(self, params: SamplingParams) -> dict[str, Any]:
        request, reasoning = self._request, self._request.reasoning
        verbosity = None if request.text is None else request.text.verbosity
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "completed_at": None,
            "status": "in_progress",
            "background": request.background is True,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "model": self._head.model,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": request.prompt_cache_key,
            "prompt_cache_retention": request.prompt_cache_retention,
            "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": self._is_stored,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "text": {"format": request.text_format.listed(), "verbosity": verbosity},
            "tool_choice": self._tool_choice(),
            "tools": [listed_tool(tool) for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "truncation": request.truncation or "disabled",
            "usage": None,
            "user": request.user,
            "metadata": request.metadata or {},
        }

    def _tool_choice(self) -> Any:
        choice = self._request.tool_choice
        return choice or "auto" if choice is None or isinstance(choice, str) else choice.model_dump()


def usage_fields(usage: Usage, num_reasoning_tokens: int) -> dict[str, Any]:
    """Return the ``usage`` of a response. Writing to the prefix cache costs nothing and is not counted."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
