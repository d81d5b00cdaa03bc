"""Calls as tags: ``<invoke name="f"><parameter name="key">value</parameter></invoke>``, in a table of spellings.

Qwen3-Coder, Seed-OSS, MiniMax-M2, DeepSeek V3.2 and V4 (DSML), GLM, Hunyuan 3, Step 3, MiniCPM5 and Muse Glimmer differ
in the tags. A value is text, and the tool's schema decides which JSON it stands for, unless the format states it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from json.encoder import encode_basestring

from deployments.parsers.events import CallArguments, CallStart, Steps
from deployments.parsers.json_calls import checked_name
from deployments.parsers.json_scanner import GrowingJson
from deployments.parsers.marked import CallReader
from deployments.parsers.reader import MalformedError, Reader
from deployments.parsers.schema_types import ANY, Allowed, Tools
from deployments.parsers.typed_values import allowed_argument, as_json, string_piece

__all__ = ["ATEM", "HY_V3", "XML_FORMATS", "XmlFormat"]

_MAX_NAME = 256
_MAX_VALUE = 2**20  # characters of a value that is not streamed


@dataclass(frozen=True)
class XmlFormat:
    """The tags of a format.

    Attributes:
        begin: before one call or several.
        end: after them; empty if ``call_end`` is the last tag.
        call: before a call's name; empty if the name follows ``begin``.
        name_end: after the name, if nothing else ends it.
        call_end: after the last parameter; it may be missing between a parameter and ``end``.
        parameter: before a parameter's name.
        key_ends: after a parameter's name -> the type that it states; None if the schema decides.
        value: before the value, after whitespace.
        value_end: after the value.
        raw: before and after a value that may hold tags, inside of ``value_end``.
        trims: a line break before and after a value is not part of it.
        allows_python: lists and objects may be written as in Python.
        is_bare: ``begin`` may be missing.
        tokens: single tokens that the tags consist of.
    """

    begin: str
    end: str = "</tool_call>"
    call: str = ""
    name_end: str = ">"
    call_end: str = "</function>"
    parameter: str = "<parameter="
    key_ends: Mapping[str, str | None] = field(default_factory=lambda: {">": None})
    value: str = ""
    value_end: str = "</parameter>"
    raw: tuple[str, str] | None = None
    trims: bool = False
    allows_python: bool = False
    is_bare: bool = False
    tokens: tuple[str, ...] = ()

    @property
    def calls(self) -> Mapping[str, CallReader]:
        """What reads the calls, by the marker before them."""
        block = {self.begin: partial(_block, format=self)}
        return block | {self.call: partial(_bare_call, format=self)} if self.is_bare else block

    @property
    def markers(self) -> tuple[str, ...]:
        """The tags that may be special tokens."""
        tags = (self.begin, self.end, self.call, self.name_end, self.call_end, self.parameter, self.value)
        return tuple(dict.fromkeys(tag for tag in (*tags, *self.key_ends, self.value_end, *self.tokens) if tag))


def _dsml(block: str) -> XmlFormat:
    tag = "｜DSML｜"
    return XmlFormat(
        begin=f"<{tag}{block}>",
        end=f"</{tag}{block}>",
        call=f'<{tag}invoke name="',
        name_end='">',
        call_end=f"</{tag}invoke>",
        parameter=f'<{tag}parameter name="',
        key_ends={'" string="true">': "string", '" string="false">': ANY, '">': None},
        value_end=f"</{tag}parameter>",
        tokens=(tag,),
    )


def _hy_v3(suffix: str) -> XmlFormat:
    return XmlFormat(
        f"<tool_calls{suffix}>",
        end=f"</tool_calls{suffix}>",
        call=f"<tool_call{suffix}>",
        name_end=f"<tool_sep{suffix}>",
        call_end=f"</tool_call{suffix}>",
        parameter=f"<arg_key{suffix}>",
        key_ends={f"</arg_key{suffix}>": None},
        value=f"<arg_value{suffix}>",
        value_end=f"</arg_value{suffix}>",
    )


HY_V3 = (_hy_v3(":opensource"), _hy_v3(""))  # the published checkpoints' tags, and those without a suffix
ATEM = XmlFormat(
    "<atem:function_calls>",
    end="</atem:function_calls>",
    call='<atem:invoke name="',
    name_end='">',
    call_end="</atem:invoke>",
    parameter='<atem:parameter name="',
    key_ends={'">': None},
    value_end="</atem:parameter>",
)
_qwen3_coder = XmlFormat("<tool_call>", call="<function=", trims=True, allows_python=True, is_bare=True)
_glm = XmlFormat(
    "<tool_call>",
    end="",
    name_end="\n",
    call_end="</tool_call>",
    parameter="<arg_key>",
    key_ends={"</arg_key>": None},
    value="<arg_value>",
    value_end="</arg_value>",
)
XML_FORMATS: Mapping[str, XmlFormat] = {
    "qwen3_coder": _qwen3_coder,
    "seed_oss": XmlFormat("<seed:tool_call>", end="</seed:tool_call>", call="<function=", allows_python=True),
    "minimax_m2": XmlFormat(
        "<minimax:tool_call>",
        end="</minimax:tool_call>",
        call='<invoke name="',
        name_end='">',
        call_end="</invoke>",
        parameter='<parameter name="',
        key_ends={'">': None},
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "glm45": _glm,
    "minicpm5": XmlFormat(
        '<function name="',
        end="",
        name_end='">',
        parameter='<param name="',
        key_ends={'">': None},
        value_end="</param>",
        raw=("<![CDATA[", "]]>"),
        allows_python=True,
    ),
    "step3": XmlFormat(
        "<｜tool_calls_begin｜>",
        end="<｜tool_calls_end｜>",
        call='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
        name_end='">',
        call_end="</steptml:invoke><｜tool_call_end｜>",
        parameter='<steptml:parameter name="',
        key_ends={'">': None},
        value_end="</steptml:parameter>",
        tokens=("<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>"),
    ),
}


def _block(reader: Reader, tools: Tools, format: XmlFormat) -> Steps[None]:
    """Read the calls after ``begin``, and ``end``."""
    if format.call:
        yield from reader.expect(format.call)
    yield from _call(reader, tools, format)
    if not format.end:
        return
    yield from reader.skip_space()
    while format.call and (yield from reader.literal(format.call)):
        yield from _call(reader, tools, format)
        yield from reader.skip_space()
    yield from reader.literal(format.end)


def _bare_call(reader: Reader, tools: Tools, format: XmlFormat) -> Steps[None]:
    """Read a call whose ``call`` has been read, and an ``end`` without a ``begin``."""
    yield from _call(reader, tools, format)
    yield from reader.skip_space()
    yield from reader.literal(format.end)


def _call(reader: Reader, tools: Tools, format: XmlFormat) -> Steps[None]:
    name = checked_name((yield from _name(reader, format)))
    parameters = tools.get(name, {})
    has_ended = yield from _has_ended(reader, format)  # before the call is emitted: until here it may become text
    yield CallStart(name)
    opening = "{"
    while not has_ended:
        key, key_end = yield from reader.take_until(list(format.key_ends), limit=_MAX_NAME, never="\n<")
        yield CallArguments(f"{opening}{encode_basestring(key)}: ")
        opening = ", "
        stated = format.key_ends[key_end]
        yield from _value(reader, format, Allowed({stated}) if stated else allowed_argument(parameters, key))
        has_ended = (yield from _is_at_end_of_block(reader, format)) or (yield from _has_ended(reader, format))
    yield CallArguments("{}" if opening == "{" else "}")


def _name(reader: Reader, format: XmlFormat) -> Steps[str]:
    """Read a function's name; without a tag of its own, it ends before the first parameter or the end."""
    ends = [format.name_end] if format.call else [format.name_end, format.parameter, format.call_end]
    never = "\n<" if format.call else '<{"'
    name, marker = yield from reader.take_until(ends, limit=_MAX_NAME, never=never)
    if marker != format.name_end:
        reader.position -= len(marker)
    return name


def _has_ended(reader: Reader, format: XmlFormat) -> Steps[bool]:
    """Read the start of the next parameter, or the end of the call."""
    yield from reader.skip_space()
    if (yield from reader.literal(format.call_end)):
        return True
    yield from reader.expect(format.parameter)
    return False


def _is_at_end_of_block(reader: Reader, format: XmlFormat) -> Steps[bool]:
    """Whether ``end`` follows, since the model has left out ``call_end``; ``end`` is not read."""
    yield from reader.skip_space()
    is_at_end = format.end != "" and (yield from reader.literal(format.end))
    reader.position -= len(format.end) if is_at_end else 0
    return is_at_end


def _value(reader: Reader, format: XmlFormat, allowed: Allowed) -> Steps[None]:
    """Read a value of an allowed type; a string is emitted as it comes.

    Raises:
        MalformedError: it does not end.
    """
    if format.value:
        yield from reader.expect(format.value)
    if format.trims:
        yield from reader.literal("\n")
    end = format.value_end
    if format.raw is not None and (yield from reader.literal(format.raw[0])):
        end = format.raw[1] + end
    if allowed.types <= {"string"}:
        yield from _string(reader, format, end)
        return
    text, marker = yield from reader.take_until([end], limit=_MAX_VALUE)
    pieces, length, value = [text], len(text), GrowingJson()
    is_json = value.extend(text.lstrip())
    while not is_json and not (yield from _is_value_end(reader, format)):
        more, _ = yield from reader.take_until([end], limit=_MAX_VALUE - length)
        pieces.append(marker + more)
        length += len(pieces[-1])
        is_json = value.extend(pieces[-1])
    text = "".join(pieces)
    yield CallArguments(as_json(_trimmed(text, format), allowed, allows_python=format.allows_python))


def _string(reader: Reader, format: XmlFormat, end: str) -> Steps[None]:
    ends = [f"\n{end}", end] if format.trims else [end]
    yield CallArguments('"')
    while True:
        marker = yield from reader.until(ends, string_piece)
        if marker is None:
            raise MalformedError
        if (yield from _is_value_end(reader, format)):
            break
        yield string_piece(marker)
    yield CallArguments('"')


def _is_value_end(reader: Reader, format: XmlFormat) -> Steps[bool]:
    """Whether the ``value_end`` that was read ends the value: a parameter or the end follows. Else it is text in it."""
    position = reader.position
    ends = not (yield from reader.skip_space())  # the answer ends here
    for tag in (format.parameter, format.call_end, format.end):
        ends = ends or (tag != "" and (yield from reader.literal(tag)))
    reader.position = position
    return ends


def _trimmed(text: str, format: XmlFormat) -> str:
    return text.removesuffix("\n") if format.trims else text
