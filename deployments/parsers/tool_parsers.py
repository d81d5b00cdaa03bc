"""The formats of tool calls by name, as vLLM names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from deployments.parsers.families import (
    deepseek,
    functionary,
    gemma,
    kimi_k2,
    kimi_k3,
    llama3_json,
    minimax_m3,
    mistral,
    solar_open,
)
from deployments.parsers.families import pythonic as python_calls
from deployments.parsers.families.json_blocks import HERMES_MARKERS, JSON_FORMATS
from deployments.parsers.families.xml_calls import HY_V3, XML_FORMATS
from deployments.parsers.marked import CallReader, Thoughts, marked
from deployments.parsers.reader import Family
from deployments.parsers.schema_types import Tools
from deployments.parsers.whole_formats import WHOLE_FORMATS

__all__ = ["TOOL_PARSERS", "ToolParser"]


@dataclass(frozen=True)
class ToolParser:
    """A format of tool calls: either ``calls`` or ``new`` reads them, or one of WHOLE_FORMATS.

    Attributes:
        markers: the special tokens that it needs to see.
        calls: what reads the calls after each marker of the text.
        dropped: markers around text, which are not part of it.
        new: returns the parser for a request's tools, if the format has another structure.
        call_id_length: characters of a call's id; some templates accept one length only.
        has_kimi_ids: the template expects ids that are ``functions.name:index``, counted through the conversation.
        json_markers: the texts around a call that is a JSON object with ``name`` and ``arguments``; None for others.
    """

    markers: tuple[str, ...]
    calls: Mapping[str, CallReader] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    new: Callable[[Tools], Family] | None = None
    call_id_length: int = 29
    has_kimi_ids: bool = False
    json_markers: tuple[str, str] | None = None

    def family(self, tools: Tools, thoughts: Thoughts | None = None, dropped: tuple[str, ...] = ()) -> Family:
        """Return the parser of an answer after its first reasoning.

        Args:
            tools: those that the answer may call.
            thoughts: how reasoning is marked, if it may also come later.
            dropped: further markers that are not part of the text.
        """
        if self.new is not None:
            return self.new(tools)
        every = tuple(dict.fromkeys((*self.dropped, *dropped)))
        return partial(marked, tools=tools, calls=self.calls, reasoning=thoughts, dropped=every)


_json = {name: ToolParser(format.markers, format.calls, format.dropped) for name, format in JSON_FORMATS.items()}
_xml = {name: ToolParser(format.markers, format.calls) for name, format in XML_FORMATS.items()}
_llama3_json = ToolParser(llama3_json.MARKERS, new=lambda tools: partial(llama3_json.llama3_json, tools=tools))
_pythonic = ToolParser(python_calls.PYTHONIC_MARKERS, new=lambda tools: partial(python_calls.pythonic, tools=tools))
_deepseek = ToolParser(deepseek.MARKERS, new=lambda tools: deepseek.deepseek)

TOOL_PARSERS: Mapping[str, ToolParser] = {
    **_json,
    **_xml,
    "hermes": replace(_json["hermes"], json_markers=HERMES_MARKERS),
    "qwen3_xml": _xml["qwen3_coder"],
    "mimo": _xml["qwen3_coder"],
    "step3p5": _xml["qwen3_coder"],
    "glm47": _xml["glm45"],
    "poolside_v1": _xml["glm45"],
    "jamba": _json["hunyuan_a13b"],
    "minimax": _json["hunyuan_a13b"],  # M1; M2 writes tags
    "apriel": _json["hunyuan_a13b"],
    "cohere_command4": _json["cohere_command3"],
    "llama3_json": _llama3_json,
    "llama4_json": _llama3_json,
    "xlam": ToolParser(
        llama3_json.XLAM_MARKERS,
        new=lambda tools: partial(llama3_json.llama3_json, tools=tools, markers=llama3_json.XLAM_MARKERS),
    ),
    "pythonic": _pythonic,
    "llama4_pythonic": _pythonic,
    "lfm2": ToolParser(python_calls.LFM2_MARKERS, python_calls.LFM2_CALLS),
    "olmo3": ToolParser(python_calls.OLMO3_MARKERS, python_calls.OLMO3_CALLS),
    "mistral": ToolParser(mistral.MARKERS, new=lambda tools: mistral.mistral, call_id_length=9),
    "deepseek_v3": _deepseek,
    "deepseek_v31": _deepseek,
    "kimi_k2": ToolParser(kimi_k2.KIMI_K2_MARKERS, kimi_k2.KIMI_K2_CALLS, has_kimi_ids=True),
    "kimi_k3": ToolParser(kimi_k3.KIMI_K3_TOKENS, kimi_k3.KIMI_K3_CALLS, kimi_k3.KIMI_K3_DROPPED),
    "minimax_m3": ToolParser(minimax_m3.MINIMAX_M3_MARKERS, minimax_m3.MINIMAX_M3_CALLS),
    "gemma4": ToolParser(gemma.GEMMA4.markers, gemma.GEMMA4.calls, gemma.GEMMA4_DROPPED),
    "hy_v3": ToolParser(
        tuple(marker for format in HY_V3 for marker in format.markers),
        {marker: reader for format in HY_V3 for marker, reader in format.calls.items()},
    ),
    "solar_open": ToolParser(solar_open.SOLAR_OPEN_MARKERS, solar_open.SOLAR_OPEN_CALLS, solar_open.SOLAR_OPEN_DROPPED),
    "functionary_v31": ToolParser((), functionary.FUNCTIONARY_CALLS),
    "functiongemma": ToolParser(gemma.FUNCTION_GEMMA.markers, gemma.FUNCTION_GEMMA.calls),
    **{format.tool: ToolParser(format.markers) for format in WHOLE_FORMATS},  # each reads an answer as a whole
}
