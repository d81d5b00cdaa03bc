"""The tools of a Messages request, and which of them the answer must call, as chat has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from deployments.api.anthropic.blocks import Fields
from deployments.api.openai.tools import Function, FunctionName, Name, NamedChoice, Tool
from deployments.api.openai.tools import ToolChoice as ChatToolChoice
from deployments.errors import ApiError
from engine.errors import RequestError, shown

__all__ = ["MessagesTool", "ToolChoice", "chat_choice", "chat_tools"]


class MessagesTool(Fields):
    """A tool that the client runs; those with another type run at Anthropic's or have its schemas."""

    type: str | None = None
    name: Name | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(Fields):
    """Which tools the answer may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


def chat_tools(tools: Sequence[MessagesTool] | None) -> list[Tool] | None:
    """Return the tools as functions; None if there are none.

    Raises:
        ApiError: 501 for a tool that is not the client's, 400 for one without a name or schema.
    """
    return [_chat_tool(index, tool) for index, tool in enumerate(tools or ())] or None


def _chat_tool(index: int, tool: MessagesTool) -> Tool:
    if tool.type not in (None, "custom"):
        message = f"tools[{index}].type={shown(tool.type)} is not offered; send tools with a name and an input_schema"
        raise ApiError(501, message, param="tools")
    if tool.name is None or tool.input_schema is None:
        missing = "name" if tool.name is None else "input_schema"
        raise ApiError(400, f"tools[{index}].{missing} is missing; give it", param="tools")
    given = {"description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
    set_fields = {name: value for name, value in given.items() if value is not None}  # templates write these
    return Tool(type="function", function=Function.model_validate({"name": tool.name, **set_fields}))


def chat_choice(choice: ToolChoice | None) -> ChatToolChoice | None:
    """Return the choice as chat has it.

    Raises:
        RequestError: if a tool must be called, but none is named.
    """
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise RequestError("needs a name", param="tool_choice", value="tool", remedy="give the name of a tool")
        return NamedChoice(type="function", function=FunctionName(name=choice.name))
    return "required" if choice.type == "any" else choice.type
