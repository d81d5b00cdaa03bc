"""The fields of a request that concern tools, and the same fields of a chat request.

Here a function's name, parameters and strictness are fields of the tool itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from deployments.api.openai.tools import MAX_TOOLS
from deployments.api.responses.invalid_fields import NotOfferedError
from deployments.errors import ApiError
from engine.errors import shown

__all__ = ["ToolChoice", "Tools", "chat_choice", "chat_tools", "listed_tool"]

_OTHER_TOOLS = frozenset(
    (
        *("file_search", "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
        *("computer", "computer_use_preview", "mcp", "code_interpreter", "image_generation", "local_shell", "shell"),
        *("custom", "namespace", "tool_search", "apply_patch", "programmatic_tool_calling"),
    )
)


def _offered(value: object) -> object:
    if isinstance(value, dict) and str(value.get("type")) in _OTHER_TOOLS:
        raise NotOfferedError(f"a tool of type {value['type']}", "give functions")
    return value


class _Fields(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True)


class FunctionTool(_Fields):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(_Fields):
    """The choice of one function."""

    type: Literal["function"]
    name: str


class AllowedTools(_Fields):
    """The choice of some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


Tools: TypeAlias = Annotated[
    list[Annotated[FunctionTool, BeforeValidator(_offered)]], Field(max_length=MAX_TOOLS, fail_fast=True)
]
_Named: TypeAlias = Annotated[FunctionChoice | AllowedTools, Field(discriminator="type"), BeforeValidator(_offered)]
ToolChoice: TypeAlias = Literal["none", "auto", "required"] | _Named


def listed_tool(tool: FunctionTool) -> dict[str, Any]:
    """Return a tool as a response has it."""
    return tool.model_dump(include={"type", "name", "description", "parameters", "strict"})


def chat_tools(tools: Sequence[FunctionTool] | None, choice: ToolChoice | None) -> list[dict[str, Any]] | None:
    """Return the tools of a chat request, those that are allowed; None for none.

    Raises:
        ApiError: 400 if a tool is allowed that there is not.
    """
    if isinstance(choice, AllowedTools):
        allowed = [tool.name for tool in choice.tools]
        names = {tool.name for tool in tools or ()}
        for index, name in enumerate(allowed):
            if name not in names:
                path = f"tool_choice.tools[{index}].name"
                raise ApiError(400, f"{path}={shown(name)} is not in tools; choose one that is", param=path)
        tools = [tool for tool in tools or () if tool.name in allowed]
    return [_chat_tool(tool) for tool in tools or ()] or None


def _chat_tool(tool: FunctionTool) -> dict[str, Any]:
    function = tool.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True)
    return {"type": "function", "function": function}


def chat_choice(tools: Sequence[FunctionTool] | None, choice: ToolChoice | None) -> str | dict[str, Any] | None:
    """Return the choice of a chat request; without tools, ``auto`` is none."""
    if isinstance(choice, AllowedTools):
        return choice.mode
    if isinstance(choice, FunctionChoice):
        return {"type": "function", "function": {"name": choice.name}}
    return None if choice == "auto" and not tools else choice
