"""The messages of a Messages request, as chat has them.

Messages of one role that follow each other are one turn. A message of the role ``system`` after the first turn is text
of the user's turn at that point: few chat templates accept it elsewhere than at the start, and moved there it would
change the beginning of the prompt with every request, so that the prefix cache could serve none of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from deployments.api.anthropic.blocks import Block, InputMessage, TextBlock, check_blocks, joined
from deployments.api.openai.messages import Message
from deployments.api.openai.tools import CalledFunction, ToolCall

__all__ = ["chat_messages"]


@dataclass
class _Turn:
    """Messages of one role that follow each other."""

    role: str
    blocks: list[Block] = field(default_factory=list)
    reminders: list[str] = field(default_factory=list)  # the system messages in it


def chat_messages(system: Sequence[TextBlock], messages: Sequence[InputMessage]) -> list[Message]:
    """Return the conversation with its system prompt.

    Raises:
        ApiError: for blocks that are invalid or not offered.
    """
    check_blocks(system, "system", "system")
    for index, message in enumerate(messages):
        check_blocks(message.content, message.role, f"messages[{index}].content")
    first = next((i for i, message in enumerate(messages) if message.role != "system"), len(messages))
    texts = [joined(system), *(joined(message.content) for message in messages[:first])]
    prompt = "\n".join(text for text in texts if text)
    rendered = [Message(role="system", content=prompt)] if prompt else []
    tool_names: dict[str, str] = {}  # by the id of the call
    for turn in _turns(messages[first:]):
        rendered += _user(turn, tool_names) if turn.role == "user" else [_assistant(turn.blocks, tool_names)]
    return rendered


def _turns(messages: Iterable[InputMessage]) -> Iterator[_Turn]:
    turn: _Turn | None = None
    for message in messages:
        role = "assistant" if message.role == "assistant" else "user"
        if turn is None or turn.role != role:
            if turn is not None:
                yield turn
            turn = _Turn(role)
        if message.role == "system":
            turn.reminders.append(f"<system-reminder>\n{joined(message.content)}\n</system-reminder>")
        else:
            turn.blocks += message.content
    if turn is not None:
        yield turn


def _user(turn: _Turn, tool_names: dict[str, str]) -> list[Message]:
    """Return the results of tools, which directly follow their calls, and what the user says after them."""
    results = [_tool_result(block, tool_names) for block in turn.blocks if block.type == "tool_result"]
    said = [block for block in turn.blocks if block.type == "text"]
    reminders = "\n".join(turn.reminders)
    if not said and results:
        if not reminders:
            return results
        # Not a message of its own: templates drop the reasoning before the last message of the user.
        last = results[-1].model_copy(update={"content": f"{results[-1].content}\n{reminders}"})
        return [*results[:-1], last]
    content = "\n".join([joined(said), reminders]) if said and reminders else joined(said) or reminders
    return [*results, Message(role="user", content=content)]


def _tool_result(block: Block, tool_names: dict[str, str]) -> Message:
    assert block.tool_use_id is not None
    text = joined(block.content or ())
    if block.is_error and "error" not in text[:40].lower():
        text = f"Error: {text}" if text else "Error"
    return Message(role="tool", tool_call_id=block.tool_use_id, name=tool_names.get(block.tool_use_id), content=text)


def _assistant(blocks: Sequence[Block], tool_names: dict[str, str]) -> Message:
    calls = [_call(block) for block in blocks if block.type == "tool_use"]
    tool_names.update({call.id: call.function.name for call in calls if call.id is not None})
    reasoning = "\n".join(block.thinking for block in blocks if block.type == "thinking" and block.thinking)
    return Message(
        role="assistant", content=joined(blocks), tool_calls=calls or None, reasoning_content=reasoning or None
    )


def _call(block: Block) -> ToolCall:
    assert block.name is not None
    return ToolCall(id=block.id, function=CalledFunction(name=block.name, arguments=block.input))
