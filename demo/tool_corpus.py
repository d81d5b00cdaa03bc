"""Loads the text of the tool conversations from `corpus/tools.toml`."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.corpus import CORPUS_DIR, text_lines

Tool = dict[str, Any]  # a tool in the API's format


@dataclass(frozen=True)
class Operation:
    """One operation of the calculator."""

    sign: str
    words: tuple[str, ...]  # that stand for the sign
    ask: tuple[str, ...]  # questions with {a} and {b}


@dataclass(frozen=True)
class Calculator:
    """Questions for the calculator: frames whose {} is an expression."""

    ask: tuple[str, ...]
    held_out: tuple[str, ...]
    errors: tuple[str, ...]
    error_answer: str
    operations: tuple[Operation, ...]


@dataclass(frozen=True)
class ClusterStatus:
    """Questions about the cluster's current figures, and the frame of the answer."""

    ask: tuple[str, ...]
    held_out: tuple[str, ...]
    answer: str


@dataclass(frozen=True)
class ToolCorpus:
    """All text of the tool conversations."""

    page_tools: tuple[Tool, ...]
    other_tools: tuple[Tool, ...]
    page_system: str
    calculator: Calculator
    cluster_status: ClusterStatus
    thoughts: dict[str, str]  # kind of turn -> reasoning


def load_tool_corpus(path: Path = CORPUS_DIR / "tools.toml") -> ToolCorpus:
    """Read the file."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    status = data["cluster_status"]
    return ToolCorpus(
        page_tools=_tools(data["tools"]),
        other_tools=_tools(data["others"]),
        page_system=data["page_system"].strip(),
        calculator=_calculator(data["calculator"]),
        cluster_status=ClusterStatus(text_lines(status["ask"]), text_lines(status["held_out"]), status["answer"]),
        thoughts=data["thoughts"],
    )


def _tools(definitions: list[str]) -> tuple[Tool, ...]:
    return tuple({"type": "function", "function": json.loads(text)} for text in definitions)


def _calculator(data: dict[str, Any]) -> Calculator:
    operations = [
        Operation(item["sign"], tuple(word.strip() for word in item["words"].split(",")), text_lines(item["ask"]))
        for item in data["operations"].values()
    ]
    return Calculator(
        ask=text_lines(data["ask"]),
        held_out=text_lines(data["held_out"]),
        errors=text_lines(data["errors"]),
        error_answer=data["error_answer"],
        operations=tuple(operations),
    )
