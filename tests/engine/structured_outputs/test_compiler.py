"""Many requests for one grammar at a time, as the answers to one prompt make them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep

import pytest

from engine.errors import RequestError
from engine.structured_outputs.compiler import GrammarCompiler
from engine.structured_outputs.grammar import Grammar
from engine.structured_outputs.params import StructuredOutputsParams
from engine.structured_outputs.probe import GrammarProbe

MODEL = Path(__file__).parents[3] / "demo" / "model"


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(MODEL, 3072, [2])
    yield compiler
    compiler.close()


@pytest.mark.parametrize(("regex", "is_good"), [("[a-f]{3,9}x", True), ("(unclosed", False)])
def test_a_grammar_that_many_want_at_once_is_compiled_once(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, regex: str, is_good: bool
) -> None:
    checked: list[StructuredOutputsParams] = []
    probe_check = GrammarProbe.check

    def check(probe: GrammarProbe, params: StructuredOutputsParams) -> str | None:
        checked.append(params)
        sleep(0.2)  # until all the others have come
        return probe_check(probe, params)

    def compile_it(_: int) -> Grammar | str:
        try:
            return compiler.compile(StructuredOutputsParams(regex=regex))
        except RequestError as error:
            return str(error)

    compiler.load()
    monkeypatch.setattr(GrammarProbe, "check", check)
    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(compile_it, range(8)))
    assert len(checked) == 1
    assert {isinstance(outcome, Grammar) for outcome in outcomes} == {is_good}
    compile_it(0)
    assert len(checked) == (1 if is_good else 2)  # a failure is not remembered: it may have been for want of time
