"""Answers whose form a grammar enforces: ``tool_choice`` with a function's name, or ``required``."""

from __future__ import annotations

from deployments.parsers.events import Steps
from deployments.parsers.families.think import plain
from deployments.parsers.json_calls import arguments, attempt, calls
from deployments.parsers.reader import Reader

__all__ = ["named_call", "required_calls"]


def named_call(reader: Reader, name: str) -> Steps[None]:
    """Read the arguments of a call of ``name``, which are the whole answer."""
    yield from attempt(reader, arguments(reader, name))
    yield from plain(reader)


def required_calls(reader: Reader) -> Steps[None]:
    """Read a JSON list of calls, which is the whole answer."""
    yield from attempt(reader, calls(reader))
    yield from plain(reader)
