"""Tool calls that are JSON objects with a name and arguments, alone or in a list."""

from __future__ import annotations

import json
from collections.abc import Container

from deployments.parsers.events import CallArguments, CallStart, Steps
from deployments.parsers.json_scanner import valid_json
from deployments.parsers.reader import MalformedError, Reader

__all__ = ["arguments", "attempt", "calls", "checked_name"]

_ARGUMENTS = ("arguments", "parameters")


def attempt(reader: Reader, steps: Steps[None]) -> Steps[bool]:
    """Read tool calls with ``steps``; returns False, with the position set back, if the text has another form.

    Arguments are emitted as they come, so an error after the start of a call cannot be undone: the text from the error
    on is then still to be read, and the result is True.
    """
    start, has_emitted = reader.position, False
    try:
        for event in steps:
            has_emitted = has_emitted or event is not None
            yield event
    except MalformedError:
        if not has_emitted:
            reader.position = start
        return has_emitted
    return True


def calls(reader: Reader, known: Container[str] | None = None, *, name_key: str = "name") -> Steps[None]:
    """Read an object that is a tool call, or a list of such objects.

    Args:
        reader: at the object or the list.
        known: the names that a call may have; None for all. A format without markers needs it, since an answer may be
            JSON for the user.
        name_key: the key of the function's name.

    Raises:
        MalformedError: the text has another form.
    """
    if (yield from reader.skip_space()) != "[":
        yield from _call(reader, known, name_key)
        return
    yield from reader.expect("[")
    while True:
        if not (yield from attempt(reader, _call(reader, known, name_key))):
            raise MalformedError
        if (yield from reader.skip_space()) == "]":
            yield from reader.expect("]")
            return
        yield from reader.expect(",")


def arguments(reader: Reader, name: str, call_id: str | None = None) -> Steps[None]:
    """Read a JSON object and emit it as the arguments of a new call of ``name``; ``call_id`` is as in CallStart.

    Raises:
        MalformedError: the text has another form.
    """
    if (yield from reader.skip_space()) != "{":
        raise MalformedError
    yield CallStart(checked_name(name), call_id)
    yield from reader.json(CallArguments)


def checked_name(name: str, known: Container[str] | None = None) -> str:
    """Return a function's name.

    Raises:
        MalformedError: it is empty, has whitespace, is not in ``known``, or is not text that can be sent.
    """
    has_space = any(character.isspace() for character in name)
    if not name or has_space or _has_surrogate(name) or (known is not None and name not in known):
        raise MalformedError
    return name


def _call(reader: Reader, known: Container[str] | None, name_key: str) -> Steps[None]:
    """Read one object; its arguments are emitted as they come if its name comes before them."""
    name: str | None = None
    held: str | None = None  # arguments that came before the name, or as a string
    has_emitted = False
    yield from reader.expect("{")
    while (yield from reader.skip_space()) != "}":
        key = yield from _string(reader)
        yield from reader.expect(":")
        first = yield from reader.skip_space()
        if key == name_key and name is None:
            name = checked_name((yield from _string(reader)), known)
        elif key not in _ARGUMENTS or has_emitted or held is not None:
            yield from reader.json()
        elif name is not None and first == "{":
            yield from arguments(reader, name)
            has_emitted = True
        else:
            held = _object_text((yield from reader.json()))
        if (yield from reader.skip_space()) != "}":
            yield from reader.expect(",")
    yield from reader.expect("}")
    if name is None:
        raise MalformedError
    if not has_emitted:
        yield CallStart(name)
        yield CallArguments(held or "{}")


def _string(reader: Reader) -> Steps[str]:
    if (yield from reader.skip_space()) != '"':
        raise MalformedError
    return str(json.loads((yield from reader.json())))


def _object_text(text: str) -> str:
    """Return arguments as the text of an object: ``text`` may also be a string that holds one, or null.

    Raises:
        MalformedError: for anything else.
    """
    if text == "null":
        return "{}"
    held = valid_json(str(json.loads(text)).strip() if text.startswith('"') else text)
    if held is None or not held.startswith("{") or _has_surrogate(held):
        raise MalformedError
    return held


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)
