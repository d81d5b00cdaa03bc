"""Content blocks: the parts of a message, of a tool's result and of the system prompt.

Text in a body is short for one text block. Unknown fields, such as ``cache_control``, are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from deployments.errors import ApiError
from engine.errors import shown
from engine.text.media import media_problem

__all__ = ["Block", "Fields", "InputMessage", "TextBlock", "TextBlocks", "check_blocks", "joined"]

MAX_BLOCKS = 10_000
# The fields that a block of each type must have.
_REQUIRED: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
_TYPES_OF_ROLE = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}


class Fields(BaseModel):
    """An object of a body."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, protected_namespaces=())


def _as_blocks(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


_Length = Field(max_length=MAX_BLOCKS, fail_fast=True)


class TextBlock(Fields):
    """A block of the system prompt or of a tool's result."""

    type: str
    text: str | None = None


TextBlocks = Annotated[
    list[TextBlock], _Length, BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock])
]


class Block(Fields):
    """A block of a message. ``check_blocks`` rejects one whose type lacks a field."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: TextBlocks | None = None  # of a tool's result
    is_error: bool | None = None


Blocks = Annotated[list[Block], _Length, BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block])]


class InputMessage(Fields):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


def check_blocks(blocks: Iterable[Block | TextBlock], role: str, path: str) -> None:
    """Reject blocks that a message of ``role`` cannot have, and blocks without the fields of their type.

    Raises:
        ApiError: 400 or, for a type that is not offered, 501; it names the block by its path in the body.
    """
    for index, block in enumerate(blocks):
        where = f"{path}[{index}]"
        if problem := media_problem(block.type):
            raise ApiError(400, f"{where}: {problem}", param=path.partition("[")[0])
        if block.type not in _REQUIRED:
            message = f"{where}.type={shown(block.type)} is not offered; send text, tool_use and tool_result blocks"
            raise ApiError(501, message, param=path.partition("[")[0])
        if block.type not in _TYPES_OF_ROLE[role]:
            allowed = ", ".join(_TYPES_OF_ROLE[role])
            message = f"{where}.type={shown(block.type)} cannot be part of the role {role}; send {allowed}"
            raise ApiError(400, message, param=path.partition("[")[0])
        for name in _REQUIRED[block.type]:
            if getattr(block, name, None) is None:
                raise ApiError(400, f"{where}.{name} is missing; give it", param=path.partition("[")[0])
        if isinstance(block, Block) and block.type == "tool_result":
            check_blocks(block.content or (), "system", f"{where}.content")


def joined(blocks: Iterable[Block | TextBlock]) -> str:
    """Return the text of text blocks, each on a line of its own, as chat joins the parts of a message."""
    return "\n".join(block.text or "" for block in blocks if block.type == "text")
