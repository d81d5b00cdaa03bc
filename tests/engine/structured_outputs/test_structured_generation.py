"""Structured outputs through the whole engine: every text has its form, and no neighbour notices."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.errors import RequestError
from engine.llm import LLM, RequestOutput
from engine.options.structured_outputs import StructuredOutputsParams
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.drafting.proposer import Proposer
from engine.structured_outputs import bitmask
from engine.structured_outputs.grammar import Grammar
from tests.engine.checkpoints import build_model, save_checkpoint
from tests.engine.oracle import Activity, check_idle, make_llm
from tests.engine.text.tokenizers import saved_kind

DEMO_MODEL = str(Path(__file__).parents[3] / "demo" / "model")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEX = r"[A-Z][a-z]{2,8} \d{3}-\d{4}"
CHOICES = ["red", "green", "blue green", "blue"]
GRAMMAR = 'start: NUM ("+" NUM){0,3}\nNUM: /[0-9]{1,4}/'
KINDS = {
    "json": StructuredOutputsParams(json=SCHEMA),
    "regex": StructuredOutputsParams(regex=REGEX),
    "choice": StructuredOutputsParams(choice=CHOICES),
    "grammar": StructuredOutputsParams(grammar=GRAMMAR),
    "json_object": StructuredOutputsParams(json_object=True),
}


def check_text(kind: str, text: str) -> None:
    if kind == "json":
        value = json.loads(text)
        assert list(value) == ["name", "age", "tags"]
        assert isinstance(value["name"], str)
        assert len(value["name"]) <= 12
        assert type(value["age"]) is int
        assert 0 <= value["age"] <= 120
        assert len(value["tags"]) <= 3
        assert set(value["tags"]) <= {"a", "b", "c"}
    elif kind == "json_object":
        assert isinstance(json.loads(text), dict)
    elif kind == "choice":
        assert text in CHOICES
    else:
        assert re.fullmatch(REGEX if kind == "regex" else r"\d{1,4}(\+\d{1,4}){0,3}", text), text


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm(DEMO_MODEL, skip_tokenizer_init=False, kv_cache_memory="32MiB")


def params_for(llm: LLM, kind: str, seed: int, **options: Any) -> SamplingParams:
    """At temperature 1 the demo model talks for ever where the form allows it: there it may only stammer."""
    assert llm.tokenizer is not None
    if kind == "json_object":
        ids = {piece: llm.tokenizer.encode(piece)[0] for piece in '{}[]":, 0123456789abc'}
        options["allowed_token_ids"] = [*ids.values(), *llm.engine.info.eos_token_ids]
        options["logit_bias"] = {ids['"']: 12.0, ids["}"]: 3.0, ids["]"]: 3.0}
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=200, structured_outputs=KINDS[kind], **options)


def mixed(llm: LLM, seeds: range, **options: Any) -> tuple[list[str], list[SamplingParams], list[str]]:
    """Constrained requests, with an unconstrained one after every second of them."""
    kinds, params, prompts = [], [], []
    for seed in seeds:
        for i, kind in enumerate(KINDS):
            kinds.append(kind)
            params.append(params_for(llm, kind, seed, **options))
            prompts.append(f"Write {kind} number {i}.")
            if (seed + i) % 2:
                kinds.append("free")
                params.append(SamplingParams(temperature=1.0, seed=seed, max_tokens=24, ignore_eos=True))
                prompts.append(f"How does number {i} work?")
    return kinds, params, prompts


def check_outputs(kinds: list[str], outputs: list[RequestOutput]) -> None:
    for kind, output in zip(kinds, outputs, strict=True):
        for answer in output.outputs:
            if kind != "free":
                assert (answer.finish_reason, answer.stop_reason) == ("stop", None), (kind, answer)
                check_text(kind, answer.text)


def texts(outputs: list[RequestOutput]) -> list[list[str]]:
    return [[answer.text for answer in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[str]]:
    """The answers to the mixed requests, each alone."""
    _, params, prompts = mixed(llm, range(6))
    return [
        texts(llm.generate(prompt, asked, use_tqdm=False))[0] for prompt, asked in zip(prompts, params, strict=True)
    ]


def test_every_form_in_a_mixed_batch_is_kept_and_no_neighbour_changed(llm: LLM, alone: list[list[str]]) -> None:
    kinds, params, prompts = mixed(llm, range(6))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    check_outputs(kinds, outputs)
    assert texts(outputs) == alone
    check_idle(llm)
    for kind in KINDS:
        assert len({answer[0] for answer, other in zip(alone, kinds, strict=True) if other == kind}) > 1


class Known(Proposer):
    """Proposes the tokens of an answer that is known."""

    def __init__(self, answer: Sequence[int]) -> None:
        self.answer = answer

    def propose(self, sequence: Any, limit: int) -> list[int]:
        return list(self.answer[sequence.num_output_tokens :][:limit])


def test_drafts_lead_no_answer_out_of_its_form(llm: LLM) -> None:
    """The model's own choice after a draft may be a token that the grammar excludes."""
    params = SamplingParams(temperature=0.0, max_tokens=24, structured_outputs=KINDS["regex"])
    [[expected]] = [output.outputs for output in llm.generate("Write a number.", params, use_tqdm=False)]
    speculation = {"method": "ngram", "num_speculative_tokens": 4}
    drafting = make_llm(DEMO_MODEL, skip_tokenizer_init=False, num_blocks=20, speculative_config=speculation)
    assert drafting.engine.scheduler.drafter is not None
    drafting.engine.scheduler.drafter.proposers = {"test": Known(expected.token_ids)}
    [[answer]] = [output.outputs for output in drafting.generate("Write a number.", params, use_tqdm=False)]
    assert answer.token_ids == expected.token_ids
    check_text("regex", answer.text)


@pytest.mark.parametrize("swap_space_gib", [0.0, 0.01])
def test_forms_survive_preemption(llm: LLM, alone: list[list[str]], swap_space_gib: float) -> None:
    kinds, params, prompts = mixed(llm, range(6))
    small = make_llm(DEMO_MODEL, skip_tokenizer_init=False, num_blocks=20, block_size=16, swap_space_gib=swap_space_gib)
    did = Activity(small)
    outputs = small.generate(prompts, params, use_tqdm=False)
    assert (did.num_swapped_out if swap_space_gib else did.num_recomputed) > 0
    check_outputs(kinds, outputs)
    assert texts(outputs) == alone
    check_idle(small)


def test_each_of_several_answers_has_a_grammar_of_its_own(llm: LLM) -> None:
    for kind in KINDS:
        together = llm.generate("Go on.", params_for(llm, kind, 50, n=3), use_tqdm=False)
        check_outputs([kind], together)
        apart = llm.generate(["Go on."] * 3, [params_for(llm, kind, 50 + i) for i in range(3)], use_tqdm=False)
        assert texts(together)[0] == [text for answer in texts(apart) for text in answer]
        best = llm.generate("Go on.", params_for(llm, kind, 50, n=1, best_of=3), use_tqdm=False)
        check_outputs([kind], best)
        assert texts(best)[0][0] in texts(together)[0]


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 3}, {"min_tokens": 150}])
def test_a_complete_text_ends_whatever_min_tokens_and_ignore_eos_say(llm: LLM, options: dict[str, Any]) -> None:
    """No other token could follow; at worst a text that may not end yet fails, with a reason."""
    for seed in range(3):
        for kind in ("regex", "choice", "grammar", "json"):
            output = llm.generate("Go on.", params_for(llm, kind, seed, **options), use_tqdm=False)[0].outputs[0]
            if output.finish_reason == "stop":
                check_text(kind, output.text)
            else:
                assert options.get("min_tokens"), output
                assert output.finish_reason == "abort"
                assert output.stop_reason
    check_idle(llm)


def test_an_answer_cut_off_says_length(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, structured_outputs=KINDS["json"])
    output = llm.generate("Go on.", params, use_tqdm=False)[0].outputs[0]
    assert (output.finish_reason, len(output.token_ids)) == ("length", 3)


def test_a_dead_end_ends_its_own_request_alone(llm: LLM) -> None:
    """The request itself forbids every token that its grammar allows: only this request ends with an error."""
    assert llm.tokenizer is not None
    free = SamplingParams(temperature=1.0, seed=4, max_tokens=20, ignore_eos=True)
    expected = texts(llm.generate("Tell me.", free, use_tqdm=False))[0]
    dead = SamplingParams(
        temperature=1.0,
        seed=1,
        max_tokens=20,
        structured_outputs=KINDS["choice"],
        allowed_token_ids=llm.tokenizer.encode("z"),
    )
    outputs = llm.generate(["Go on.", "Tell me.", "Go on."], [dead, free, params_for(llm, "json", 3)], use_tqdm=False)
    assert outputs[0].outputs[0].finish_reason == "abort"
    assert outputs[0].outputs[0].stop_reason
    assert outputs[0].outputs[0].token_ids == []
    assert texts(outputs)[1] == expected
    check_outputs(["json"], outputs[2:])
    check_idle(llm)


def test_a_grammar_error_is_rejected_and_harms_no_other_request(llm: LLM) -> None:
    engine = llm.engine
    rng = random.Random(1)
    prompt = [rng.randrange(3, 3000) for _ in range(20)]
    free = SamplingParams(temperature=1.0, seed=9, max_tokens=20, ignore_eos=True)
    expected = llm.generate([{"prompt_token_ids": prompt}], free, use_tqdm=False)[0].outputs[0].token_ids
    engine.add_request(EngineRequest("free", prompt, free))
    bad = [
        StructuredOutputsParams(regex="(unclosed"),
        StructuredOutputsParams(regex=r"(?=ahead)a"),
        StructuredOutputsParams(grammar="start: missing"),
        StructuredOutputsParams(json={"type": "nonsense"}),
    ]
    got = []
    while engine.has_unfinished:
        if bad:
            with pytest.raises(RequestError) as caught:
                engine.add_request(EngineRequest("bad", prompt, SamplingParams(structured_outputs=bad.pop())))
            assert caught.value.param == "structured_outputs"
        got += [token_id for output in engine.step() for token_id in output.token_ids]
    assert not bad
    assert got == expected
    check_idle(llm)


@pytest.mark.parametrize(("n", "best_of"), [(1, None), (2, None), (1, 2)])
def test_a_grammar_that_fails_in_the_middle_is_no_normal_stop(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, n: int, best_of: int | None
) -> None:
    accept, num_accepted = Grammar.accept, 0

    def accept_some(grammar: Grammar, token_id: int) -> bool:
        nonlocal num_accepted
        num_accepted += 1
        if num_accepted > 6 and grammar.error is None:
            grammar.error = "a limit of the automaton"
        return accept(grammar, token_id)

    monkeypatch.setattr(Grammar, "accept", accept_some)
    params = params_for(llm, "json", 3, n=n, best_of=best_of, logprobs=0)
    for answer in llm.generate("Write json.", params, use_tqdm=False)[0].outputs:
        assert (answer.finish_reason, answer.stop_reason) == ("abort", "a limit of the automaton")
        assert answer.logprobs is not None
        assert [next(iter(position)) for position in answer.logprobs] == answer.token_ids  # none for the token refused
        known = sum(next(iter(position.values())).logprob for position in answer.logprobs)
        assert answer.cumulative_logprob == pytest.approx(known)
    check_idle(llm)


def test_a_mask_that_cannot_be_computed_is_no_normal_stop(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    fill, num_steps = bitmask.fill_masks, 0

    def fill_some(grammars: list[Grammar], rows: Any) -> None:
        nonlocal num_steps
        num_steps += 1
        fill(grammars, rows)
        if num_steps > 4:
            grammars[0].error = "a limit of the automaton"
            rows[0] = grammars[0].vocabulary.eos_bits

    monkeypatch.setattr(bitmask, "fill_masks", fill_some)
    for options in ({}, {"min_tokens": 50}):  # EOS is drawn and refused, or nothing at all may be drawn
        num_steps = 0
        output = llm.generate("Write json.", params_for(llm, "json", 3, **options), use_tqdm=False)[0].outputs[0]
        assert (output.finish_reason, output.stop_reason) == ("abort", "a limit of the automaton")
        assert len(output.token_ids) == 4
    check_idle(llm)


def test_an_engine_that_is_closed_leaves_no_process_that_tries_grammars_out() -> None:
    llm = make_llm(DEMO_MODEL, skip_tokenizer_init=False, kv_cache_memory="8MiB")
    llm.engine.grammars.compile(params_for(llm, "regex", 0).structured_outputs)
    child = llm.engine.grammars._compiler._toolchain().probe._child
    assert child is not None
    llm.engine.close()
    assert child.poll() is not None


@pytest.mark.parametrize("kind", ["byte-level, added tokens", "byte-fallback, legacy", "byte-fallback, holes"])
def test_the_text_has_its_form_with_every_kind_of_tokenizer(tmp_path: Path, kind: str) -> None:
    """Characters of several tokens, and the spaces of SentencePiece; special tokens are shown or not."""
    path = Path(save_checkpoint(build_model("qwen3"), tmp_path))
    shutil.copytree(saved_kind(kind), path, dirs_exist_ok=True)
    llm = make_llm(str(path), skip_tokenizer_init=False, kv_cache_memory="4MiB")
    assert llm.tokenizer is not None
    value = {"é": "🙂🙂", "code": ["    the  <s>", "日本\n"]}
    forms = [{"choice": ["🙂🙂", "🙂日", " the keys", "é"]}, {"json": {"enum": [value]}}]
    params = [
        SamplingParams(
            temperature=1.0,
            seed=seed,
            max_tokens=100,
            structured_outputs=StructuredOutputsParams(**form),
            skip_special_tokens=skip,
            stop=stop,
            logprobs=0,
        )
        for form in forms
        for seed, (skip, stop) in enumerate([(True, None), (False, None), (False, ["no such text"])])
    ]
    outputs = llm.generate([{"prompt_token_ids": [1]}, "the keys"] * 3, params)
    for number, answer in enumerate(output.outputs[0] for output in outputs):
        assert answer.finish_reason == "stop"
        assert answer.text in forms[0]["choice"] if number < 3 else json.loads(answer.text) == value
        spelled = [llm.tokenizer.token_bytes(token_id) for token_id in answer.token_ids if token_id != 2]
        assert b"".join(spelled).decode() == answer.text
        names = [next(iter(position.values())).decoded_token for position in answer.logprobs or ()]
        assert names == [llm.tokenizer.token_bytes.name(token_id) for token_id in answer.token_ids]
