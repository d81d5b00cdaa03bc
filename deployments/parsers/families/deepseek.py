"""DeepSeek V3, R1 and V3.1: calls between ``<｜tool▁call▁begin｜>`` and ``<｜tool▁call▁end｜>``.

V3 writes ``function<｜tool▁sep｜>name`` and the arguments in a fenced block, V3.1 ``name<｜tool▁sep｜>{...}``.
"""

from __future__ import annotations

from deployments.parsers.events import Content, Steps
from deployments.parsers.json_calls import arguments, attempt
from deployments.parsers.reader import Reader

__all__ = ["MARKERS", "deepseek"]

_FIRST, _LAST = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
MARKERS = (_FIRST, _LAST, _BEGIN, _SEPARATOR, _END)
_FENCE = "```"
_MAX_NAME = 256


def deepseek(reader: Reader) -> Steps[None]:
    """Read text and tool calls."""
    while (marker := (yield from reader.until([_FIRST, _LAST, _BEGIN], Content))) is not None:
        if marker == _BEGIN and not (yield from attempt(reader, _call(reader))):
            yield Content(marker)


def _call(reader: Reader) -> Steps[None]:
    """Read one call and its end marker."""
    name, _ = yield from reader.take_until([_SEPARATOR], limit=_MAX_NAME, never="\n")
    is_fenced = (yield from reader.skip_space()) != "{"
    if is_fenced:
        name, _ = yield from reader.take_until([_FENCE], limit=_MAX_NAME)
        yield from reader.literal("json")
    yield from arguments(reader, name.strip())
    yield from reader.skip_space()
    if is_fenced:
        yield from reader.literal(_FENCE)
        yield from reader.skip_space()
    yield from reader.literal(_END)
