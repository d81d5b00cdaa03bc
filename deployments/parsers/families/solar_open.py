"""Solar Open: each call is an id, a name and JSON arguments between markers; messages have markers around them."""

from __future__ import annotations

from deployments.parsers.events import Steps
from deployments.parsers.json_calls import arguments
from deployments.parsers.marked import Thoughts
from deployments.parsers.reader import Reader
from deployments.parsers.schema_types import Tools

__all__ = ["SOLAR_OPEN_CALLS", "SOLAR_OPEN_DROPPED", "SOLAR_OPEN_MARKERS", "SOLAR_OPEN_THOUGHTS"]

_BEGIN, _NAME, _ARGUMENTS = "<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>"
_END = "<|tool_call:end|>"
_MAX_NAME = 256


def _call(reader: Reader, tools: Tools) -> Steps[None]:
    yield from reader.take_until([_NAME], limit=_MAX_NAME, never="\n")  # the id; ours is sent
    name, _ = yield from reader.take_until([_ARGUMENTS], limit=_MAX_NAME, never="\n<")
    yield from arguments(reader, name.strip())
    yield from reader.skip_space()
    yield from reader.literal(_END)


SOLAR_OPEN_CALLS = {_BEGIN: _call}
SOLAR_OPEN_MARKERS = (_BEGIN, _NAME, _ARGUMENTS, _END)
SOLAR_OPEN_THOUGHTS = Thoughts("<|think|>", "<|end|>")
SOLAR_OPEN_DROPPED = ("<|begin|>assistant", "<|content|>", "<|tool_calls|>", "<|calls|>", "<|end|>")
