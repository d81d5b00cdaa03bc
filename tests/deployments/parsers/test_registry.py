"""Which parsers a chat template implies, and the names of the configuration."""

from __future__ import annotations

import pytest

from deployments.config import AppConfig
from deployments.parsers.detection import NONE
from deployments.parsers.reasoning_parsers import REASONING_PARSERS
from deployments.parsers.registry import Parsers
from deployments.parsers.tool_parsers import TOOL_PARSERS
from engine.errors import ConfigError

# The parts of the models' chat templates that show their formats.
QWEN3 = "<tool_call>\n{\"name\": <function-name>} {{- '<think>\\n' }} content.split('</think>')"
TEMPLATES = {
    "Qwen2.5": ("within <tool_call></tool_call> XML tags", ("hermes", None)),
    "Qwen3": (QWEN3, ("hermes", "qwen3")),
    "Qwen3-Coder": ("<tool_call>\n<function=example>\n<parameter=x>\n</tool_call>", ("qwen3_coder", None)),
    "GLM-4.5": ("<tool_call>{function-name}\n<arg_key>k</arg_key> </think>", ("glm45", "qwen3")),
    "Llama 3.1": ('{"name": function name, "parameters": x} <|python_tag|>', ("llama3_json", None)),
    "Llama 4": ("<|python_start|>", ("llama4_json", None)),
    "Mistral": ("[AVAILABLE_TOOLS] [TOOL_CALLS]", ("mistral", None)),
    "Magistral": ("[TOOL_CALLS] [THINK]", ("mistral", "mistral")),
    "DeepSeek R1": ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜> '```json' '</think>'", ("deepseek_v3", "qwen3")),
    "DeepSeek V3.1": ("<｜tool▁call▁begin｜> </think>", ("deepseek_v31", "qwen3")),
    "GPT-OSS": ("<|start|>assistant<|channel|>final<|message|>", ("openai", "openai_gptoss")),
    "Gemma 4": ("'<|tool_call>call:' '<|\"|>' '<|channel>thought' '<channel|>'", ("gemma4", "gemma4")),
    "FunctionGemma": ("<start_function_call>call:f{x:<escape>y<escape>}", ("functiongemma", None)),
    "Kimi K2": ("<|tool_calls_section_begin|> <|tool_call_argument_begin|>", ("kimi_k2", None)),
    "Kimi K2 Thinking": ("<|tool_call_argument_begin|> <think>{{rc}}</think>", ("kimi_k2", "kimi_k2")),
    "Kimi K3": ("'<|open|>' + tag '<|sep|>' '<|close|>'", ("kimi_k3", "kimi_k3")),
    "MiniMax-M2": ("'<minimax:tool_call>' <invoke name= <parameter name= '</think>'", ("minimax_m2", "qwen3")),
    "MiniMax-M3": ("]<]minimax[>[ <tool_call> '<mm:think>'", ("minimax_m3", "minimax_m3")),
    "DeepSeek V3.2": ("'｜DSML｜' 'function_calls>' message['tool_calls'] '</think>'", ("deepseek_v32", "qwen3")),
    "DeepSeek V4": ("'｜DSML｜' 'tool_calls>' '</think>'", ("deepseek_v4", "qwen3")),
    "Seed-OSS": ("<seed:think> <seed:tool_call>\n<function=f>\n<parameter=x>", ("seed_oss", "seed_oss")),
    "Apriel": ("within <tool_call></tool_call> XML tags <tool_calls>[{", ("hunyuan_a13b", None)),
    "Apriel 1.6": (
        "<tool_calls>[{ '\nHere are my reasoning steps:\n' [BEGIN FINAL RESPONSE]",
        ("hunyuan_a13b", "apriel"),
    ),
    "Functionary 3.2": ("format:\n>>>${recipient}\n${content} '>>>all\\n' '>>>' + name", ("functionary_v32", None)),
    "Functionary 3.1": ("<{start_tag}={function_name}> <function=f>{{}} <|python_tag|>", ("functionary_v31", None)),
    "Llama 3.2": ('{"name": function name, "parameters": dictionary of argument name and', ("llama3_json", None)),
    "LFM2": ("<|im_start|> List of tools: <|tool_list_start|>[", ("lfm2", None)),
    "OLMo 3": ("<functions> <function_calls> </think>", ("olmo3", "qwen3")),
    "Granite 3.3": ("only with <|tool_call|> followed by a JSON list of tools used", ("granite", None)),
    "Granite 3.1": ("'<|start_of_role|>assistant<|end_of_role|><|tool_call|>' + tool_calls", ("granite", None)),
    "xLAM": ("<|im_start|>system When using tools, make calls in a single JSON array:", ("xlam", None)),
    "Granite 3.3 thinking": ("<think></think> <response></response>", (None, "granite")),
    "Phi-4-mini": ("'<|tool|>' + tools + '<|/tool|>'", ("phi4_mini_json", None)),
    "Command": ("<|START_ACTION|>[ tool_name <|START_THINKING|>", ("cohere_command3", "cohere_command3")),
    "Hunyuan": ("<tool_calls> <answer> </think>", ("hunyuan_a13b", "hunyuan_a13b")),
    "Hunyuan 3": ("<tool_calls><tool_call>f<tool_sep><arg_key>", ("hy_v3", None)),
    "ERNIE": ("<think> </think> <tool_call> <response>", ("ernie45", "ernie45")),
    "Step 3": ('<steptml:invoke name="f"> <｜tool_call_begin｜>', ("step3", None)),
    "Hy3": ("HYTK = ':opensource' '<tool_sep{}>'.format '<think{}>' '</think{}>'", ("hy_v3", "hy_v3")),
    "Muse Glimmer": ("<atem:function_calls> to=self<|message|>", ("muse_glimmer", "muse_glimmer")),
    "Solar Open": ("<|tool_call:begin|><|tool_call:args|> <|think|>", ("solar_open", "solar_open")),
    "Nemotron Nano 2": ("<TOOLCALL>[{{ </think>", ("nemotron_json", "qwen3")),
    "MiniCPM5": ('<function name="f"><param name="x"> </think>', ("minicpm5", "qwen3")),
    "plain": ("<|im_start|>", (None, None)),
    "none": ("", (None, None)),
}


@pytest.mark.parametrize("model", TEMPLATES)
def test_the_template_implies_the_parsers(model: str) -> None:
    template, (tool, reasoning) = TEMPLATES[model]
    assert Parsers.choose(template, None, None) == Parsers(tool, reasoning)


def test_the_configuration_wins() -> None:
    assert Parsers.choose(QWEN3, NONE, NONE) == Parsers(None, None)
    assert Parsers.choose(QWEN3, "mistral", None) == Parsers("mistral", "qwen3")
    assert Parsers.choose("", "hermes", "deepseek_r1") == Parsers("hermes", "deepseek_r1")


def test_every_pair_of_parsers_reads_an_answer() -> None:
    for tool in (None, *TOOL_PARSERS):
        for reasoning in (None, *REASONING_PARSERS):
            parsers = Parsers(tool, reasoning)
            assert (parsers.family({}, "") is None) == (tool is None and reasoning is None)
            assert (parsers.family(None, "") is None) == (
                reasoning is None and tool not in ("openai", "muse_glimmer", "functionary_v32")
            )
            assert all(parsers.markers)


@pytest.mark.parametrize(
    ("key", "name", "hint"), [("tool_parser", "hermez", "hermes"), ("reasoning_parser", "x", "qwen3")]
)
def test_an_unknown_name_is_an_error_of_the_configuration(key: str, name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"args.{key}='{name}'.*{hint}"):
        AppConfig.parse({"model": "m", key: name})
