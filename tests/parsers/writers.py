"""How the models of each format write reasoning, text and tool calls; the names are those of vLLM's parsers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["WRITERS", "Call", "Writer"]

Call: TypeAlias = tuple[str, dict[str, Any]]  # a function's name and its arguments
_Write: TypeAlias = Callable[[Sequence[Call]], str]


@dataclass(frozen=True)
class Writer:
    """What a format writes.

    Attributes:
        write: returns calls as the model writes them.
        reasoning: the name of the reasoning parser of the same models; None for models that do not reason.
        thoughts: before and after reasoning.
        text: before and after content.
        has_text_before_calls: whether an answer with calls may also have content.
        markers: texts of the format which a string may hold without ending it.
    """

    write: _Write
    reasoning: str | None = "qwen3"
    thoughts: tuple[str, str] = ("<think>\n", "\n</think>\n\n")
    text: tuple[str, str] = ("", "")
    has_text_before_calls: bool = True
    markers: tuple[str, ...] = ()

    def answer(self, reasoning: str, content: str, calls: Sequence[Call]) -> str:
        """Return the text of an answer."""
        before, after = self.thoughts
        begin, end = self.text
        parts = [f"{before}{reasoning}{after}" if reasoning else "", f"{begin}{content}{end}" if content else ""]
        return "".join(parts) + (self.write(calls) if calls else "")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _joined(begin: str, each: Callable[[str, str], str], separator: str, end: str) -> _Write:
    """Return a writer of calls whose arguments are JSON, with texts around and between them."""
    return lambda calls: begin + separator.join(each(name, _json(arguments)) for name, arguments in calls) + end


def _object(name: str, arguments: str, *, name_key: str = "name", arguments_key: str = "arguments") -> str:
    return f'{{"{name_key}": {_json(name)}, "{arguments_key}": {arguments}}}'


def _cohere(name: str, arguments: str) -> str:
    call = _object(name, arguments, name_key="tool_name", arguments_key="parameters")
    return f'    {{"tool_call_id": "0", {call[1:]}'


def _bare(value: Any) -> str:
    """Return a value as templates write it into tags: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else _json(value)


def _tags(
    begin: str,
    call: str,
    parameter: Callable[[str, Any], str],
    call_end: str,
    end: str,
    *,
    is_repeated: bool = False,
) -> _Write:
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
    return f'<｜DSML｜parameter name="{key}" string="{is_string}">{_bare(value)}</｜DSML｜parameter>\n'


def _dsml(block: str) -> _Write:
    invoke, invoke_end = '<｜DSML｜invoke name="{name}">\n', "</｜DSML｜invoke>"
    return _tags(f"\n\n<｜DSML｜{block}>\n", invoke, _dsml_parameter, invoke_end, f"\n</｜DSML｜{block}>")


def _glm(space: str) -> _Write:
    def parameter(key: str, value: Any) -> str:
        return f"<arg_key>{key}</arg_key>{space}<arg_value>{_bare(value)}</arg_value>{space}"

    return _tags("<tool_call>", f"{{name}}{space}", parameter, "", "</tool_call>", is_repeated=True)


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


def _gemma_calls(begin: str, end: str, quote: str) -> _Write:
    value_of = _gemma(quote)
    return lambda calls: "".join(f"{begin}call:{name}{value_of(arguments)}{end}" for name, arguments in calls)


def _kimi_k2(calls: Sequence[Call]) -> str:
    begin, separator, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    written = "".join(
        f"{begin}functions.{name}:{index}{separator}{_json(arguments)}{end}"
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


_K3_TYPES = ((bool, "boolean"), (int, "number"), (float, "number"), (str, "string"), (dict, "object"), (list, "array"))


def _kimi_k3(calls: Sequence[Call]) -> str:
    def argument(key: str, value: Any) -> str:
        kind = next((name for type_, name in _K3_TYPES if isinstance(value, type_)), "null")
        return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{_bare(value)}<|close|>argument<|sep|>'

    written = "".join(
        f'<|open|>call tool="{name}" index="{index}"<|sep|>'
        + "".join(argument(key, value) for key, value in arguments.items())
        + "<|close|>call<|sep|>"
        for index, (name, arguments) in enumerate(calls, 1)
    )
    return f"<|open|>tools<|sep|>{written}<|close|>tools<|sep|><|close|>message<|sep|>"


_NAMESPACE = "]<]minimax[>["


def _minimax_m3_value(value: Any) -> str:
    if isinstance(value, dict):
        return "".join(_minimax_m3_tag(key, inner) for key, inner in value.items())
    if isinstance(value, list):
        return "".join(_minimax_m3_tag("item", inner) for inner in value)
    return _bare(value)


def _minimax_m3_tag(key: str, value: Any) -> str:
    return f"{_NAMESPACE}<{key}>{_minimax_m3_value(value)}{_NAMESPACE}</{key}>"


def _pythonic(separator: str) -> _Write:
    return lambda calls: separator.join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls
    )


def _around(begin: str, write: _Write, end: str) -> _Write:
    return lambda calls: begin + write(calls) + end


def _minicpm5_parameter(key: str, value: Any) -> str:
    text = str(value)
    is_raw = isinstance(value, str) and any(character in value for character in "<&\n")
    return f'<param name="{key}">{f"<![CDATA[{text}]]>" if is_raw else text}</param>'


def _muse_glimmer(calls: Sequence[Call]) -> str:
    def parameter(key: str, value: Any) -> str:
        return f'<atem:parameter name="{key}">{_bare(value)}</atem:parameter>\n'

    begin, end = "<atem:function_calls>\n", "</atem:function_calls>"
    write = _tags(begin, '<atem:invoke name="{name}">\n', parameter, "</atem:invoke>\n", end)
    return "<|eom|>".join(f"<|start|>assistant to={call[0]}<|message|>{write([call])}" for call in calls) + "<|eot|>"


def _solar_open(name: str, arguments: str) -> str:
    return f"<|tool_call:begin|>x1<|tool_call:name|>{name}<|tool_call:args|>{arguments}<|tool_call:end|>"


def _harmony(name: str, arguments: str) -> str:
    return (
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
    )


def _deepseek_v3(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def _deepseek_v31(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


_calls = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_list = ("<tool_calls>[", "]</tool_calls>")
_cohere_thoughts = ("<|START_THINKING|>", "<|END_THINKING|>")

WRITERS: Mapping[str, Writer] = {
    "hermes": Writer(
        _joined("<tool_call>\n", _object, "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
        markers=("<tool_call>", "</tool_call>"),
    ),
    "ernie45": Writer(
        _joined("\n<tool_call>\n", _object, "\n</tool_call>\n<tool_call>\n", "\n</tool_call>\n"),
        "ernie45",
        text=("<response>\n", "\n</response>\n"),
        markers=("</response>", "</tool_call>"),
    ),
    "hunyuan_a13b": Writer(
        _joined(_list[0], _object, ", ", _list[1]),
        "hunyuan_a13b",
        text=("<answer>\n", "\n</answer>"),
        markers=_list,
    ),
    "granite": Writer(
        _joined("<|tool_call|>[", _object, ", ", "]"),
        "granite",
        text=("<response>", "</response>"),
        markers=("<|tool_call|>",),
    ),
    "phi4_mini_json": Writer(
        _joined("<|tool_call|>[", _object, ", ", "]<|/tool_call|>"), None, markers=("functools[",)
    ),
    "cohere_command3": Writer(
        _joined("<|START_ACTION|>[\n", _cohere, ",\n", "\n]<|END_ACTION|>"),
        "cohere_command3",
        thoughts=_cohere_thoughts,
        text=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        markers=("<|END_ACTION|>", "<|START_THINKING|>"),
    ),
    "longcat": Writer(
        _joined("<longcat_tool_call>", _object, "</longcat_tool_call>\n<longcat_tool_call>", "</longcat_tool_call>"),
        None,
        markers=("</longcat_tool_call>",),
    ),
    "internlm": Writer(
        _joined(
            "<|action_start|><|plugin|>\n", _object, "<|action_end|>\n<|action_start|><|plugin|>\n", "<|action_end|>"
        ),
        None,
        markers=("<|action_end|>",),
    ),
    "gigachat3": Writer(_joined("<|function_call|>", _object, "\n<|function_call|>", ""), None),
    "apertus": Writer(
        _joined(
            "<|tools_prefix|>[", lambda name, arguments: f"{{{_json(name)}: {arguments}}}", ", ", "]<|tools_suffix|>"
        ),
        None,
        markers=("<|tools_suffix|>",),
    ),
    "qwen3_coder": Writer(
        _tags(
            "<tool_call>\n",
            "<function={name}>\n",
            lambda key, value: f"<parameter={key}>\n{_bare(value)}\n</parameter>\n",
            "</function>",
            "\n</tool_call>",
            is_repeated=True,
        ),
        markers=("</parameter>", "</function>", "<tool_call>"),
    ),
    "seed_oss": Writer(
        _tags(
            "\n<seed:tool_call>\n",
            "<function={name}>\n",
            lambda key, value: f"<parameter={key}>{value if isinstance(value, str) else str(value)}</parameter>\n",
            "</function>\n",
            "</seed:tool_call>",
            is_repeated=True,
        ),
        "seed_oss",
        thoughts=("<seed:think>", "</seed:think>\n"),
        markers=("</parameter>", "</seed:tool_call>"),
    ),
    "minimax_m2": Writer(
        _tags(
            "\n<minimax:tool_call>\n",
            '<invoke name="{name}">\n',
            lambda key, value: f'<parameter name="{key}">{_bare(value)}</parameter>\n',
            "</invoke>",
            "\n</minimax:tool_call>",
        ),
        "minimax_m2",
        markers=("</parameter>", "</invoke>"),
    ),
    "deepseek_v32": Writer(
        _dsml("function_calls"), "deepseek_v3", ("<think>", "</think>"), markers=("</｜DSML｜invoke>",)
    ),
    "deepseek_v4": Writer(
        _dsml("tool_calls"), "deepseek_v4", ("<think>", "</think>"), markers=("</｜DSML｜parameter>",)
    ),
    "glm45": Writer(_glm("\n"), "glm45", markers=("</arg_value>", "</tool_call>")),
    "glm47": Writer(_glm(""), "glm45", markers=("</arg_value>", "<arg_key>")),
    "hy_v3": Writer(
        _tags(
            "<tool_calls:opensource>\n",
            "<tool_call:opensource>{name}<tool_sep:opensource>\n",
            lambda key, value: (
                f"<arg_key:opensource>{key}</arg_key:opensource>\n"
                f"<arg_value:opensource>{_bare(value)}</arg_value:opensource>\n"
            ),
            "</tool_call:opensource>",
            "\n</tool_calls:opensource>",
        ),
        "hy_v3",
        thoughts=("<think:opensource>", "</think:opensource>"),
        markers=("</tool_calls:opensource>", "</arg_value:opensource>"),
    ),
    "minicpm5": Writer(
        _tags("", '<function name="{name}">', _minicpm5_parameter, "</function>", ""),
        markers=("</param>", "</function>"),
    ),
    "muse_glimmer": Writer(
        _muse_glimmer,
        "muse_glimmer",
        thoughts=(" to=self<|message|>", "<|eom|><|start|>assistant"),
        text=(" to=user<|message|>", "<|eom|>"),
        markers=("</atem:parameter>", "</atem:invoke>"),
    ),
    "solar_open": Writer(
        _joined("<|tool_calls|>", _solar_open, "", "<|calls|>"),
        "solar_open",
        thoughts=("<|think|>", "<|end|><|begin|>assistant"),
        text=("<|content|>", "<|end|><|begin|>assistant"),
        markers=("<|tool_call:end|>", "<|think|>"),
    ),
    "nemotron_json": Writer(_joined("<TOOLCALL>[", _object, ", ", "]</TOOLCALL>"), markers=("</TOOLCALL>",)),
    "step3": Writer(
        _tags(
            "<｜tool_calls_begin｜>",
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">',
            lambda key, value: f'<steptml:parameter name="{key}">{_bare(value)}</steptml:parameter>',
            "</steptml:invoke><｜tool_call_end｜>",
            "<｜tool_calls_end｜>",
        ),
        None,
        markers=("</steptml:invoke>",),
    ),
    "gemma4": Writer(
        _gemma_calls("<|tool_call>", "<tool_call|>", '<|"|>'),
        "gemma4",
        thoughts=("<|channel>thought\n", "\n<channel|>"),
        markers=("<tool_call|>", "<|channel>", "}", ","),
    ),
    "functiongemma": Writer(
        _gemma_calls("<start_function_call>", "<end_function_call>", "<escape>"), None, markers=("<end_function_call>",)
    ),
    "kimi_k2": Writer(_kimi_k2, "kimi_k2", markers=("<|tool_call_end|>", "<|tool_calls_section_end|>")),
    "kimi_k3": Writer(
        _kimi_k3,
        "kimi_k3",
        thoughts=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        text=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        markers=("<|open|>call <|sep|>", "<|close|>call<|sep|>"),
    ),
    "minimax_m3": Writer(
        _tags(
            f"{_NAMESPACE}<tool_call>\n",
            f'{_NAMESPACE}<invoke name="{{name}}">',
            _minimax_m3_tag,
            f"{_NAMESPACE}</invoke>",
            f"\n{_NAMESPACE}</tool_call>",
        ),
        "minimax_m3",
        thoughts=("<mm:think>\n", "\n</mm:think>\n\n"),
        markers=("</invoke>", "<mm:think>"),
    ),
    "lfm2": Writer(
        _around("<|tool_call_start|>[", _pythonic(", "), "]<|tool_call_end|>"), thoughts=("<think>", "</think>")
    ),
    "olmo3": Writer(
        _around("<function_calls>\n", _pythonic("\n"), "\n</function_calls>"), "olmo3", thoughts=("<think>", "</think>")
    ),
    "pythonic": Writer(_around("[", _pythonic(", "), "]"), None, has_text_before_calls=False),
    "llama3_json": Writer(
        _joined("", lambda name, arguments: _object(name, arguments, arguments_key="parameters"), "; ", ""),
        None,
        has_text_before_calls=False,
    ),
    "xlam": Writer(
        _joined("[", _object, ", ", "]"),
        thoughts=("<think>", "</think>"),
        has_text_before_calls=False,
        markers=("```", "</tool_call>"),
    ),
    "mistral": Writer(
        _joined("", lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{arguments}", "", ""),
        "mistral",
        thoughts=("[THINK]", "[/THINK]"),
        markers=("[TOOL_CALLS]",),
    ),
    "deepseek_v3": Writer(_joined(_calls[0], _deepseek_v3, "\n", _calls[1]), "deepseek_v3", markers=("```",)),
    "deepseek_v31": Writer(_joined(_calls[0], _deepseek_v31, "", _calls[1]), "deepseek_v3", markers=_calls),
    "openai": Writer(
        _joined("", _harmony, "", ""),
        "openai_gptoss",
        thoughts=("<|channel|>analysis<|message|>", "<|end|>"),
        text=("<|start|>assistant<|channel|>final<|message|>", "<|end|>"),
        markers=("<|call|>",),
    ),
}
