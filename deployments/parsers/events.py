"""The events of an answer: what a parser finds in its text."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

__all__ = ["CallArguments", "CallStart", "Content", "Event", "Reasoning", "Steps"]


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's chain of thought."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of the next tool call; its arguments follow.

    Attributes:
        name: of the function.
        call_id: the call's id, if the model has written one that its template expects in the next turn.
    """

    name: str
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text that is the arguments of the last tool call."""

    text: str


Event: TypeAlias = Content | Reasoning | CallStart | CallArguments

T = TypeVar("T")
# A part of a parser: yields events, and None when it needs more text; returns what it has read.
Steps: TypeAlias = Generator[Event | None, None, T]
