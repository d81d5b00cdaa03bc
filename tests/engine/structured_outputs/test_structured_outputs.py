"""Structured outputs: the checks of requests, grammars along random texts, hostile grammars, and masks."""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RequestError
from engine.structured_outputs.bitmask import MaskBuilder, apply_bitmask, fill_bitmask
from engine.structured_outputs.compiler import GrammarCompiler
from engine.structured_outputs.grammar import Grammar
from engine.structured_outputs.params import StructuredOutputsParams
from engine.text.tokenizer import Tokenizer

MODEL = Path(__file__).parents[3] / "demo" / "model"
EOS_TOKEN_IDS = (2, 0)
VOCAB_SIZE = 3077  # more than the tokenizer's 3,072, and no multiple of 32


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(MODEL, VOCAB_SIZE, EOS_TOKEN_IDS)
    compiler.load()
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(MODEL)


def allowed_tokens(grammar: Grammar) -> list[int]:
    """The ids that may come next, read from the bitmask bit by bit."""
    row = fill_bitmask([grammar])[0].tolist()
    return [token_id for token_id in range(len(row) * 32) if row[token_id // 32] >> (token_id % 32) & 1]


CLOSING = [Tokenizer(MODEL).encode(text)[0] for text in ('"', "}", "]")]


def random_tokens(grammar: Grammar, rng: random.Random, longest: int = 3000) -> list[int]:
    """Draw among the allowed tokens until the text ends; after a while, close what is open in JSON."""
    token_ids: list[int] = []
    while len(token_ids) < longest:
        allowed = allowed_tokens(grammar)
        assert allowed, "a mask allows nothing"
        text = [token_id for token_id in allowed if token_id not in EOS_TOKEN_IDS]
        if len(text) < len(allowed) and (not text or rng.random() < 0.3):
            assert set(EOS_TOKEN_IDS) <= set(allowed), "only some of the EOS ids are allowed"
            assert grammar.accept(rng.choice(EOS_TOKEN_IDS))
            assert grammar.is_terminated
            assert grammar.error is None
            return token_ids
        closing = [token_id for token_id in CLOSING if token_id in text] if len(token_ids) > 100 else []
        token_ids.append(closing[0] if closing else rng.choice(text))
        assert grammar.accept(token_ids[-1]), grammar.error
    pytest.fail(f"no end after {longest} tokens")


def closing_text(compiler: GrammarCompiler, tokenizer: Tokenizer, params: StructuredOutputsParams, seed: int) -> str:
    return tokenizer.decode(random_tokens(compiler.compile(params), random.Random(seed)), skip_special_tokens=False)


# --- What may be asked for ------------------------------------------------------------------------------------------

CYCLE: dict[str, Any] = {}
CYCLE["self"] = CYCLE
DOUBLING: Any = {}
for _ in range(60):  # writes out to 2**60 objects
    DOUBLING = {"a": DOUBLING, "b": DOUBLING}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"regex": "a", "choice": ["a"]},
        {"json_object": False},
        {"json_object": 1},
        {"regex": ""},
        {"regex": 5},
        {"regex": "a" * 100_000},
        {"regex": "\ud800"},
        {"grammar": " "},
        {"grammar": b"start: A"},
        {"choice": []},
        {"choice": "ab"},
        {"choice": ["a", ""]},
        {"choice": ["a", None]},
        {"choice": ["a"] * 100_000},
        {"choice": ["\udc00"]},
        {"choice": {"a": 1}},
        {"json": ""},
        {"json": "{"},
        {"json": "[1]"},
        {"json": "true"},
        {"json": []},
        {"json": 3.5},
        {"json": '{"const": NaN}'},
        {"json": {"const": float("inf")}},
        {"json": {"const": object()}},
        {"json": {"const": "\ud800"}},
        {"json": {("a",): 1}},
        {"json": {"description": "x" * 100_000}},
        {"json": {"enum": list(range(100_000))}},
        {"json": '{"items":' * 65 + "{}" + "}" * 65},
        {"json": '{"items":' * 5000 + "{}" + "}" * 5000},
        {"json": CYCLE},
        {"json": DOUBLING},
    ],
    ids=lambda options: str(options)[:40] if options and options.get("json") not in (CYCLE, DOUBLING) else "shared",
)
def test_what_cannot_be_asked_for_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        StructuredOutputsParams(**options)
    assert caught.value.param == "structured_outputs"
    assert len(str(caught.value)) < 400
    assert str(caught.value).encode()


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.just(object()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(["json", "regex", "choice", "grammar", "json_object"]), JUNK, max_size=2))
def test_junk_of_any_type_raises_nothing_but_request_errors(options: dict[str, Any]) -> None:
    try:
        params = StructuredOutputsParams(**options)
    except RequestError:
        return
    assert hash(params) == hash(pickle.loads(pickle.dumps(params)))


def test_depth_of_64_is_accepted_and_schemas_become_text() -> None:
    StructuredOutputsParams(json='{"items":' * 63 + "{}" + "}" * 63)
    params = StructuredOutputsParams(json={"type": "object", "properties": {"z": True, "a": True}})
    assert params.json == '{"type": "object", "properties": {"z": true, "a": true}}'
    assert params.kind == "json"
    assert pickle.loads(pickle.dumps(params)) == params


def test_requests_are_checked_without_torch_and_llguidance() -> None:
    code = (
        "import sys, engine.structured_outputs.params, engine.structured_outputs.compiler;"
        "assert not {'torch', 'llguidance', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=MODEL.parents[1])


# --- Texts have the form that was asked for -------------------------------------------------------------------------


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


def consumes(grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    return all(grammar.accept(token_id) for token_id in tokenizer.encode(text, add_special_tokens=False))


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


# --- One sequence's state -------------------------------------------------------------------------------------------


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
    compiler = GrammarCompiler(MODEL, VOCAB_SIZE, [letter])
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


# --- Invalid and hostile grammars -----------------------------------------------------------------------------------


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


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_ends_within_the_time_out_and_leaves_the_engine_alive(name: str) -> None:
    compiler = GrammarCompiler(MODEL, VOCAB_SIZE, EOS_TOKEN_IDS, timeout_s=2.0)
    compiler.load()
    compiler.compile(StructuredOutputsParams(regex="a"))  # starts the process that tries grammars out
    started = perf_counter()
    with contextlib.suppress(RequestError):
        assert allowed_tokens(compiler.compile(StructuredOutputsParams(**HOSTILE[name])))
    assert perf_counter() - started < 6.0  # the time-out, and the start of a new process on a busy machine
    assert not compiler.compile(StructuredOutputsParams(regex="b")).is_terminated
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
    compiler = GrammarCompiler(MODEL, VOCAB_SIZE, EOS_TOKEN_IDS)
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


# --- Masks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100, 3077])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [2], [3, 0], []])
def test_apply_bitmask_agrees_with_a_loop(dtype: torch.dtype, vocab_size: int, rows: list[int]) -> None:
    rng = np.random.default_rng(vocab_size + len(rows))
    words = rng.integers(-(2**31), 2**31, (len(rows), -(-vocab_size // 32)), dtype=np.int64).astype(np.int32)
    logits = torch.randn(4, vocab_size).to(dtype)
    expected = logits.clone()
    for row, bits in zip(rows, words.tolist(), strict=True):
        for token_id in range(vocab_size):
            if not bits[token_id // 32] >> (token_id % 32) & 1:
                expected[row, token_id] = -torch.inf
    apply_bitmask(logits, rows, torch.from_numpy(words))
    assert torch.equal(logits, expected)


def test_tokens_behind_the_tokenizer_are_never_allowed(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredOutputsParams(regex="(?s:.*)"))
    assert 3000 > len(allowed_tokens(grammar)) > 2900
    assert max(allowed_tokens(grammar)) < 3072


def test_the_builder_computes_what_fill_bitmask_does(compiler: GrammarCompiler) -> None:
    grammars = [compiler.compile(StructuredOutputsParams(regex=regex)) for regex in ("a+", "[0-9]{3}", "x|y")]
    builder = MaskBuilder()
    bitmask = builder.start(grammars).result()
    builder.close()
    assert torch.equal(bitmask, fill_bitmask(grammars))
    for grammar, row in zip(grammars, bitmask, strict=True):
        alone = np.empty_like(row.numpy())
        grammar.fill(alone)
        assert alone.tolist() == row.tolist()


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
