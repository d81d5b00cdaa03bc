"""Grammars along random texts: the texts have the requested form, and each sequence has its own state."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from typing import Any

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.options.structured_outputs import StructuredOutputsParams
from engine.structured_outputs import grammar
from engine.structured_outputs.compiler import GrammarCompiler
from engine.text.tokenizer import Tokenizer
from tests.engine.structured_outputs.random_texts import (
    EOS_TOKEN_IDS,
    MODEL,
    VOCAB_SIZE,
    allowed_tokens,
    closing_text,
    consumes,
)
from tests.waiting import HANG_S


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("regex", [r"\d{3}-[a-z]{2,5}", "(yes|no|maybe)+!", "^[^/]{0,5}/x$", "é{1,4}|日本", "(?i)ab?"])
def test_a_regex_is_matched_in_full(compiler: GrammarCompiler, tokenizer: Tokenizer, regex: str, seed: int) -> None:
    assert re.fullmatch(regex, closing_text(compiler, tokenizer, StructuredOutputsParams(regex=regex), seed))


@pytest.mark.parametrize("seed", range(5))
def test_a_choice_is_one_of_the_strings(compiler: GrammarCompiler, tokenizer: Tokenizer, seed: int) -> None:
    choices = ["yes", "yes!", "no", 'a "quote"', "a\\b", "line\nbreak", "😀", "\x7f\x80\t", "/x/", " ", "%"][:9]
    choices += [f"number {number}" for number in range(3000)]
    assert closing_text(compiler, tokenizer, StructuredOutputsParams(choice=choices), seed) in choices


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "grammar", ['start: "(" start ")" | "x" | start "+" start', 'root ::= "(" root ")" | "x" | root "+" root']
)
def test_a_grammar_is_followed(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: str, seed: int) -> None:
    text = closing_text(compiler, tokenizer, StructuredOutputsParams(grammar=grammar), seed)
    assert set(text) <= set("(x)+")
    eval(text, {"x": 1})


@pytest.mark.parametrize("seed", range(5))
def test_a_json_object_is_an_object(compiler: GrammarCompiler, tokenizer: Tokenizer, seed: int) -> None:
    assert isinstance(
        json.loads(closing_text(compiler, tokenizer, StructuredOutputsParams(json_object=True), seed)), dict
    )


FIELDS: dict[str, tuple[dict[str, Any], Callable[[Any], bool]]] = {
    "integer": ({"type": "integer", "minimum": -5, "maximum": 99}, lambda v: type(v) is int and -5 <= v <= 99),
    "string": ({"type": "string", "maxLength": 8}, lambda v: isinstance(v, str) and len(v) <= 8),
    "boolean": ({"type": "boolean"}, lambda v: isinstance(v, bool)),
    "enum": ({"enum": ["red", 'gr"een', 3, None]}, lambda v: v in ("red", 'gr"een', 3, None)),
    "array": (
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        lambda v: 1 <= len(v) <= 3 and all(isinstance(item, bool) for item in v),
    ),
}


@settings(max_examples=25, deadline=None)
@given(
    fields=st.dictionaries(st.text('abcé_ "', min_size=1, max_size=6), st.sampled_from(sorted(FIELDS)), max_size=5),
    optional=st.integers(0, 5),
    seed=st.integers(0, 2**16),
)
def test_json_follows_its_schema(
    compiler: GrammarCompiler, tokenizer: Tokenizer, fields: dict[str, str], optional: int, seed: int
) -> None:
    required = sorted(fields)[optional:]
    schema = {
        "type": "object",
        "properties": {name: FIELDS[kind][0] for name, kind in fields.items()},
        "required": required,
        "additionalProperties": False,
    }
    value = json.loads(closing_text(compiler, tokenizer, StructuredOutputsParams(json=schema), seed))
    assert set(required) <= set(value) <= set(fields)
    assert all(FIELDS[fields[name]][1](item) for name, item in value.items())


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"a":1}', True),
        ('{ "a": 1 }', True),
        ('{\n    "a": 1\n}', True),
        ('{  "a":1}', False),
        ('{\n\n"a":1}', False),
        ('{"a"\t:1}', False),
        (' {"a":1}', False),
        ('{"a":1} ', False),
    ],
)
def test_blanks_in_json_are_bounded_whatever_the_schema_says(
    compiler: GrammarCompiler, tokenizer: Tokenizer, text: str, fits: bool
) -> None:
    schema = {
        "x-guidance": {"whitespace_pattern": r"\s+", "item_separator": r"\s*,\s*"},
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    grammar = compiler.compile(StructuredOutputsParams(json=schema))
    assert consumes(grammar, tokenizer, text) is fits
    assert (grammar.error is None) is fits


@pytest.mark.parametrize("token_id", [-1, 2**40, VOCAB_SIZE, VOCAB_SIZE - 1, 1, EOS_TOKEN_IDS[0]])
def test_a_token_that_is_not_allowed_fails_its_own_sequence_only(compiler: GrammarCompiler, token_id: int) -> None:
    params = StructuredOutputsParams(regex="abc")
    failed, other = compiler.compile(params), compiler.compile(params)
    assert not failed.accept(token_id)
    assert failed.error
    assert failed.is_terminated
    assert not failed.accept(allowed_tokens(other)[0])
    assert allowed_tokens(failed) == sorted(EOS_TOKEN_IDS), "the batch must go on"
    assert other.error is None
    assert not other.is_terminated


def test_every_eos_id_ends_where_the_grammar_accepts_an_end_and_nowhere_else(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = compiler.compile(StructuredOutputsParams(regex="ab?"))
    assert not set(EOS_TOKEN_IDS) & set(allowed_tokens(grammar))
    assert consumes(grammar, tokenizer, "a")
    assert set(EOS_TOKEN_IDS) < set(allowed_tokens(grammar))
    assert not grammar.is_terminated
    for eos_token_id in EOS_TOKEN_IDS:
        ended = grammar.fork()
        assert ended.accept(eos_token_id)
        assert ended.is_terminated
        assert allowed_tokens(ended) == sorted(EOS_TOKEN_IDS)
        assert not ended.accept(tokenizer.encode("b")[0])
    assert consumes(grammar, tokenizer, "b")
    assert grammar.is_terminated
    assert allowed_tokens(grammar) == sorted(EOS_TOKEN_IDS)


def test_an_eos_id_that_is_ordinary_text_still_means_an_end(tokenizer: Tokenizer) -> None:
    (letter,) = tokenizer.encode("a")
    compiler = GrammarCompiler(MODEL, VOCAB_SIZE, [letter], timeout_s=HANG_S)
    grammar = compiler.compile(StructuredOutputsParams(regex="[a-c]{2}"))
    assert letter not in allowed_tokens(grammar)
    assert consumes(grammar, tokenizer, "bc")
    assert allowed_tokens(grammar) == [letter]
    compiler.close()


def test_forks_are_independent(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(StructuredOutputsParams(regex="x(a+|b+)"))
    assert consumes(grammar, tokenizer, "x")
    fork = grammar.fork()
    assert consumes(fork, tokenizer, "aa")
    assert consumes(grammar, tokenizer, "bb")
    assert not consumes(fork, tokenizer, "b")
    assert fork.error
    assert grammar.error is None
    assert fork.fork().error == fork.error


def test_a_fork_of_a_grammar_that_has_ended_has_ended(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Here the text might go on: only EOS has ended it."""
    grammar = compiler.compile(StructuredOutputsParams(regex="ab?"))
    assert consumes(grammar, tokenizer, "a")
    assert grammar.accept(EOS_TOKEN_IDS[0])
    fork = grammar.fork()
    assert fork.is_terminated
    assert not fork.accept(tokenizer.encode("b")[0])


def test_threads_compile_and_step_the_same_grammar_independently(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    texts: list[str] = []

    def work(seed: int) -> None:
        for regex in ("[a-z]{4}x", "[a-z]{4}y"):
            texts.append(closing_text(compiler, tokenizer, StructuredOutputsParams(regex=regex), seed))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 16
    assert all(re.fullmatch("[a-z]{4}[xy]", text) for text in texts)


@pytest.mark.parametrize(("cpus", "expected"), [(1, 1), (4, 2), (64, 8)])
def test_masks_are_computed_on_half_of_the_cpus_that_this_process_may_use(
    cpus: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "available_cpus", lambda: cpus)
    monkeypatch.setattr(llguidance, "LLExecutor", lambda num_threads: num_threads)
    assert grammar._executor.__wrapped__() == expected
