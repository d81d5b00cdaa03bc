"""Conversation: what the chat template renders, a body's messages, tools and options; Message is one message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from deployments.api.body import JsonBody
from deployments.api.openai.tools import MAX_CALLS, Effort, ToolCall, ToolChoice, Tools, check_size, check_tools
from deployments.errors import ApiError
from engine.errors import RequestError, listed, shown
from engine.text.media import media_problem

__all__ = ["MAX_MESSAGES", "RESERVED", "Conversation", "Message", "check_template_options"]

MAX_MESSAGES = 10_000
MAX_PARTS = 1_000
MAX_DOCUMENTS = 1_000
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
    refusal: str | None = None


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    role: Annotated[str, Field(min_length=1, max_length=64)]  # any that the template takes
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
            ApiError: 400 for images, sound and video, 501 for other parts that are not text.
        """
        if (self.model_extra or {}).get("function_call"):
            raise ApiError(501, "messages: function_call is not offered; send tool_calls", param="messages")
        message: dict[str, Any] = {"role": self.role, "content": self.text}
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

    @property
    def text(self) -> str:
        """The content as text; of an assistant's message without any, its refusal.

        Raises:
            ApiError: 400 for images, sound and video, 501 for other parts that are not text.
        """
        if self.content is None or isinstance(self.content, str):
            refusal = (self.model_extra or {}).get("refusal") if self.role == "assistant" else None
            return self.content or (refusal if isinstance(refusal, str) else "")
        return "\n".join(map(self._text_of, self.content))

    def _text_of(self, part: TextPart) -> str:
        text = part.text if part.type == "text" else None
        if part.type == "refusal" and self.role == "assistant":
            text = part.refusal
        if text is None and (problem := media_problem(part.type)):
            raise ApiError(400, f"messages: {problem}", param="messages")
        if text is None:
            raise ApiError(501, f"messages: content of type {shown(part.type)} is not offered", param="messages")
        return text


class Conversation(JsonBody):
    """The fields of a body that a chat template renders."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None  # None: auto if there are tools
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS, fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None  # None: unless the final message is continued
    continue_final_message: bool = False
    add_special_tokens: bool = False  # in addition to those that the template writes

    def check(self) -> None:
        """Reject invalid combinations of fields.

        Raises:
            RequestError: it names the field.
        """
        super().check()
        if (self.model_extra or {}).get("chat_template"):
            raise RequestError("cannot be set by a request", param="chat_template", remedy="leave it out")
        if self.continue_final_message and self.add_generation_prompt:
            remedy = "leave out one of them"
            raise RequestError("excludes add_generation_prompt", param="continue_final_message", remedy=remedy)
        check_tools(self.tools, self.tool_choice)
        check_size("documents", self.documents)
        check_template_options(self.chat_template_kwargs)

    @property
    def starts_answer(self) -> bool:
        """Whether the prompt ends with the start of an answer, which the template writes."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @property
    def continued_text(self) -> str:
        """What the answer continues: the final message's text, or its reasoning; empty if the answer is a new one."""
        if not self.continue_final_message:
            return ""
        message = self.messages[-1]
        return message.text or message.reasoning_content or message.reasoning or ""

    @property
    def offered_tools(self) -> Tools:
        """The tools that the answer may call: none with ``tool_choice`` none."""
        return [] if self.tools is None or self.tool_choice == "none" else self.tools

    @property
    def template_options(self) -> dict[str, Any]:
        """What the chat template gets in addition to the messages."""
        options: dict[str, Any] = {}
        if self.offered_tools:
            options["tools"] = [tool.model_dump(exclude_unset=True) for tool in self.offered_tools]
        if self.documents:
            options["documents"] = self.documents
        if self.reasoning_effort is not None:
            options["reasoning_effort"] = self.reasoning_effort
        if self.reasoning_effort == "none":
            options |= {"enable_thinking": False, "thinking": False}  # Qwen's and DeepSeek's names
        return options | (self.chat_template_kwargs or {})


def check_template_options(options: Mapping[str, Any] | None) -> None:
    """Reject options that would replace the template or what Pagoda gives to it.

    Raises:
        RequestError: about ``chat_template_kwargs``.
    """
    if reserved := [name for name in options or () if name in RESERVED]:
        problem, remedy = f"sets {listed(reserved)}", "leave that out; tools and documents are fields of the request"
        raise RequestError(problem, param="chat_template_kwargs", remedy=remedy)
    check_size("chat_template_kwargs", options)
