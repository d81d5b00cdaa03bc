"""Which formats a chat template writes, by texts that only the templates of one format contain."""

from __future__ import annotations

from typing import TypeAlias

__all__ = ["NONE", "detect_reasoning_parser", "detect_tool_parser"]

NONE = "none"  # the name that turns a parser off
_Signs: TypeAlias = tuple[tuple[tuple[str, ...], str], ...]

# What a chat template contains -> the parser; the first that fits counts, so the narrow signs come first.
_TOOL_SIGNS: _Signs = (
    (("<|channel|>", "<|start|>"), "openai"),
    (("<atem:function_calls>",), "muse_glimmer"),
    (("<|tool_call>", '<|"|>'), "gemma4"),
    (("<start_function_call>", "<escape>"), "functiongemma"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<｜tool▁call▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁call▁begin｜>",), "deepseek_v31"),
    (("｜DSML｜", "function_calls>"), "deepseek_v32"),
    (("｜DSML｜", "tool_calls>"), "deepseek_v4"),
    (("<|tool_call_argument_begin|>",), "kimi_k2"),
    (("<|open|>", "<|sep|>", "<|close|>"), "kimi_k3"),
    (("]<]minimax[>[",), "minimax_m3"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<steptml:invoke",), "step3"),
    (("<|START_ACTION|>", "tool_name"), "cohere_command3"),
    (("<longcat_tool_call>",), "longcat"),
    (("<|tools_prefix|>",), "apertus"),
    (("<|action_start|>", "<|plugin|>"), "internlm"),
    (("<|function_call|>", "<|role_sep|>"), "gigachat3"),
    (("function call", "<|role_sep|>"), "gigachat3"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|/tool|>",), "phi4_mini_json"),
    (("functools[",), "phi4_mini_json"),
    (("<|tool_call|> followed by a JSON list",), "granite"),
    (("<|tool_call|>", "<|start_of_role|>"), "granite"),
    (("make calls in a single JSON array",), "xlam"),
    (("<tool_sep{}>", ":opensource"), "hy_v3"),
    (("<tool_sep>", "<arg_key>"), "hy_v3"),
    (("<|tool_call:begin|>", "<|tool_call:args|>"), "solar_open"),
    (("<TOOLCALL>[",), "nemotron_json"),
    (('<function name="', '<param name="'), "minicpm5"),
    (("<tool_call>", "<arg_key>"), "glm45"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<function_calls>", "<functions>"), "olmo3"),
    (("<tool_calls>",), "hunyuan_a13b"),
    (("<{start_tag}=",), "functionary_v31"),
    ((">>>all\\n", "'>>>'"), "functionary_v32"),
    (("<tool_call>", "<response>"), "ernie45"),
    (("<tool_call>",), "hermes"),
    (("List of tools: ", "<|im_start|>"), "lfm2"),
    (("[func_name1(",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (("<|python_start|>",), "llama4_json"),
    (('"parameters": dictionary of argument name',), "llama3_json"),
)
_REASONING_SIGNS: _Signs = (
    (("<|channel|>", "<|start|>"), "openai_gptoss"),
    (("<atem:function_calls>", "to=self<|message|>"), "muse_glimmer"),
    (("<|channel>", "<channel|>"), "gemma4"),
    (("[THINK]",), "mistral"),
    (("<|open|>", "<|sep|>", "<|close|>"), "kimi_k3"),
    (("<mm:think>",), "minimax_m3"),
    (("<seed:think>",), "seed_oss"),
    (("<|START_THINKING|>",), "cohere_command3"),
    (("<|tool_call_argument_begin|>", "</think>"), "kimi_k2"),
    (("<think{}>", ":opensource"), "hy_v3"),
    (("<|tool_call:begin|>", "<|think|>"), "solar_open"),
    (("<answer>", "</think>"), "hunyuan_a13b"),
    (("<response>", "</think>", "<tool_call>"), "ernie45"),
    (("<response></response>", "<think></think>"), "granite"),
    (("[BEGIN FINAL RESPONSE]", "Here are my reasoning steps"), "apriel"),
    (("</think>",), "qwen3"),
)


def detect_tool_parser(chat_template: str) -> str | None:
    """Return the key of TOOL_PARSERS that a chat template implies."""
    return _first(_TOOL_SIGNS, chat_template)


def detect_reasoning_parser(chat_template: str) -> str | None:
    """Return the key of REASONING_PARSERS that a chat template implies."""
    return _first(_REASONING_SIGNS, chat_template)


def _first(signs: _Signs, chat_template: str) -> str | None:
    return next((name for needed, name in signs if all(sign in chat_template for sign in needed)), None)
