"""Invalid and hostile grammars are rejected in time, and never stop the engine."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import engine
from engine.errors import RequestError
from engine.options.structured_outputs import StructuredOutputsParams
from engine.structured_outputs.bitmask import fill_bitmask
from engine.structured_outputs.compiler import GrammarCompiler
from engine.text.tokenizer import Tokenizer
from tests.engine.structured_outputs.random_texts import (
    EOS_TOKEN_IDS,
    MODEL,
    VOCAB_SIZE,
    allowed_tokens,
    random_tokens,
)
from tests.waiting import HANG_S, until


@pytest.mark.parametrize(
    "options",
    [
        {"regex": "(("},
        {"regex": "(?=a)b"},
        {"regex": r"(a)\1"},
        {"regex": "[^\\x00-\\U0010FFFF]"},
        {"regex": "(" * 2000 + "a" + ")" * 2000},
        {"grammar": "start: nowhere"},
        {"grammar": "start: start"},
        {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
        {"grammar": "root ::= " + "(" * 30_000},
        {"grammar": "::=" * 20_000},
        {"json": {"type": 7}},
        {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
        {"json": {"$ref": "#"}},
        {"json": {"$ref": "http://nowhere.invalid/schema"}},
        {"json": {"$ref": "file:///etc/hostname"}},
        {"choice": ["<|im_end|>"]},  # what EOS is spelled like can be written by no other token
    ],
    ids=lambda options: str(options)[:40],
)
def test_what_is_invalid_or_matches_nothing_is_refused_with_a_reason(
    compiler: GrammarCompiler, options: dict[str, Any]
) -> None:
    with pytest.raises(RequestError, match=f"structured_outputs.{next(iter(options))} cannot be compiled: .") as caught:
        compiler.compile(StructuredOutputsParams(**options))
    assert caught.value.param == "structured_outputs"
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def definitions(count: int, make: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    defs: dict[str, Any] = {f"a{number}": make(f"#/$defs/a{number + 1}") for number in range(count)}
    return {"$defs": {**defs, f"a{count}": {"type": "string"}}, "$ref": "#/$defs/a0"}


HOSTILE: dict[str, dict[str, Any]] = {
    "deep any-of chain": {"json": definitions(1000, lambda ref: {"anyOf": [{"$ref": ref}, {"type": "null"}]})},
    "deep reference chain": {"json": definitions(1500, lambda ref: {"$ref": ref})},
    "doubling all-of": {"json": {"allOf": [{"anyOf": [{"minLength": i + j} for j in range(4)]} for i in range(12)]}},
    "multiples": {"json": {"type": "integer", "multipleOf": 10_000_019}},
    "enormous enum": {"json": {"enum": [f"v{number}" for number in range(6000)]}},
    "endless array": {"json": {"type": "array", "minItems": 10**9}},
    "optional properties": {"json": {"properties": {f"p{number}": True for number in range(2000)}, "type": "object"}},
    "options": {"regex": "(a?){50000}"},
    "spelled options": {"regex": "a?" * 8000},
    "stars": {"regex": "(.*){1000}a{1000}"},
    "star chain": {"regex": "(.*)?" * 3000},
    "nested counts": {"regex": "(((a{1,1000}){1,1000}){1,1000}){1,1000}"},
    "deep rules": {"grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(3500)) + 'r3500: "a"'},
    "intersections": {"grammar": "start: T\nT: " + " & ".join(f"/.*a.{{{i}}}/" for i in range(300))},
    "tripling rules": {
        "grammar": "start: r0\n" + "".join(f"r{i}: {f'r{i + 1} ' * 3}\n" for i in range(99)) + 'r99: "a"|'
    },
    "many alternatives": {"grammar": "start: " + "|".join(f'"a{i}"' for i in range(5000))},
}


SLOW = {"spelled options", "multiples", "star chain", "intersections"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in SLOW else ()) for name in HOSTILE]
)
def test_a_hostile_grammar_ends_and_leaves_the_engine_alive(name: str) -> None:
    compiler = GrammarCompiler(MODEL, VOCAB_SIZE, EOS_TOKEN_IDS, timeout_s=2.0)
    compiler.load()
    with contextlib.suppress(RequestError):
        assert allowed_tokens(compiler.compile(StructuredOutputsParams(**HOSTILE[name])))
    others = count(1)

    def compiles_another() -> bool:
        with contextlib.suppress(RequestError):  # on a busy machine even these may take too long
            return not compiler.compile(StructuredOutputsParams(regex=f"b{{{next(others)}}}")).is_terminated
        return False

    until(compiles_another, "another grammar is compiled")
    compiler.close()


def test_a_time_out_is_named() -> None:
    compiler = GrammarCompiler(MODEL, VOCAB_SIZE, EOS_TOKEN_IDS, timeout_s=0.5)
    with pytest.raises(RequestError, match=r"it takes longer than 0\.25 seconds"):
        compiler.compile(StructuredOutputsParams(json={"type": "integer", "multipleOf": 1_000_003}))
    compiler.close()


def test_a_limit_met_while_generating_fails_one_sequence(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    hostile = compiler.compile(StructuredOutputsParams(regex="((a{1,100}){1,100}){1,100}"))
    good = compiler.compile(StructuredOutputsParams(regex="[a-z]+"))
    for _ in range(400):
        fill_bitmask([hostile, good])
        if hostile.error is not None or not hostile.accept(tokenizer.encode("a")[0]):
            break
        assert good.accept(tokenizer.encode("a")[0])
    assert hostile.error
    bitmask = fill_bitmask([good, hostile])
    assert bitmask[1].tolist() == hostile.vocabulary.eos_bits.tolist()
    assert good.error is None


def test_a_grammar_whose_states_are_used_up_is_compiled_anew(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.structured_outputs.grammar._MAX_LEXER_STATES", 300)
    compiler = GrammarCompiler(MODEL, VOCAB_SIZE, EOS_TOKEN_IDS, timeout_s=HANG_S)
    params = StructuredOutputsParams(regex="[a-z]{5,5000}")
    for _ in range(2):
        grammar = compiler.compile(params)
        for _ in range(400):
            fill_bitmask([grammar])
            if not grammar.accept(tokenizer.encode("a")[0]):
                break
        assert "too many states" in str(grammar.error)
    assert len(allowed_tokens(compiler.compile(params))) > 100
    compiler.close()


def test_a_machine_that_starts_no_process_refuses_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    for executable in ("/bin/false", "/nowhere/python"):
        monkeypatch.setattr(sys, "executable", executable)
        with pytest.raises(RequestError, match="did not start"):
            GrammarCompiler(MODEL, VOCAB_SIZE, EOS_TOKEN_IDS).compile(StructuredOutputsParams(regex="a"))


def test_the_child_finds_this_package_first_and_no_module_of_it_at_the_top(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def refuse(*_: object, env: dict[str, str], **__: object) -> None:
        started.append(env["PYTHONPATH"])
        raise OSError

    monkeypatch.setattr("engine.structured_outputs.probe.subprocess.Popen", refuse)
    with pytest.raises(RequestError, match="did not start"):
        GrammarCompiler(MODEL, VOCAB_SIZE, EOS_TOKEN_IDS).compile(StructuredOutputsParams(regex="a"))
    paths = [Path(path).resolve() for path in started[0].split(os.pathsep)]
    package = Path(engine.__file__).resolve().parent
    assert paths[0] == package.parent
    assert package not in paths


def test_a_server_without_llguidance_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match="pip install"):
        GrammarCompiler(MODEL, VOCAB_SIZE, EOS_TOKEN_IDS).compile(StructuredOutputsParams(regex="a"))


@pytest.mark.parametrize(
    ("path", "vocab_size", "eos_token_ids"),
    [(MODEL, VOCAB_SIZE, []), (MODEL, 100, [2]), (MODEL.parent / "nowhere", VOCAB_SIZE, [2])],
)
def test_a_model_that_cannot_serve_structured_outputs_refuses_requests(
    path: Path, vocab_size: int, eos_token_ids: list[int]
) -> None:
    with pytest.raises(RequestError) as caught:
        GrammarCompiler(path, vocab_size, eos_token_ids).compile(StructuredOutputsParams(regex="a"))
    assert str(MODEL.parent) not in str(caught.value)


def test_an_ambiguous_grammar_cannot_slow_down_every_step(compiler: GrammarCompiler) -> None:
    ambiguous = StructuredOutputsParams(grammar='start: s\ns: s s | s s s | "a" | "b" | "the" | "c" | /[a-z ]/')
    with pytest.raises(RequestError, match="Too many items.*10000"):
        random_tokens(compiler.compile(ambiguous), random.Random(1))


def test_a_schema_of_hundreds_of_properties_is_within_the_limits(compiler: GrammarCompiler) -> None:
    value = {"anyOf": [{"type": "string", "maxLength": 9}, {"type": "array", "items": {"type": "number"}}]}
    schema = {"type": "object", "properties": {f"k{i}": value for i in range(400)}, "additionalProperties": False}
    grammar = compiler.compile(StructuredOutputsParams(json=schema))
    random_tokens(grammar, random.Random(1))
    assert grammar.error is None
