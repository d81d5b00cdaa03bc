"""Message: one message of a chat request, and the form in which the chat template gets it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from deployments.api.openai.tools import MAX_CALLS, ToolCall, check_size
from deployments.errors import ApiError
from engine.errors import RequestError, shown

__all__ = ["MAX_MESSAGES", "RESERVED", "Message", "check_template_options"]

MAX_MESSAGES = 10_000
MAX_PARTS = 1_000
# The parameters of transformers' apply_chat_template, and what the template gets from them.
RESERVED = frozenset(
    (
        *("self", "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "kwargs"),
    )
)


class TextPart(BaseModel):
    """One part of a message's content."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    type: str
    text: str | None = None


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    def for_template(self, *, arguments_as_text: bool = False) -> dict[str, Any]:
        """Return the message as the chat template gets it.

        Args:
            arguments_as_text: the template takes the arguments of tool calls as JSON text, not as a mapping.

        Raises:
            ApiError: 501 for parts that are not text.
        """
        if (self.model_extra or {}).get("function_call"):
            raise ApiError(501, "messages: function_call is not offered; send tool_calls", param="messages")
        message: dict[str, Any] = {"role": self.role, "content": self._text()}
        if self.tool_calls:
            calls = [call.for_template(arguments_as_text=arguments_as_text) for call in self.tool_calls]
            message["tool_calls"] = calls
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None and self.role == "tool":
            message["name"] = self.name
        if reasoning := self.reasoning_content or self.reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
            if not message["content"]:
                message["thinking"] = reasoning  # GPT-OSS's name; its template refuses it beside content
        return message

    def _text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        for part in self.content:
            if part.type != "text" or part.text is None:
                raise ApiError(501, f"messages: content of type {shown(part.type)} is not offered", param="messages")
        return "\n".join(part.text or "" for part in self.content)


def check_template_options(options: Mapping[str, Any] | None) -> None:
    """Reject options that would replace the template or what Pagoda gives to it.

    Raises:
        RequestError: about ``chat_template_kwargs``.
    """
    for name in options or ():
        if name in RESERVED:
            remedy = "leave it out; tools and documents are fields of the request"
            raise RequestError(f"sets {shown(name)}", param="chat_template_kwargs", remedy=remedy)
    check_size("chat_template_kwargs", options)
