"""The items of a request's ``input``: messages, function calls, their outputs, and reasoning.

They become the messages of a chat request, and the items of a conversation that is kept.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, TypeAdapter

from deployments.api.openai.messages import MAX_MESSAGES, MAX_PARTS
from deployments.api.responses.invalid_fields import MediaError, NotOfferedError
from deployments.errors import ApiError
from engine.errors import shown
from engine.text.media import media_problem

__all__ = [
    "Input",
    "InputItem",
    "InputMessage",
    "ItemReference",
    "messages_of",
    "new_id",
    "parse_conversation",
    "require_calls",
]

_KINDS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
_REMEDY = f"give one of {', '.join(_KINDS)}"
_OTHER_KINDS = frozenset(
    (
        *("file_search_call", "web_search_call", "computer_call", "computer_call_output"),
        *("code_interpreter_call", "image_generation_call", "local_shell_call", "local_shell_call_output"),
        *("shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output", "custom_tool_call"),
        *("custom_tool_call_output", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "mcp_call"),
        *("tool_search_call", "tool_search_output", "additional_tools", "compaction", "compaction_trigger"),
        *("program", "program_output", "configuration_update"),
    )
)


def new_id(prefix: str) -> str:
    """Return an id that no client can guess."""
    return f"{prefix}_{uuid.uuid4().hex}"


class _Fields(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True)


def _offered_part(part: object) -> object:
    kind = part.get("type") if isinstance(part, dict) else None
    if problem := media_problem(kind):
        raise MediaError(problem)
    if kind == "input_file":
        raise NotOfferedError(f"content of type {kind}", "send text")
    return part


class _TextPart(_Fields):
    type: Literal["input_text", "output_text"]
    text: str


class _RefusalPart(_Fields):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


_Part: TypeAlias = Annotated[_TextPart | _RefusalPart, Field(discriminator="type"), BeforeValidator(_offered_part)]
Text: TypeAlias = str | Annotated[list[_Part], Field(max_length=MAX_PARTS, fail_fast=True)]


def _joined(content: Text) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class InputItem(_Fields, ABC):
    """One item of an input."""

    id: Annotated[str, Field(max_length=128)] | None = None

    @abstractmethod
    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Add the item to the messages of a chat request; items of one answer share a message."""

    @abstractmethod
    def listed(self) -> dict[str, Any]:
        """Return the item as a list of input items has it, with an id and a status."""


class InputMessage(InputItem):
    """A message; that of an earlier answer has the role assistant."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Add the message; an assistant's joins the reasoning before it."""
        if self.role == "assistant":
            _answer_without(messages, "content", "tool_calls")["content"] = _joined(self.content)
        else:
            messages.append({"role": self.role, "content": _joined(self.content)})

    def listed(self) -> dict[str, Any]:
        """Return the message with its content as parts."""
        if self.role == "assistant":
            part: dict[str, Any] = {"type": "output_text", "text": _joined(self.content), "annotations": []}
            content = [part | {"logprobs": []}]
        elif isinstance(self.content, str):
            content = [{"type": "input_text", "text": self.content}]
        else:
            content = [{"type": "input_text", "text": part.text} for part in self.content]
        item = {"id": self.id or new_id("msg"), "type": "message", "status": "completed", "role": self.role}
        return item | {"content": content}


class FunctionCall(InputItem):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Add the call to the answer that it is a part of."""
        call = {"id": self.call_id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        _answer_without(messages).setdefault("tool_calls", []).append(call)

    def listed(self) -> dict[str, Any]:
        """Return the call."""
        item = {"id": self.id or new_id("fc"), "type": "function_call", "status": "completed"}
        return item | {"call_id": self.call_id, "name": self.name, "arguments": self.arguments}


class FunctionCallOutput(InputItem):
    """What a called function has returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: Text

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Add a message of the role tool."""
        messages.append({"role": "tool", "tool_call_id": self.call_id, "content": _joined(self.output)})

    def listed(self) -> dict[str, Any]:
        """Return the output as one text."""
        item = {"id": self.id or new_id("fco"), "type": "function_call_output", "status": "completed"}
        return item | {"call_id": self.call_id, "output": _joined(self.output)}


class _Thought(_Fields):
    text: str


_Thoughts: TypeAlias = Annotated[list[_Thought], Field(max_length=MAX_PARTS, fail_fast=True)]


class InputReasoning(InputItem):
    """Reasoning of an earlier answer; what is encrypted is ignored."""

    type: Literal["reasoning"]
    summary: _Thoughts = []
    content: _Thoughts | None = None

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Start the message of the answer that follows the reasoning."""
        if text := "\n".join(thought.text for thought in self.content or self.summary):
            messages.append({"role": "assistant", "reasoning": text})

    def listed(self) -> dict[str, Any]:
        """Return the reasoning."""
        item: dict[str, Any] = {"id": self.id or new_id("rs"), "type": "reasoning", "status": "completed"}
        item["summary"] = [{"type": "summary_text", "text": thought.text} for thought in self.summary]
        item["content"] = [{"type": "reasoning_text", "text": thought.text} for thought in self.content or ()]
        return item


class ItemReference(_Fields):
    """A reference to an output item of a response that is kept."""

    type: Literal["item_reference"] | None = None
    id: str


def _answer_without(messages: list[dict[str, Any]], *names: str) -> dict[str, Any]:
    """Return the assistant's message at the end, or a new one if there is none without the fields ``names``."""
    if not messages or messages[-1]["role"] != "assistant" or any(name in messages[-1] for name in names):
        messages.append({"role": "assistant"})
    return messages[-1]


def _kind_of(item: object) -> str:
    if not isinstance(item, dict):
        return str(getattr(item, "type", "message"))
    kind = item.get("type")
    return str(kind or ("message" if "role" in item or "id" not in item else "item_reference"))


def _checked_kind(item: object) -> object:
    """Reject an item that has no known type."""
    if (kind := _kind_of(item)) not in _KINDS:
        if kind in _OTHER_KINDS:
            raise NotOfferedError(f"an item of type {kind}", _REMEDY)
        raise ValueError(f"its type is unknown; {_REMEDY}")
    return item


_Item: TypeAlias = (
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")]
)
_ItemOrReference: TypeAlias = Annotated[
    _Item | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_kind_of),
    BeforeValidator(_checked_kind),
]
Input: TypeAlias = str | Annotated[list[_ItemOrReference], Field(max_length=MAX_MESSAGES, fail_fast=True)]
_CONVERSATION = TypeAdapter(list[Annotated[_Item, Discriminator(_kind_of)]])


def parse_conversation(items: list[dict[str, Any]]) -> list[InputItem]:
    """Return the items of a conversation that was kept."""
    return list(_CONVERSATION.validate_python(items))


def messages_of(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """Return the messages of a chat request."""
    messages: list[dict[str, Any]] = []
    for item in items:
        item.add_to(messages)
    return messages


def require_calls(items: Sequence[InputItem], earlier: Sequence[InputItem]) -> None:
    """Reject an output of a function that was not called.

    Args:
        items: of the request.
        earlier: items before them.

    Raises:
        ApiError: 400 that names the item of the request.
    """
    known = {item.call_id for item in earlier if isinstance(item, FunctionCall)}
    for index, item in enumerate(items):
        if isinstance(item, FunctionCall):
            known.add(item.call_id)
        elif isinstance(item, FunctionCallOutput) and item.call_id not in known:
            path = f"input[{index}].call_id"
            remedy = "put the function_call before its output, or give previous_response_id"
            raise ApiError(400, f"{path}={shown(item.call_id)} is of no function_call; {remedy}", param=path)
