"""The fields of a chat request that concern tools, and the tool calls in its messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.errors import RequestError, shown

__all__ = ["Effort", "NamedChoice", "Tool", "ToolCall", "ToolChoice", "Tools", "check_size", "check_tools"]

MAX_TOOLS = 1_000
MAX_CALLS = 1_000
MAX_VALUES = 65_536  # of schemas, documents and options of the template; rendering that many takes about half a second
MAX_DEPTH = 64  # of schemas, arguments, documents and options of the template
Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^\S+$")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class _Fields(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True, protected_namespaces=())


class Function(_Fields):
    """A function that the model may call; ``parameters`` is a JSON schema, and without it there are none."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Fields):
    """A tool; all are functions."""

    type: Literal["function"]
    function: Function


class FunctionName(_Fields):
    """A function, by its name."""

    name: Name


class NamedChoice(_Fields):
    """The choice of one function."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(_Fields):
    """A call's function and arguments; the arguments are JSON text, or the object itself."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(_Fields):
    """A tool call of an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self, *, arguments_as_text: bool) -> dict[str, Any]:
        """Return the call as the chat template gets it. Text that is not a JSON object stays text."""
        arguments = _arguments(self.function.arguments)
        if arguments_as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        call = {"type": self.type, "function": {"name": self.function.name, "arguments": arguments}}
        return call if self.id is None else {"id": self.id, **call}


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | NamedChoice


def _arguments(given: str | dict[str, Any] | None) -> str | dict[str, Any]:
    if not isinstance(given, str):
        check_size("messages", given)
        return given or {}
    try:
        parsed = json.loads(given) if given.strip() else {}
    except (ValueError, RecursionError):
        return given
    check_size("messages", parsed)
    return parsed if isinstance(parsed, dict) else given


def check_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> None:
    """Reject an ambiguous list of tools, and a choice that does not fit it. An empty list is as good as none.

    Raises:
        RequestError: it names ``tools`` or ``tool_choice``.
    """
    if not tools:
        if choice not in (None, "none") and (tools is None or choice != "auto"):
            value = choice if isinstance(choice, str) else "function"
            raise RequestError("needs tools", param="tool_choice", value=value, remedy="leave it out")
        return
    names = [tool.function.name for tool in tools]
    repeated = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if repeated is not None:
        raise RequestError(f"has {shown(repeated)} twice", param="tools", remedy="give each function its own name")
    if isinstance(choice, NamedChoice) and choice.function.name not in names:
        problem = f"names the function {shown(choice.function.name)}, which is not in tools"
        raise RequestError(problem, param="tool_choice", remedy="choose one that is")
    check_size("tools", [(tool.function.parameters, tool.function.model_extra, tool.model_extra) for tool in tools])


def check_size(param: str, value: object) -> None:
    """Reject a value that has too many parts, or is nested too deep, to be rendered.

    Raises:
        RequestError: about ``param``.
    """
    level, num_values = [value], 0
    for _ in range(MAX_DEPTH + 1):
        level = [inner for outer in level for inner in _inner(outer)]
        if not level:
            return
        num_values += len(level)
        if num_values > MAX_VALUES:
            raise RequestError(f"has more than {MAX_VALUES} values", param=param, remedy="use fewer")
    raise RequestError(f"is nested deeper than {MAX_DEPTH}", param=param, remedy="use a flatter value")


def _inner(value: object) -> Sequence[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list | tuple) else ()
