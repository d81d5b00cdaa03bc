"""How the models of each format write reasoning, text and tool calls; the names are those of vLLM's parsers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.parsers.call_syntax import (
    NAMESPACE,
    Call,
    Write,
    around,
    as_json,
    bare,
    cohere,
    deepseek_v3,
    deepseek_v31,
    dsml,
    gemma_calls,
    glm,
    harmony,
    joined,
    json_object,
    kimi_k2,
    kimi_k3,
    minicpm5_parameter,
    minimax_m3_tag,
    muse_glimmer,
    pythonic,
    solar_open,
    tags,
)

__all__ = ["WRITERS", "Call", "Writer"]


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

    write: Write
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


_calls = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_list = ("<tool_calls>[", "]</tool_calls>")
_cohere_thoughts = ("<|START_THINKING|>", "<|END_THINKING|>")

WRITERS: Mapping[str, Writer] = {
    "hermes": Writer(
        joined("<tool_call>\n", json_object, "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
        markers=("<tool_call>", "</tool_call>"),
    ),
    "ernie45": Writer(
        joined("\n<tool_call>\n", json_object, "\n</tool_call>\n<tool_call>\n", "\n</tool_call>\n"),
        "ernie45",
        text=("<response>\n", "\n</response>\n"),
        markers=("</response>", "</tool_call>"),
    ),
    "hunyuan_a13b": Writer(
        joined(_list[0], json_object, ", ", _list[1]),
        "hunyuan_a13b",
        text=("<answer>\n", "\n</answer>"),
        markers=_list,
    ),
    "granite": Writer(
        joined("<|tool_call|>[", json_object, ", ", "]"),
        "granite",
        text=("<response>", "</response>"),
        markers=("<|tool_call|>",),
    ),
    "phi4_mini_json": Writer(
        joined("<|tool_call|>[", json_object, ", ", "]<|/tool_call|>"), None, markers=("functools[",)
    ),
    "cohere_command3": Writer(
        joined("<|START_ACTION|>[\n", cohere, ",\n", "\n]<|END_ACTION|>"),
        "cohere_command3",
        thoughts=_cohere_thoughts,
        text=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        markers=("<|END_ACTION|>", "<|START_THINKING|>"),
    ),
    "longcat": Writer(
        joined("<longcat_tool_call>", json_object, "</longcat_tool_call>\n<longcat_tool_call>", "</longcat_tool_call>"),
        None,
        markers=("</longcat_tool_call>",),
    ),
    "internlm": Writer(
        joined(
            "<|action_start|><|plugin|>\n",
            json_object,
            "<|action_end|>\n<|action_start|><|plugin|>\n",
            "<|action_end|>",
        ),
        None,
        markers=("<|action_end|>",),
    ),
    "gigachat3": Writer(joined("<|function_call|>", json_object, "\n<|function_call|>", ""), None),
    "apertus": Writer(
        joined(
            "<|tools_prefix|>[", lambda name, arguments: f"{{{as_json(name)}: {arguments}}}", ", ", "]<|tools_suffix|>"
        ),
        None,
        markers=("<|tools_suffix|>",),
    ),
    "qwen3_coder": Writer(
        tags(
            "<tool_call>\n",
            "<function={name}>\n",
            lambda key, value: f"<parameter={key}>\n{bare(value)}\n</parameter>\n",
            "</function>",
            "\n</tool_call>",
            is_repeated=True,
        ),
        markers=("</parameter>", "</function>", "<tool_call>"),
    ),
    "seed_oss": Writer(
        tags(
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
        tags(
            "\n<minimax:tool_call>\n",
            '<invoke name="{name}">\n',
            lambda key, value: f'<parameter name="{key}">{bare(value)}</parameter>\n',
            "</invoke>",
            "\n</minimax:tool_call>",
        ),
        "minimax_m2",
        markers=("</parameter>", "</invoke>"),
    ),
    "deepseek_v32": Writer(
        dsml("function_calls"), "deepseek_v3", ("<think>", "</think>"), markers=("</｜DSML｜invoke>",)
    ),
    "deepseek_v4": Writer(
        dsml("tool_calls"), "deepseek_v4", ("<think>", "</think>"), markers=("</｜DSML｜parameter>",)
    ),
    "glm45": Writer(glm("\n"), "glm45", markers=("</arg_value>", "</tool_call>")),
    "glm47": Writer(glm(""), "glm45", markers=("</arg_value>", "<arg_key>")),
    "hy_v3": Writer(
        tags(
            "<tool_calls:opensource>\n",
            "<tool_call:opensource>{name}<tool_sep:opensource>\n",
            lambda key, value: (
                f"<arg_key:opensource>{key}</arg_key:opensource>\n"
                f"<arg_value:opensource>{bare(value)}</arg_value:opensource>\n"
            ),
            "</tool_call:opensource>",
            "\n</tool_calls:opensource>",
        ),
        "hy_v3",
        thoughts=("<think:opensource>", "</think:opensource>"),
        markers=("</tool_calls:opensource>", "</arg_value:opensource>"),
    ),
    "minicpm5": Writer(
        tags("", '<function name="{name}">', minicpm5_parameter, "</function>", ""),
        markers=("</param>", "</function>"),
    ),
    "muse_glimmer": Writer(
        muse_glimmer,
        "muse_glimmer",
        thoughts=(" to=self<|message|>", "<|eom|><|start|>assistant"),
        text=(" to=user<|message|>", "<|eom|>"),
        markers=("</atem:parameter>", "</atem:invoke>"),
    ),
    "solar_open": Writer(
        joined("<|tool_calls|>", solar_open, "", "<|calls|>"),
        "solar_open",
        thoughts=("<|think|>", "<|end|><|begin|>assistant"),
        text=("<|content|>", "<|end|><|begin|>assistant"),
        markers=("<|tool_call:end|>", "<|think|>"),
    ),
    "nemotron_json": Writer(joined("<TOOLCALL>[", json_object, ", ", "]</TOOLCALL>"), markers=("</TOOLCALL>",)),
    "step3": Writer(
        tags(
            "<｜tool_calls_begin｜>",
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">',
            lambda key, value: f'<steptml:parameter name="{key}">{bare(value)}</steptml:parameter>',
            "</steptml:invoke><｜tool_call_end｜>",
            "<｜tool_calls_end｜>",
        ),
        None,
        markers=("</steptml:invoke>",),
    ),
    "gemma4": Writer(
        gemma_calls("<|tool_call>", "<tool_call|>", '<|"|>'),
        "gemma4",
        thoughts=("<|channel>thought\n", "\n<channel|>"),
        markers=("<tool_call|>", "<|channel>", "}", ","),
    ),
    "functionary_v31": Writer(
        joined("", lambda name, arguments: f"<function={name}>{arguments}</function>", "", ""),
        None,
        markers=("</function>", "<function="),
    ),
    "functionary_v32": Writer(
        joined(">>>", lambda name, arguments: f"{name}\n{arguments}", ">>>", ""),
        None,
        text=("all\n", ""),
        markers=(">>>", ">>>ping\n"),
    ),
    "functiongemma": Writer(
        gemma_calls("<start_function_call>", "<end_function_call>", "<escape>"), None, markers=("<end_function_call>",)
    ),
    "kimi_k2": Writer(kimi_k2, "kimi_k2", markers=("<|tool_call_end|>", "<|tool_calls_section_end|>")),
    "kimi_k3": Writer(
        kimi_k3,
        "kimi_k3",
        thoughts=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        text=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        markers=("<|open|>call <|sep|>", "<|close|>call<|sep|>"),
    ),
    "minimax_m3": Writer(
        tags(
            f"{NAMESPACE}<tool_call>\n",
            f'{NAMESPACE}<invoke name="{{name}}">',
            minimax_m3_tag,
            f"{NAMESPACE}</invoke>",
            f"\n{NAMESPACE}</tool_call>",
        ),
        "minimax_m3",
        thoughts=("<mm:think>\n", "\n</mm:think>\n\n"),
        markers=("</invoke>", "<mm:think>"),
    ),
    "lfm2": Writer(
        around("<|tool_call_start|>[", pythonic(", "), "]<|tool_call_end|>"), thoughts=("<think>", "</think>")
    ),
    "olmo3": Writer(
        around("<function_calls>\n", pythonic("\n"), "\n</function_calls>"), "olmo3", thoughts=("<think>", "</think>")
    ),
    "pythonic": Writer(around("[", pythonic(", "), "]"), None, has_text_before_calls=False),
    "llama3_json": Writer(
        joined("", lambda name, arguments: json_object(name, arguments, arguments_key="parameters"), "; ", ""),
        None,
        has_text_before_calls=False,
    ),
    "xlam": Writer(
        joined("[", json_object, ", ", "]"),
        thoughts=("<think>", "</think>"),
        has_text_before_calls=False,
        markers=("```", "</tool_call>"),
    ),
    "mistral": Writer(
        joined("", lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{arguments}", "", ""),
        "mistral",
        thoughts=("[THINK]", "[/THINK]"),
        markers=("[TOOL_CALLS]",),
    ),
    "deepseek_v3": Writer(joined(_calls[0], deepseek_v3, "\n", _calls[1]), "deepseek_v3", markers=("```",)),
    "deepseek_v31": Writer(joined(_calls[0], deepseek_v31, "", _calls[1]), "deepseek_v3", markers=_calls),
    "openai": Writer(
        joined("", harmony, "", ""),
        "openai_gptoss",
        thoughts=("<|channel|>analysis<|message|>", "<|end|>"),
        text=("<|start|>assistant<|channel|>final<|message|>", "<|end|>"),
        markers=("<|call|>",),
    ),
}
