"""How the models of each format write tool calls. A function is a format's, or makes one from what formats share."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

Call: TypeAlias = tuple[str, dict[str, Any]]  # a function's name and its arguments
Write: TypeAlias = Callable[[Sequence[Call]], str]


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def joined(begin: str, each: Callable[[str, str], str], separator: str, end: str) -> Write:
    """Return a writer of calls whose arguments are JSON, with texts around and between them."""
    return lambda calls: begin + separator.join(each(name, as_json(arguments)) for name, arguments in calls) + end


def json_object(name: str, arguments: str, *, name_key: str = "name", arguments_key: str = "arguments") -> str:
    return f'{{"{name_key}": {as_json(name)}, "{arguments_key}": {arguments}}}'


def cohere(name: str, arguments: str) -> str:
    call = json_object(name, arguments, name_key="tool_name", arguments_key="parameters")
    return f'    {{"tool_call_id": "0", {call[1:]}'


def bare(value: Any) -> str:
    """Return a value as templates write it into tags: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else as_json(value)


def tags(
    begin: str,
    call: str,
    parameter: Callable[[str, Any], str],
    call_end: str,
    end: str,
    *,
    is_repeated: bool = False,
) -> Write:
    """Return a writer of calls as tags; ``is_repeated``: each call has a ``begin`` and an ``end``."""

    def write(calls: Sequence[Call]) -> str:
        written = [
            call.format(name=name) + "".join(parameter(key, value) for key, value in arguments.items()) + call_end
            for name, arguments in calls
        ]
        return "\n".join(f"{begin}{call}{end}" for call in written) if is_repeated else begin + "\n".join(written) + end

    return write


def _dsml_parameter(key: str, value: Any) -> str:
    is_string = "true" if isinstance(value, str) else "false"
    return f'<｜DSML｜parameter name="{key}" string="{is_string}">{bare(value)}</｜DSML｜parameter>\n'


def dsml(block: str) -> Write:
    invoke, invoke_end = '<｜DSML｜invoke name="{name}">\n', "</｜DSML｜invoke>"
    return tags(f"\n\n<｜DSML｜{block}>\n", invoke, _dsml_parameter, invoke_end, f"\n</｜DSML｜{block}>")


def glm(space: str) -> Write:
    def parameter(key: str, value: Any) -> str:
        return f"<arg_key>{key}</arg_key>{space}<arg_value>{bare(value)}</arg_value>{space}"

    return tags("<tool_call>", f"{{name}}{space}", parameter, "", "</tool_call>", is_repeated=True)


def _gemma(quote: str) -> Callable[[Any], str]:
    def value_of(value: Any) -> str:
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{value_of(inner)}" for key, inner in sorted(value.items())) + "}"
        if isinstance(value, list):
            return f"[{','.join(map(value_of, value))}]"
        return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)

    return value_of


def gemma_calls(begin: str, end: str, quote: str) -> Write:
    value_of = _gemma(quote)
    return lambda calls: "".join(f"{begin}call:{name}{value_of(arguments)}{end}" for name, arguments in calls)


def kimi_k2(calls: Sequence[Call]) -> str:
    begin, separator, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    written = "".join(
        f"{begin}functions.{name}:{index}{separator}{as_json(arguments)}{end}"
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


_K3_TYPES = (
    (bool, "boolean"),
    (int, "number"),
    (float, "number"),
    (str, "string"),
    (dict, "object"),
    (list, "array"),
)


def kimi_k3(calls: Sequence[Call]) -> str:
    def argument(key: str, value: Any) -> str:
        kind = next((name for type_, name in _K3_TYPES if isinstance(value, type_)), "null")
        return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{bare(value)}<|close|>argument<|sep|>'

    written = "".join(
        f'<|open|>call tool="{name}" index="{index}"<|sep|>'
        + "".join(argument(key, value) for key, value in arguments.items())
        + "<|close|>call<|sep|>"
        for index, (name, arguments) in enumerate(calls, 1)
    )
    return f"<|open|>tools<|sep|>{written}<|close|>tools<|sep|><|close|>message<|sep|>"


NAMESPACE = "]<]minimax[>["


def _minimax_m3_value(value: Any) -> str:
    if isinstance(value, dict):
        return "".join(minimax_m3_tag(key, inner) for key, inner in value.items())
    if isinstance(value, list):
        return "".join(minimax_m3_tag("item", inner) for inner in value)
    return bare(value)


def minimax_m3_tag(key: str, value: Any) -> str:
    return f"{NAMESPACE}<{key}>{_minimax_m3_value(value)}{NAMESPACE}</{key}>"


def pythonic(separator: str) -> Write:
    return lambda calls: separator.join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls
    )


def around(begin: str, write: Write, end: str) -> Write:
    return lambda calls: begin + write(calls) + end


def minicpm5_parameter(key: str, value: Any) -> str:
    text = str(value)
    is_raw = isinstance(value, str) and any(character in value for character in "<&\n")
    return f'<param name="{key}">{f"<![CDATA[{text}]]>" if is_raw else text}</param>'


def muse_glimmer(calls: Sequence[Call]) -> str:
    def parameter(key: str, value: Any) -> str:
        return f'<atem:parameter name="{key}">{bare(value)}</atem:parameter>\n'

    begin, end = "<atem:function_calls>\n", "</atem:function_calls>"
    write = tags(begin, '<atem:invoke name="{name}">\n', parameter, "</atem:invoke>\n", end)
    return "<|eom|>".join(f"<|start|>assistant to={call[0]}<|message|>{write([call])}" for call in calls) + "<|eot|>"


def solar_open(name: str, arguments: str) -> str:
    return f"<|tool_call:begin|>x1<|tool_call:name|>{name}<|tool_call:args|>{arguments}<|tool_call:end|>"


def harmony(name: str, arguments: str) -> str:
    return (
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
    )


def deepseek_v3(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def deepseek_v31(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"
