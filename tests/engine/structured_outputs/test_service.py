"""GrammarService: cached grammars, compilation for asyncio, and the report of rejections."""

from __future__ import annotations

import pytest

from engine.errors import RequestError
from engine.structured_outputs.compiler import GrammarCompiler
from engine.structured_outputs.params import StructuredOutputsParams
from engine.structured_outputs.service import GrammarService
from tests.engine.structured_outputs.random_texts import EOS_TOKEN_IDS, MODEL, VOCAB_SIZE
from tests.waiting import HANG_S, until_in_loop


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


async def test_a_service_that_has_loaded_keeps_a_child_ready_for_the_first_grammar() -> None:
    compiler = GrammarCompiler(MODEL, VOCAB_SIZE, EOS_TOKEN_IDS, timeout_s=HANG_S)
    grammars = GrammarService(compiler, on_rejected=lambda _: None)
    grammars.load()
    child = await until_in_loop(lambda: compiler._loaded and compiler._loaded.probe._child, "a child is ready")
    assert child is not None
    assert compiler._loaded is not None
    await grammars.compile_async(StructuredOutputsParams(regex="[a-z]{3}"))
    assert compiler._loaded.probe._child is child
    grammars.close()
    assert child.poll() is not None


async def test_a_model_without_structured_outputs_says_so_to_requests_only() -> None:
    rejections: list[RequestError] = []
    grammars = GrammarService(GrammarCompiler(MODEL, VOCAB_SIZE, []), on_rejected=rejections.append)
    grammars.load()
    with pytest.raises(RequestError, match="need a model with an EOS token"):
        await grammars.compile_async(StructuredOutputsParams(regex="a"))
    assert len(rejections) == 1


async def test_every_rejection_is_reported_once(compiler: GrammarCompiler) -> None:
    rejections: list[RequestError] = []
    grammars = GrammarService(compiler, on_rejected=rejections.append)
    with pytest.raises(RequestError, match="cannot be compiled"):
        await grammars.compile_async(StructuredOutputsParams(regex="(("))
    assert len(rejections) == 1
    with pytest.raises(RequestError, match="cannot be compiled"):
        await grammars.compile_async(StructuredOutputsParams(regex="(("))
    assert len(rejections) == 2
