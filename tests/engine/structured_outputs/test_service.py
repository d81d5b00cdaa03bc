"""GrammarService: cached grammars, compilation for asyncio, and the report of rejections."""

from __future__ import annotations

import pytest

from engine.errors import RequestError
from engine.structured_outputs.compiler import GrammarCompiler
from engine.structured_outputs.params import StructuredOutputsParams
from engine.structured_outputs.service import GrammarService


async def test_a_cached_grammar_waits_for_no_thread(compiler: GrammarCompiler) -> None:
    rejections: list[RequestError] = []
    grammars = GrammarService(compiler, on_rejected=rejections.append)
    fresh = StructuredOutputsParams(choice=["sun", "moon"])
    assert grammars.cached(None) is None
    grammars.compile(StructuredOutputsParams(regex="[a-z]{3}"))
    assert grammars.cached(fresh) is None
    assert await grammars.compile_async(fresh) is not None
    assert await grammars.compile_async(None) is None
    grammar = grammars.cached(fresh)
    assert grammar is not None
    assert grammar is not grammars.cached(fresh)
    assert not rejections
    with pytest.raises(RequestError, match="do not fit") as caught:
        grammars.cached(fresh, [5])
    assert rejections == [caught.value]


async def test_every_rejection_is_reported_once(compiler: GrammarCompiler) -> None:
    rejections: list[RequestError] = []
    grammars = GrammarService(compiler, on_rejected=rejections.append)
    with pytest.raises(RequestError, match="cannot be compiled"):
        await grammars.compile_async(StructuredOutputsParams(regex="(("))
    assert len(rejections) == 1
    with pytest.raises(RequestError, match="cannot be compiled"):
        await grammars.compile_async(StructuredOutputsParams(regex="(("))
    assert len(rejections) == 2
