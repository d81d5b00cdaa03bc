"""Our parsers pass the conformance suite, and the suite finds faults in parsers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from deployments.parsers.tool_parsers import TOOL_PARSERS
from tests.parsers.conformance import Answer, failures, main, pagoda
from tests.parsers.writers import WRITERS


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
