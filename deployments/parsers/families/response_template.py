"""Formats that a checkpoint's tokenizer describes itself: transformers' response templates.

Text and reasoning are emitted as they come, and a tool call once it is complete, since its JSON may be a dialect.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from deployments.parsers.events import CallArguments, CallStart, Content, Event, Reasoning, Steps
from deployments.parsers.families.think import plain
from deployments.parsers.json_calls import checked_name
from deployments.parsers.json_scanner import valid_json
from deployments.parsers.reader import MalformedError, Reader
from deployments.parsers.schema_types import ANY, Allowed, Tools
from deployments.parsers.typed_values import allowed_argument, as_json

__all__ = ["response_template"]

_REASONING = ("reasoning", "reasoning_content", "thinking")
_CALLS = "tool_calls"
# What transformers' content parsers raise, and what a call of another shape does.
_ERRORS = (ValueError, LookupError, TypeError, AttributeError, RecursionError, MalformedError)


def response_template(reader: Reader, template: Mapping[str, Any], prompt: str, tools: Tools | None) -> Steps[None]:
    """Read an answer as ``template`` describes it; ``prompt`` is the end of the prompt.

    The arguments of calls get the types that ``tools`` allow: some templates write all of them as text.

    transformers' parser is fed single characters, so that what was read before an error does not depend on how the text
    is cut. A region with an error becomes text, and so does everything after it.
    """
    parser = _parser(template, prompt)
    held = ""  # what was read since the last event of ours
    while (yield from reader.peek()):
        character = reader.take_one()
        held += character
        try:
            for event in parser.feed(character):
                parts = list(_events(event, tools))
                held = "" if parts else held
                yield from parts
        except _ERRORS:
            yield Content(held)
            yield from plain(reader)
            return
    try:
        _, events = parser.finalize()
        parts = [part for event in events for part in _events(event, tools)]
    except _ERRORS:
        parts = [Content(held)]
    yield from parts


def _parser(template: Mapping[str, Any], prompt: str) -> Any:
    from transformers.utils.chat_parsing import ResponseParser
    from transformers.utils.chat_parsing.response_templates import load_response_template

    loaded = load_response_template(dict(template))
    begins = prompt if loaded.start_anchor_re.search(prompt) else ""
    return ResponseParser(loaded, prefix=begins)


def _events(event: Mapping[str, Any], tools: Tools | None) -> Iterator[Event]:
    """Yield our events for one of transformers'."""
    name = event.get("field")
    if name == _CALLS and tools is not None:
        if event["type"] == "region_close":
            value = event["value"]
            for call in value if isinstance(value, list) else [value]:
                yield from _call(call["function"], tools)
    elif event["type"] == "region_chunk":
        yield Reasoning(event["text"]) if name in _REASONING else Content(event["text"])


def _call(function: Mapping[str, Any], tools: Tools) -> Iterator[Event]:
    arguments = function.get("arguments") or {}
    if isinstance(arguments, dict):
        parameters = tools.get(str(function["name"]), {})
        arguments = {key: _typed(value, allowed_argument(parameters, key)) for key, value in arguments.items()}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    if (checked := valid_json(text)) is None or not checked.startswith("{"):
        raise MalformedError
    yield CallStart(checked_name(str(function["name"])))
    yield CallArguments(checked.encode(errors="backslashreplace").decode())


def _typed(value: Any, allowed: Allowed) -> Any:
    """Return a value of a call, of an allowed type if it has an unambiguous form of that type."""
    types, text = allowed.types, value
    if not isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
    elif not types or (types & {"string", ANY} and (not allowed.listed or value in allowed.listed)):
        return value
    return json.loads(as_json(text, allowed))
