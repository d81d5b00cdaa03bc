"""Which parsers a chat template implies, and the names of the configuration."""

from __future__ import annotations

import pytest

from deployments.config import AppConfig
from deployments.parsers.registry import NONE, REASONING_PARSERS, TOOL_PARSERS, Parsers
from engine.errors import ConfigError

# The parts of the models' chat templates that show their formats.
QWEN3 = "<tool_call>\n{\"name\": <function-name>} {{- '<think>\\n' }} content.split('</think>')"
TEMPLATES = {
    "Qwen2.5": ("within <tool_call></tool_call> XML tags", ("hermes", None)),
    "Qwen3": (QWEN3, ("hermes", "qwen3")),
    "Qwen3-Coder": ("<tool_call>\n<function=example>\n<parameter=x>\n</tool_call>", ("qwen3_coder", None)),
    "GLM-4.5": ("<tool_call>{function-name}\n<arg_key>k</arg_key> </think>", (None, "qwen3")),
    "Llama 3.1": ('{"name": function name, "parameters": x} <|python_tag|>', ("llama3_json", None)),
    "Llama 4": ("<|python_start|>", ("llama4_json", None)),
    "Mistral": ("[AVAILABLE_TOOLS] [TOOL_CALLS]", ("mistral", None)),
    "Magistral": ("[TOOL_CALLS] [THINK]", ("mistral", "mistral")),
    "DeepSeek R1": ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜> '```json' '</think>'", ("deepseek_v3", "qwen3")),
    "DeepSeek V3.1": ("<｜tool▁call▁begin｜> </think>", ("deepseek_v31", "qwen3")),
    "GPT-OSS": ("<|start|>assistant<|channel|>final<|message|>", ("openai", "openai_gptoss")),
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
            assert (parsers.family(None, "") is None) == (reasoning is None and tool != "openai")
            assert all(parsers.markers)


@pytest.mark.parametrize(
    ("key", "name", "hint"), [("tool_parser", "hermez", "hermes"), ("reasoning_parser", "x", "qwen3")]
)
def test_an_unknown_name_is_an_error_of_the_configuration(key: str, name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"args.{key}='{name}'.*{hint}"):
        AppConfig.parse({"model": "m", key: name})
