"""The bodies of POST /v1/messages and /v1/messages/count_tokens, and the chat request that each stands for.

A body is translated when it is checked, in the thread that parses it. Unknown fields are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, ValidationError

from deployments.api.anthropic.blocks import Fields, InputMessage, TextBlocks
from deployments.api.anthropic.conversation import chat_messages
from deployments.api.anthropic.tools import MessagesTool, ToolChoice, chat_choice, chat_tools
from deployments.api.openai.generation_request import Words
from deployments.api.openai.messages import MAX_MESSAGES, Message
from deployments.api.openai.protocol import ChatRequest
from deployments.api.openai.tools import MAX_TOOLS
from deployments.errors import ApiError
from engine.errors import RequestError
from engine.options.thinking_budget import MAX_INT32

__all__ = ["CountTokensRequest", "MessagesChatRequest", "MessagesRequest"]


class Thinking(Fields):
    """Whether and how long the model reasons, and whether the answer shows it."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    display: str | None = None


class OutputFormat(Fields):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    """How much effort the answer takes, and its form."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesChatRequest(ChatRequest):
    """The chat request of a Messages body; errors name the fields of that body."""

    endpoint = "/v1/messages"
    requires_thinking_budget = False  # a budget is a maximum, also for a model that does not reason
    max_tokens: Annotated[int, Field(ge=0)] | None = None

    def check(self) -> None:
        """Reject invalid combinations of fields."""
        try:
            super().check()
        except RequestError as error:
            raise self.renamed(error) from None

    @property
    def prompt_only(self) -> bool:
        """``max_tokens`` 0 computes the prompt, so that the prefix cache holds it."""
        return self.max_tokens == 0

    @property
    def field_names(self) -> Mapping[str, str]:
        """Messages have their own names."""
        return {
            "stop": "stop_sequences",
            "response_format": "output_config",
            "thinking_token_budget": "thinking",
            "thinking_budget": "thinking",
        }

    def renamed(self, error: RequestError) -> RequestError:
        """As the base class, whose names may have others here."""
        error = super().renamed(error)
        field = self.field_names.get(error.param or "")
        return error if field is None else error.renamed(field, error.part)


class CountTokensRequest(Fields):
    """Body of POST /v1/messages/count_tokens."""

    model: str
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: TextBlocks | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older name of output_config.format
    mcp_servers: list[Any] | None = None
    _chat: MessagesChatRequest | None = PrivateAttr(default=None)

    def check(self) -> None:
        """Translate the body.

        Raises:
            RequestError: for an invalid combination of fields.
            ApiError: for an invalid block, and 501 for what is not offered.
        """
        if self.mcp_servers:
            raise ApiError(501, "mcp_servers is not offered; call the servers' tools yourself", param="mcp_servers")
        fields = {**self._tool_fields(), **self._form_fields(), **self._thinking_fields(), **self._sampling_fields()}
        try:
            self._chat = MessagesChatRequest(
                model=self.model, messages=self._messages(), continue_final_message=self._continues, **fields
            )
        except ValidationError as error:  # of numbers of messages and of calls, which the translation changes
            problem = f"cannot be translated: {error.errors()[0]['msg'].lower()}"
            raise RequestError(problem, param="messages", remedy="send a shorter conversation") from None
        self._chat.check()

    def set_num_bytes(self, num_bytes: int) -> None:
        """Set the length of the JSON."""
        self.chat.set_num_bytes(num_bytes)

    @property
    def chat(self) -> MessagesChatRequest:
        """The chat request; there is one once the body is checked."""
        assert self._chat is not None
        return self._chat

    @property
    def _continues(self) -> bool:
        """Whether the answer continues the last message, which is the assistant's."""
        return self.messages[-1].role == "assistant"

    def _messages(self) -> list[Message]:
        if self._continues and any(block.type == "tool_use" for block in self.messages[-1].content):
            raise RequestError("ends with a call of a tool", param="messages", remedy="add a message with its result")
        if all(message.role == "system" for message in self.messages):
            raise RequestError("has no message of the user", param="messages", remedy="add one")
        return chat_messages(self.system or (), self.messages)

    def _tool_fields(self) -> dict[str, Any]:
        tools, choice = chat_tools(self.tools), chat_choice(self.tool_choice)
        if tools is None and choice == "auto":
            choice = None  # there is nothing to choose
        one_call = self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use
        return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False if one_call else None}

    def _form_fields(self) -> dict[str, Any]:
        config = self.output_config or OutputConfig()
        form = config.format or self.output_format
        fields: dict[str, Any] = {"reasoning_effort": config.effort}
        if form is not None:
            schema = {"name": "output", "schema": form.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields

    def _thinking_fields(self) -> dict[str, Any]:
        thinking = self.thinking or Thinking(type="disabled")
        thinks = thinking.type != "disabled"
        return {
            "chat_template_kwargs": {"enable_thinking": thinks, "thinking": thinks},  # Qwen's and DeepSeek's names
            "include_reasoning": thinks and thinking.display != "omitted",
            "thinking_token_budget": thinking.budget_tokens if thinking.type == "enabled" else None,
        }

    def _sampling_fields(self) -> dict[str, Any]:
        return {}


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=0)]  # 0 only computes the prompt
    stream: bool | None = None
    stop_sequences: Words | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: int | None = None

    def check(self) -> None:
        """Translate the body, and reject a budget that leaves no token for the answer."""
        super().check()
        budget = self.chat.thinking_token_budget
        if budget is not None and self.max_tokens and budget >= self.max_tokens:
            problem = f"must be less than max_tokens={self.max_tokens}"
            raise RequestError(problem, param="thinking", part="budget_tokens", value=budget, remedy="lower it")

    def _sampling_fields(self) -> dict[str, Any]:
        return {
            "max_tokens": self.max_tokens,
            "stream": self.stream,
            "stop": self.stop_sequences or None,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
