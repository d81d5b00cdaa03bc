"""Formats in which one parser reads a whole answer: text, reasoning and calls are messages with headers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from deployments.parsers.families import functionary, harmony, muse_glimmer
from deployments.parsers.reader import Family
from deployments.parsers.schema_types import Tools

__all__ = ["WHOLE_FORMATS", "WholeFormat"]


@dataclass(frozen=True)
class WholeFormat:
    """A format; any of its names chooses it, since plain answers have headers, too.

    Attributes:
        tool: a key of TOOL_PARSERS.
        reasoning: a key of REASONING_PARSERS; None for models that do not reason.
        markers: the special tokens that it needs to see.
        new: returns the parser for a request's tools, None for none, and for the end of the prompt, which may have
            written the header of the message that the answer continues.
    """

    tool: str
    reasoning: str | None
    markers: tuple[str, ...]
    new: Callable[[Tools | None, str], Family]


WHOLE_FORMATS = (
    WholeFormat(
        "openai",
        "openai_gptoss",
        harmony.MARKERS,
        lambda tools, prompt: partial(harmony.harmony, prompt=prompt, tools=tools),
    ),
    WholeFormat(
        "muse_glimmer",
        "muse_glimmer",
        muse_glimmer.MUSE_MARKERS,
        lambda tools, prompt: partial(muse_glimmer.muse_glimmer, prompt=prompt, tools=tools),
    ),
    WholeFormat(
        "functionary_v32", None, (), lambda tools, prompt: partial(functionary.functionary, prompt=prompt, tools=tools)
    ),
)
