"""TemplateForms: which forms of messages a chat template takes, found by rendering small conversations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, Literal, TypeAlias

from engine.errors import RequestError

__all__ = ["LateSystemMessages", "TemplateForms"]

LateSystemMessages: TypeAlias = Literal["refuse", "merge"]
_Message: TypeAlias = dict[str, Any]
_SEPARATOR = "\n\n"  # between texts that are joined
_NAMES = ("first_probe", "second_probe")
_TEXTS = ("the reasoning probe", "the content probe", "the system probe")
_ARGUMENTS: tuple[Any, Any] = ({"key": "value"}, '{"key": "value"}')  # as a mapping, and as text


class TemplateForms:
    """The forms of messages that a chat template takes.

    A form that the template does not take is one with which it fails, or which it leaves out of the prompt.

    Args:
        render: returns the text of messages; raises anything.
        late_system_messages: whether system messages after the first message, if the template does not take them, are
            refused or merged into the first one.
    """

    def __init__(
        self, render: Callable[[Sequence[_Message]], str], late_system_messages: LateSystemMessages = "refuse"
    ) -> None:
        self._render = render
        self._late_system_messages = late_system_messages

    @cached_property
    def arguments_as_text(self) -> bool:
        """Whether the template takes the arguments of a tool call as JSON text, not as a mapping.

        A template that takes text either fails with a mapping, or writes it as Python does.
        """
        as_mapping, as_text = (
            self._rendered([_call("call_000", "f", arguments, self._no_content)]) for arguments in _ARGUMENTS
        )
        return "'key'" in as_mapping if as_mapping is not None else "key" in (as_text or "")

    def adapted(self, messages: Sequence[_Message]) -> Sequence[_Message]:
        """Return messages in the forms that the template takes.

        Raises:
            RequestError: about ``messages``, for a late system message that is refused.
        """
        late = [index for index, message in enumerate(messages) if index and message.get("role") == "system"]
        if late and not self._takes_late_system_messages:
            messages = self._without_late(messages, late)
        if any(map(_has_both, messages)) and not self._takes_reasoning_with_content:
            messages = [_with_joined_reasoning(message) if _has_both(message) else message for message in messages]
        if any(map(_has_parallel_calls, messages)) and not self._takes_parallel_calls:
            messages = _with_single_calls(messages)
        if self._no_content is None:
            messages = [part for message in messages for part in _with_calls_apart(message)]
        return [_in_parts(message) for message in messages] if self._needs_parts else messages

    def _without_late(self, messages: Sequence[_Message], late: Sequence[int]) -> Sequence[_Message]:
        if self._late_system_messages == "refuse":
            raise RequestError(
                f"cannot be rendered: the chat template does not take a system message at messages[{late[0]}]",
                param="messages",
                remedy="send it first, or set late_system_messages: merge in the server's configuration",
            )
        system = [message for message in messages if message.get("role") == "system"]
        rest = [message for message in messages if message.get("role") != "system"]
        return [system[0] | {"content": _SEPARATOR.join(_text_of(message) for message in system)}, *rest]

    @cached_property
    def _needs_parts(self) -> bool:
        """Whether the template reads only lists of parts as content, as those of some multimodal checkpoints do."""
        message = {"role": "user", "content": _TEXTS[1]}
        as_text, as_parts = (self._try_to_render([probe]) or "" for probe in (message, _in_parts(message)))
        return _TEXTS[1] not in as_text and _TEXTS[1] in as_parts and "'type'" not in as_parts

    @cached_property
    def _takes_late_system_messages(self) -> bool:
        system, user = {"role": "system", "content": _TEXTS[2]}, {"role": "user", "content": "a"}
        return _TEXTS[2] in (self._rendered([{"role": "assistant", "content": "b"}, system, user]) or "")

    @cached_property
    def _no_content(self) -> str | None:
        """What a message with calls alone has as content: None for a template that leaves out calls beside any text."""
        for content in ("", None):
            for arguments in _ARGUMENTS:
                if _NAMES[0] in (self._rendered([_call("call_000", _NAMES[0], arguments, content)]) or ""):
                    return content
        return ""

    @cached_property
    def _takes_reasoning_with_content(self) -> bool:
        reasoning, content, _ = _TEXTS
        message = self._called(_NAMES[:1])
        if self._rendered([message | {"content": content}]) is None:
            return True  # nothing that this changes would help
        return self._rendered([message | {"content": content} | _reasoning(reasoning)]) is not None

    @cached_property
    def _takes_parallel_calls(self) -> bool:
        one, both = (self._rendered([self._called(names)]) for names in (_NAMES[:1], _NAMES))
        if one is None or _NAMES[0] not in one:
            return True  # nor does it take a single call
        return both is not None and all(name in both for name in _NAMES)

    def _called(self, names: Sequence[str]) -> _Message:
        arguments = _ARGUMENTS[self.arguments_as_text]
        calls = [_call(f"{index:09}", name, arguments, "")["tool_calls"][0] for index, name in enumerate(names)]
        return {"role": "assistant", "content": self._no_content, "tool_calls": calls}

    def _rendered(self, messages: Sequence[_Message]) -> str | None:
        """Return the text of a question and ``messages``; None if the template fails."""
        conversation = [{"role": "user", "content": "a"}, *messages]
        return self._try_to_render(map(_in_parts, conversation) if self._needs_parts else conversation)

    def _try_to_render(self, messages: Iterable[_Message]) -> str | None:
        try:
            return self._render([*messages])
        except Exception:  # templates raise anything
            return None


def _call(call_id: str, name: str, arguments: Any, content: str | None) -> _Message:
    call = {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _in_parts(message: _Message) -> _Message:
    """Return a message whose content is a list of parts, not text."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return message | {"content": [{"type": "text", "text": content}] if content else []}


def _text_of(message: _Message) -> str:
    """Return the content of a message as text; it may be a list of parts."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part.get("text") or "" for part in content)


def _reasoning(text: str) -> _Message:
    return {"reasoning_content": text, "reasoning": text}


def _has_both(message: _Message) -> bool:
    """Whether a message has reasoning, content and tool calls."""
    return bool(message.get("tool_calls") and message.get("content") and message.get("reasoning_content"))


def _with_calls_apart(message: _Message) -> list[_Message]:
    """Return a message whose calls have no content beside them: its text, if it has any, is a message before them."""
    if not message.get("tool_calls"):
        return [message]
    if not _text_of(message):
        return [message | {"content": None}]
    text = {name: value for name, value in message.items() if name != "tool_calls"}
    return [text, {"role": message["role"], "content": None, "tool_calls": message["tool_calls"]}]


def _has_parallel_calls(message: _Message) -> bool:
    return len(message.get("tool_calls") or ()) > 1


def _with_joined_reasoning(message: _Message) -> _Message:
    """Return a message whose content follows its reasoning, as the template writes either in the same place."""
    text = f"{message['reasoning_content']}{_SEPARATOR}{_text_of(message)}"
    return message | {"content": ""} | _reasoning(text)


def _with_single_calls(messages: Sequence[_Message]) -> list[_Message]:
    """Return messages with one call each, every call followed by its result."""
    adapted: list[_Message] = []
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        if not _has_parallel_calls(message):
            adapted.append(message)
            continue
        end = position
        while end < len(messages) and messages[end].get("role") == "tool":
            end += 1
        adapted += _one_by_one(message, list(messages[position:end]))
        position = end
    return adapted


def _one_by_one(message: _Message, results: list[_Message]) -> list[_Message]:
    """Return a message's calls as messages, each followed by the result that names its id."""
    separated: list[_Message] = []
    for index, call in enumerate(message["tool_calls"]):
        first = message if index == 0 else {"role": message["role"], "content": ""}
        separated.append(first | {"tool_calls": [call]})
        call_id = call.get("id")
        own = [result for result in results if call_id is not None and result.get("tool_call_id") == call_id]
        separated += own
        results = [result for result in results if result not in own]
    return separated + results
