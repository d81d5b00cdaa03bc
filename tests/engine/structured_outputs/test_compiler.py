"""Many requests for one grammar at a time, as the answers to one prompt make them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from engine.errors import OverloadedError, RequestError
from engine.options.structured_outputs import StructuredOutputsParams
from engine.structured_outputs.compiler import GrammarCompiler
from engine.structured_outputs.grammar import Grammar
from engine.structured_outputs.probe import GrammarProbe
from tests.engine.structured_outputs.random_texts import MODEL, TOKENS, allowed_tokens
from tests.waiting import HANG_S, until


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(MODEL, TOKENS, [2], timeout_s=HANG_S)
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
        waiting = compiler._compiling[params]._condition._waiters  # type: ignore[attr-defined]
        until(lambda: len(waiting) == 7, "the others wait for this one")
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
    assert len(checked) == 1


def test_a_new_engine_compiles_as_many_grammars_as_come_at_once() -> None:
    compiler = GrammarCompiler(MODEL, TOKENS, [2], timeout_s=HANG_S)
    with ThreadPoolExecutor(20) as pool:
        grammars = list(pool.map(compiler.compile, [StructuredOutputsParams(regex=f"[a-f]{{{i}}}") for i in range(20)]))
    assert len(grammars) == 20
    compiler.close()


SLOW = StructuredOutputsParams(json={"type": "integer", "multipleOf": 10_000_019})


def test_a_slow_grammar_holds_up_neither_cached_ones_nor_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(MODEL, TOKENS, [2], timeout_s=HANG_S)
    known, json_object = StructuredOutputsParams(regex="[a-f]{3}"), StructuredOutputsParams(json_object=True)
    compiler.compile(known)
    is_tried, may_end = threading.Event(), threading.Event()

    def check(probe: GrammarProbe, params: StructuredOutputsParams) -> str | None:
        is_tried.set()
        assert may_end.wait(HANG_S)
        return "it takes longer than 2.5 seconds"

    monkeypatch.setattr(GrammarProbe, "check", check)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(compiler.compile, SLOW)
        assert is_tried.wait(HANG_S)
        assert compiler.cached(known) is not None
        assert compiler.cached(json_object) is None
        compiler.compile(json_object)
        compiler.compile(StructuredOutputsParams(choice=["a", "b"]))
        assert not slow.done()
        may_end.set()
        assert isinstance(slow.exception(), RequestError)
    compiler.close()


def test_a_grammar_for_which_there_is_no_time_may_come_again() -> None:
    compiler = GrammarCompiler(MODEL, TOKENS, [2], timeout_s=0.01)
    probe, params = compiler._toolchain().probe, StructuredOutputsParams(regex="[a-f]{4}")
    with probe._lock, pytest.raises(OverloadedError, match="other grammars are being compiled"):
        compiler.compile(params)
    assert compiler.cached(params) is None  # it was not refused
    compiler.close()


def test_a_grammar_that_was_refused_is_not_tried_again_for_a_minute(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, now, checked = StructuredOutputsParams(regex="[a-f]{7}"), 1000.0, []

    def check(probe: GrammarProbe, params: StructuredOutputsParams) -> str | None:
        checked.append(params)
        return "it takes longer than 2.5 seconds"

    monkeypatch.setattr(GrammarProbe, "check", check)
    monkeypatch.setattr("engine.structured_outputs.compiler.monotonic", lambda: now)
    for refuse in (compiler.compile, compiler.compile, compiler.cached):
        with pytest.raises(RequestError, match=r"regex cannot be compiled: it takes longer than 2\.5 seconds"):
            refuse(params)
    assert len(checked) == 1
    now += 61
    monkeypatch.undo()
    monkeypatch.setattr("engine.structured_outputs.compiler.monotonic", lambda: now)
    assert compiler.cached(params) is None
    compiler.compile(params)


def test_the_grammar_that_was_not_used_for_the_longest_time_leaves_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.structured_outputs.compiler._CACHED_GRAMMARS", 2)
    compiler = GrammarCompiler(MODEL, TOKENS, [2])
    oldest, unused, newest = (StructuredOutputsParams(choice=[text]) for text in "abc")
    compiler.compile(oldest)
    compiler.compile(unused)
    assert compiler.cached(oldest) is not None
    compiler.compile(newest)
    assert [compiler.cached(form) is not None for form in (oldest, unused, newest)] == [True, False, True]
    compiler.close()


def test_closing_ends_the_child_in_the_middle_of_its_work() -> None:
    compiler = GrammarCompiler(MODEL, TOKENS, [2], timeout_s=HANG_S)
    compiler.load()
    probe = compiler._toolchain().probe
    child = probe._child
    assert child is not None
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(compiler.compile, SLOW)
        until(probe._lock.locked, "the child has the grammar", pause_s=0.001)
        compiler.close()
        assert isinstance(slow.exception(), OverloadedError)
    assert child.returncode == -signal.SIGKILL
    assert probe._child is None


def test_an_added_token_that_is_not_special_is_text(tmp_path: Path) -> None:
    """Qwen's ``<tool_call>`` is one: llguidance takes any added token in angle brackets for a special one."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.add_tokens(["<tool_call>", "<Ä ö>"])
    tokenizer.add_tokens(["<|tool_end|>"], special_tokens=True)
    tokenizer.save_pretrained(tmp_path)
    compiler = GrammarCompiler(tmp_path, len(tokenizer), [2], timeout_s=HANG_S)
    form = StructuredOutputsParams(grammar='start: "<tool_call>" /[a-z]*/ "<Ä ö>" /(.*)/')
    ids = tokenizer.encode("<tool_call>hello<Ä ö>")
    assert tokenizer.convert_tokens_to_ids(["<tool_call>", "<Ä ö>"]) == [ids[0], ids[-1]]
    grammar = compiler.compile(form)
    assert all(map(grammar.accept, ids))
    assert not grammar.accept(tokenizer.convert_tokens_to_ids("<|tool_end|>"))
    spelled = compiler.compile(form)  # in pieces, as a model may write it that has not learnt the token
    assert all(map(spelled.accept, [*map(tokenizer.convert_tokens_to_ids, "<tool_call>"), ids[-1]]))
    compiler.close()


def test_a_tokenizer_may_have_more_tokens_than_the_model_has_logits() -> None:
    """Gemma 3 1B has one token more."""
    compiler = GrammarCompiler(MODEL, TOKENS - 1, [2], timeout_s=HANG_S)
    grammar = compiler.compile(StructuredOutputsParams(regex="[a-z ]{3}"))
    assert grammar.vocabulary.size == TOKENS - 1
    assert max(allowed_tokens(grammar)) < TOKENS - 1
    compiler.close()
