"""Our parsers pass the conformance suite, and the suite finds faults in parsers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments.parsers.tool_parsers import TOOL_PARSERS
from tests.parsers.conformance import Answer, failures, main, pagoda
from tests.parsers.writers import WRITERS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("format", WRITERS)
def test_our_parser_passes(format: str) -> None:
    assert list(failures(format)) == []


def test_every_format_is_written() -> None:
    written = {id(TOOL_PARSERS[name]) for name in WRITERS}
    assert [name for name, parser in TOOL_PARSERS.items() if id(parser) not in written] == []


def _drops_cut_markers(format: str, tools: Mapping[str, Any], pieces: Sequence[str]) -> Answer:
    return pagoda(format, tools, [piece for piece in pieces if piece != "<"])


def _loses_an_argument(format: str, tools: Mapping[str, Any], pieces: Sequence[str]) -> Answer:
    answer = pagoda(format, tools, pieces)
    return replace(answer, calls=[(name, "{}") for name, _ in answer.calls])


def _leaks_reasoning(format: str, tools: Mapping[str, Any], pieces: Sequence[str]) -> Answer:
    answer = pagoda(format, tools, pieces)
    return replace(answer, content=answer.reasoning + answer.content, reasoning="")


@pytest.mark.parametrize(
    ("parse", "expected"),
    [(_drops_cut_markers, "of the text at once"), (_loses_an_argument, "calls"), (_leaks_reasoning, "content")],
)
def test_a_faulty_parser_fails(parse: Any, expected: str) -> None:
    assert any(expected in failure for failure in failures("hermes", parse))


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hermes"]) == 0
    assert main(["hermes", "--parser", f"{__name__}:_loses_an_argument"]) == 1
    assert "failures" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["hermez"])
    assert "unknown format hermez" in capsys.readouterr().err


@pytest.mark.parametrize("parser", ["", "json", "json:", "json:parse", "no_module:parse", ":parse", ".a:parse"])
def test_the_command_needs_a_function(parser: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["hermes", "--parser", parser])
    assert f"argument --parser: {parser!r}: " in capsys.readouterr().err


def test_the_help_says_what_the_documentation_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = " ".join((ROOT / "docs/api.md").read_text(encoding="utf-8").replace("`", "").split())
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "each format with arguments that are hard to parse and with text that is cut anywhere",
        "--parser MODULE:FUNCTION",
        "a function that takes the format, the tools",
        "and the pieces of an answer, and returns its content, reasoning and calls",
        "Parse in tests/parsers/conformance.py",
    ):
        assert words in page
        assert words in shown
