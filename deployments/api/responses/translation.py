"""The translation of a request into a chat request, and of errors about its fields back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from deployments.api.openai.protocol import ChatRequest
from deployments.api.responses.input_items import InputItem, messages_of, new_id
from deployments.api.responses.invalid_fields import invalid_field
from deployments.api.responses.protocol import ResponseRequest, TextFormat
from deployments.api.responses.tools import chat_choice, chat_tools
from engine.errors import RequestError

__all__ = ["chat_request", "field_name", "renamed"]

# Fields of the chat API that other APIs of vLLM have, too; the chat request checks them.
_PASSED_ON = (
    *("top_k", "min_p", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "min_tokens", "ignore_eos"),
    *("skip_special_tokens", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "cache_salt"),
    *("priority", "structured_outputs", "chat_template_kwargs", "documents", "thinking_token_budget"),
)
_SAME = (
    *("model", "stream", "temperature", "top_p", "parallel_tool_calls", "presence_penalty", "frequency_penalty"),
    *("prompt_cache_key", "prompt_cache_retention"),
)
_FIELD_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "logprobs": "top_logprobs",
}


def chat_request(request: ResponseRequest, items: Sequence[InputItem], num_bytes: int) -> ChatRequest:
    """Return the chat request that has the same answer.

    Args:
        request: the body.
        items: the whole input: that of earlier responses, and the request's own.
        num_bytes: length of the JSON of both.

    Raises:
        ApiError: 400 that names the wrong field.
        RequestError: for an invalid combination of fields.
    """
    fields = _chat_fields(request, items)
    try:
        chat = ChatRequest.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        wrong = invalid_field(error, fields)
        wrong.param = field_name(wrong.param)
        raise wrong from None
    chat.check()
    chat.set_num_bytes(num_bytes)
    return chat


def _chat_fields(request: ResponseRequest, items: Sequence[InputItem]) -> dict[str, Any]:
    extra = request.model_extra or {}
    instructions = [] if request.instructions is None else [{"role": "system", "content": request.instructions}]
    return {
        **{name: extra.get(name) for name in _PASSED_ON},
        **{name: getattr(request, name) for name in _SAME},
        "messages": [*instructions, *messages_of(items)],
        "max_completion_tokens": request.max_output_tokens,
        "logprobs": request.includes_logprobs,
        "top_logprobs": request.top_logprobs if request.includes_logprobs else None,
        "tools": chat_tools(request.tools, request.tool_choice),
        "tool_choice": chat_choice(request.tools, request.tool_choice),
        "reasoning_effort": None if request.reasoning is None else request.reasoning.effort,
        "response_format": _response_format(request.text_format),
        "request_id": new_id("")[1:],  # no client may choose the id under which a response is kept
    }


def _response_format(form: TextFormat) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    return {"type": form.type, "json_schema": {"name": form.name, "schema": form.schema_, "strict": form.strict}}


def field_name(param: str | None) -> str | None:
    """Return the field of the request that became ``param`` of the chat request."""
    return None if param is None else _FIELD_NAMES.get(param, param)


def renamed(error: RequestError) -> RequestError:
    """Return an error about a chat request as one about the request."""
    if error.param == "response_format":
        return error.renamed("text.format.schema" if error.part == "json_schema" else "text.format")
    name = field_name(error.param)
    return error if name is None else error.renamed(name, error.part)
