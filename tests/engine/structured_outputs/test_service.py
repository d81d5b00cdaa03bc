"""GrammarService: cached grammars, compilation for asyncio, and the report of rejections."""

from __future__ import annotations

import pytest

from engine.async_engine import AsyncEngine
from engine.errors import RequestError
from engine.options.structured_outputs import StructuredOutputsParams
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.structured_outputs.compiler import GrammarCompiler
from engine.structured_outputs.service import GrammarService
from engine.text.tokenizer import Tokenizer
from tests.engine.shadow import make_engine
from tests.engine.structured_outputs.random_texts import EOS_TOKEN_IDS, MODEL, VOCAB_SIZE, allowed_tokens
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


Q, X, Z = 51, 58, 60  # the tokens of these letters; a shadow engine has them too


async def test_a_grammar_is_in_the_state_after_the_tokens_that_the_request_has(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    assert tokenizer.encode("QXZ") == [Q, X, Z]
    grammars = GrammarService(compiler, on_rejected=lambda _: None)
    for count in (3, 300):  # the second has more tokens than an event loop steps through
        form, tokens = StructuredOutputsParams(regex=f"QX{{{count}}}Z"), [Q, *[X] * count]
        compiled = [grammars.compile(form, tokens), grammars.compile(form, tokens)]  # new, and cached
        compiled += [await grammars.compile_async(form, tokens), grammars.cached(form, tokens)]
        form = StructuredOutputsParams(regex=f"QX{{{count}}}Z?")
        compiled += [await grammars.compile_async(form, [Q, *[X] * (count - 1)])]
        states = [None if grammar is None else allowed_tokens(grammar) for grammar in compiled]
        assert states == [[Z], [Z], [Z], [Z] if count == 3 else None, [X]]
        initial = grammars.cached(form)
        assert initial is not None
        assert allowed_tokens(initial) == [Q]


async def test_an_engine_continues_the_grammar_of_a_request_that_has_tokens(compiler: GrammarCompiler) -> None:
    form = StructuredOutputsParams(regex="QX{4}Z")
    params = SamplingParams(structured_outputs=form, max_tokens=9)
    request = EngineRequest("a", [1], params, output_token_ids=[Q, X, X, X, X])
    engine, _ = make_engine()
    of_engine, engine.grammars = engine.grammars, GrammarService(compiler, on_rejected=lambda _: None)
    grammar = engine.add_request(request).sequences[0].grammar
    assert grammar is not None
    assert allowed_tokens(grammar) == [Z]
    engine.abort("a")
    async_engine = AsyncEngine(engine)
    grammar = await async_engine.compile_grammar(request)
    assert grammar is not None
    assert allowed_tokens(grammar) == [Z]
    engine.grammars = of_engine  # which a shutdown closes
    await async_engine.shutdown()


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
