"""With any parameters, a request is rejected with the parameter's name or ends, and disturbs no other request."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import RequestError
from engine.llm import LLM
from engine.options.thinking_budget import ThinkingBudget
from engine.outputs import EngineOutput
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.engine.async_streams import stream, wait_until_idle
from tests.engine.conftest import SavedModel
from tests.engine.oracle import Activity, answers, check_idle, make_llm, random_tokens, run
from tests.engine.tiny_tokenizers import VOCAB_SIZE
from tests.waiting import HANG_S

ALL_IDS = list(range(VOCAB_SIZE))
TINY = math.nextafter(0.0, 1.0)
REFERENCES: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 1},
    {"temperature": 1.0, "seed": 1, "top_p": 0.9, "presence_penalty": 1.0},
    {"temperature": 1.0, "seed": 2, "n": 3},
    {"temperature": 0.0, "beam_width": 3, "n": 2},
]


def token_ids(rng: random.Random, longest: int) -> list[int]:
    """Draw ids, a few of them outside the vocabulary."""
    highest = VOCAB_SIZE + (rng.random() < 0.05)
    return [rng.randrange(highest) for _ in range(rng.randint(1, longest))]


# Every field: values that are valid but odd, then what is refused.
FIELDS: dict[str, Callable[[random.Random], Any]] = {
    "n": lambda rng: rng.choice([1, 1, 2, 3, 8, 128, 0]),
    "best_of": lambda rng: rng.choice([None, 1, 2, 4, 128, 129]),
    "beam_width": lambda rng: rng.choice([None, None, 1, 2, 5, 64]),
    "length_penalty": lambda rng: rng.choice([1.0, 0.0, -10.0, 10.0, 11.0]),
    "early_stopping": lambda rng: rng.choice([False, True, "never", "soon"]),
    "temperature": lambda rng: rng.choice([0.0, 0.0, TINY, 1e-30, 1e-6, 0.5, 1.0, 2.0, math.nan]),
    "top_p": lambda rng: rng.choice([TINY, 1e-9, 0.5, 0.999999, 1.0, 0.0]),
    "top_k": lambda rng: rng.choice([-1, 0, 1, 2, 383, 384, 385, 10**30, -2]),
    "min_p": lambda rng: rng.choice([0.0, TINY, 0.5, 1.0, 1.1]),
    "presence_penalty": lambda rng: rng.choice([-2.0, 0.0, 2.0]),
    "frequency_penalty": lambda rng: rng.choice([-2.0, 0.0, 2.0]),
    "repetition_penalty": lambda rng: rng.choice([2.0**-10, 1.0, 1.5, 1024.0, 0.0]),
    "logit_bias": lambda rng: rng.choice(
        [None, {}, dict.fromkeys(ALL_IDS, 100.0), dict.fromkeys(ALL_IDS, -100), {i: rng.uniform(-100, 100) for i in
         token_ids(rng, 50)}, {str(VOCAB_SIZE - 1): 100}, {VOCAB_SIZE: 1.0}]
    ),
    "allowed_token_ids": lambda rng: rng.choice([None, [0], [VOCAB_SIZE - 1], [2], token_ids(rng, 9), ALL_IDS, []]),
    "bad_words_token_ids": lambda rng: rng.choice(
        [None, (), [[i] for i in range(256)], [[i, i] for i in range(256)], [token_ids(rng, 64) for _ in range(20)],
         [ALL_IDS[:64]] * 256]
    ),
    "bad_words": lambda rng: rng.choice([None, [], ["word"]]),
    "seed": lambda rng: rng.choice([None, 0, -1, -(2**63), 2**63 - 1, 2**63]),
    "max_tokens": lambda rng: rng.choice([1, 2, 5, 30, 30, 10**30, 0]),
    "min_tokens": lambda rng: rng.choice([0, 1, 5, 30, 10**29, -1]),
    "stop_token_ids": lambda rng: rng.choice([[], ALL_IDS, ALL_IDS[1:], ALL_IDS[6:], token_ids(rng, 30), [2, 2]]),
    "ignore_eos": lambda rng: rng.choice([True, False]),
    "logprobs": lambda rng: rng.choice([None, 0, 1, 20, 21, -2]),
    "prompt_logprobs": lambda rng: rng.choice([None, 0, 1, 20, -1]),
    "logprob_token_ids": lambda rng: rng.choice([None, None, [5], [5, 5, 0], [], ["a"]]),
    "stop": lambda rng: rng.choice([None, "x", ["x", "y"]]),
    "thinking_budget": lambda rng: rng.choice(
        [None, ThinkingBudget(0, 5), ThinkingBudget(3, 5, 6), ThinkingBudget(2, VOCAB_SIZE), ThinkingBudget(1, 2)]
    ),
}  # fmt: skip


def fuzzed(rng: random.Random) -> dict[str, Any]:
    """Draw few fields at a time: with more, nearly every request would be rejected."""
    names = rng.sample(list(FIELDS), rng.randint(1, 6))
    values = {"max_tokens": rng.randint(1, 30)} | {name: FIELDS[name](rng) for name in names}
    if values.get("beam_width") is not None and rng.random() < 0.9:
        kept = (
            "n",
            "beam_width",
            "length_penalty",
            "early_stopping",
            "max_tokens",
            "min_tokens",
            "stop_token_ids",
            "ignore_eos",
        )
        values = {name: value for name, value in values.items() if name in kept} | {"temperature": 0.0}
        values |= {name: FIELDS[name](rng) for name in rng.sample(kept, 3)}
    return values


def references(path: str) -> tuple[list[list[int]], list[SamplingParams], list[list[list[int]]]]:
    rng = random.Random(2)
    prompts = [random_tokens(rng, rng.randint(1, 30)) for _ in REFERENCES]
    params = [SamplingParams(max_tokens=40, ignore_eos=True, **reference) for reference in REFERENCES]
    return prompts, params, answers(run(make_llm(path), prompts, params))


class Collected:
    """Check a request's outputs one by one."""

    def __init__(self, count: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.reasons: list[str | None] = [None] * count
        self.is_done = False

    def push(self, output: EngineOutput) -> None:
        assert not self.is_done, "something came after the last output"
        assert self.reasons[output.index] is None, "something came after an answer's end"
        self.tokens[output.index] += output.token_ids
        self.reasons[output.index] = output.finish_reason
        self.is_done = output.is_last


MORE_SEEDS = [pytest.param(seed, marks=pytest.mark.exhaustive("more requests of the same kinds")) for seed in (2, 3)]


@pytest.mark.parametrize("seed", [1, pytest.param(0, marks=pytest.mark.long), *MORE_SEEDS])
def test_fuzzed_requests_end_or_are_rejected_and_harm_no_other(qwen3: SavedModel, seed: int) -> None:
    prompts, params, expected = references(qwen3.path)
    rng = random.Random(seed)
    llm = make_llm(
        qwen3.path,
        block_size=4,
        num_blocks=160,
        max_num_seqs=70,
        max_num_batched_tokens=100,
        swap_space_gib=0.0005 * (seed % 2),
        enable_prefix_caching=seed < 2,
    )
    engine, did = llm.engine, Activity(llm)
    collected: dict[str, Collected] = {}
    refused: dict[str | None, int] = {}
    for step in range(250):
        if step % 20 == 0:  # they decode all the time
            for i, (prompt, asked) in enumerate(zip(prompts, params, strict=True)):
                engine.add_request(EngineRequest(f"reference {step} {i}", prompt, asked))
                collected[f"reference {step} {i}"] = Collected(asked.n)
        try:
            asked = SamplingParams(**fuzzed(rng))
            engine.add_request(
                EngineRequest(
                    str(step), random_tokens(rng, rng.choice([1, 4, 20, 60])), asked, priority=rng.randint(-1, 1)
                )
            )
            collected[str(step)] = Collected(asked.n)
        except RequestError as error:
            refused[error.param] = refused.get(error.param, 0) + 1
        for output in engine.step():
            collected[output.request_id].push(output)
        if rng.random() < 0.05:
            victim = str(rng.randrange(250))
            if engine.abort(victim):
                del collected[victim]
    while engine.has_unfinished:
        for output in engine.step():
            collected[output.request_id].push(output)
    print(did, refused, sum(not request_id.startswith("ref") for request_id in collected))
    assert set(refused) <= {*FIELDS, "prompt"}, refused
    assert sum(refused.values()) < 150
    for request_id, asked in collected.items():
        assert asked.is_done, f"{request_id} never ended"
        if request_id.startswith("reference"):
            assert asked.tokens == expected[int(request_id.split()[2])], request_id
    check_idle(llm)


async def test_fuzzed_requests_of_the_async_engine_all_end(qwen3: SavedModel) -> None:
    prompts, params, expected = references(qwen3.path)
    rng = random.Random(99)
    config = EngineConfig(
        model=qwen3.path,
        dtype="float32",
        device="cpu",
        skip_tokenizer_init=True,
        block_size=4,
        num_blocks=160,
        max_num_seqs=70,
        swap_space_gib=0.0005,
        speculative_config={"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    )
    engine = AsyncEngine(Engine.from_config(config))

    async def ask(request_id: str, prompt: list[int], asked: SamplingParams) -> list[list[int]]:
        tokens: list[list[int]] = [[] for _ in range(asked.n)]
        async for batch in stream(engine, EngineRequest(request_id, prompt, asked)):
            tokens[batch.index] += batch.token_ids
        return tokens

    refused: set[str | None] = set()

    async def fuzz(request_id: str, values: dict[str, Any], prompt: list[int]) -> None:
        try:
            await ask(request_id, prompt, SamplingParams(**values))
        except RequestError as error:
            refused.add(error.param)

    async with asyncio.timeout(HANG_S):
        fuzzing = [fuzz(str(i), fuzzed(rng), random_tokens(rng, rng.randint(1, 40))) for i in range(200)]
        asking = [ask(f"reference {i}", *arguments) for i, arguments in enumerate(zip(prompts, params, strict=True))]
        results = await asyncio.gather(*fuzzing[:100], *asking, *fuzzing[100:])
        assert results[100 : 100 + len(asking)] == expected
    assert refused < {*FIELDS, "prompt"}
    await wait_until_idle(engine)
    engine.check_health()
    await engine.shutdown()


@pytest.fixture(scope="module")
def llm(qwen3: SavedModel) -> LLM:
    return make_llm(qwen3.path, kv_cache_memory="8MiB")


NOTHING_LEFT: dict[str, dict[str, Any]] = {
    "every id ends the text but may not yet": {"stop_token_ids": ALL_IDS, "min_tokens": 3},
    "the same with beams": {"stop_token_ids": ALL_IDS, "min_tokens": 3, "beam_width": 3, "temperature": 0.0, "n": 2},
    "the one allowed word is bad": {"allowed_token_ids": [5], "bad_words_token_ids": ((5,),)},
    "for every one of n": {"allowed_token_ids": [5, 6], "bad_words_token_ids": ((5, 6), (5, 5), (6,)), "n": 3},
    "and of best_of": {"allowed_token_ids": [5], "bad_words_token_ids": ((5,),), "best_of": 3},
}


@pytest.mark.parametrize("name", NOTHING_LEFT)
def test_a_request_that_forbids_every_token_ends_by_itself(llm: LLM, name: str) -> None:
    free = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    expected = answers(run(llm, [[5, 6, 7]], free))
    params = SamplingParams(max_tokens=10, **NOTHING_LEFT[name])
    outputs = run(llm, [[8, 9], [5, 6, 7]], [params, free])
    assert outputs[0].finished
    for answer in outputs[0].outputs:
        assert answer.finish_reason == "abort"
        assert answer.stop_reason is not None
        assert "no token can be sampled" in str(answer.stop_reason)
    assert answers(outputs[1:]) == expected
    run(llm, [[8, 9]], params)  # alone, too


def test_a_search_that_finds_too_few_answers_says_so(llm: LLM) -> None:
    """Only token 0 may come before the limit, so that there is one text for three answers."""
    params = SamplingParams(
        beam_width=4, n=3, temperature=0.0, max_tokens=3, min_tokens=3, stop_token_ids=ALL_IDS[1:], ignore_eos=True
    )
    output = run(llm, [[8, 9]], params)[0]
    assert output.finished
    assert answers([output])[0] == [[0, 0, 0], [], []]
    assert [completion.finish_reason for completion in output.outputs] == ["length", "abort", "abort"]
    assert "no further answer" in str(output.outputs[1].stop_reason)


async def test_beams_without_a_token_to_go_on_with_do_not_end_the_step_loop(qwen3: SavedModel) -> None:
    config = EngineConfig(model=qwen3.path, dtype="float32", device="cpu", skip_tokenizer_init=True, num_blocks=40)
    engine = AsyncEngine(Engine.from_config(config))
    params = SamplingParams(**NOTHING_LEFT["the same with beams"], max_tokens=10)
    async with asyncio.timeout(HANG_S):
        batches = [batch async for batch in stream(engine, EngineRequest("a", [5, 6], params))]
    assert [(batch.index, batch.finish_reason) for batch in batches] == [(0, "abort"), (1, "abort")]
    engine.check_health()
    await engine.shutdown()


def test_a_nan_in_one_beam_ends_its_search_and_nothing_else(llm: LLM) -> None:
    """A broken kernel could produce it. The hypotheses that the search has found before are still returned."""
    free = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    beams = SamplingParams(temperature=0.0, max_tokens=10, beam_width=4, n=4, ignore_eos=True, length_penalty=0.0)
    expected = answers(run(llm, [[5, 6, 7]], free))
    early = run(llm, [[8, 9]], beams)[0].outputs[1].token_ids[1]
    workers: Any = llm.engine.runner.workers  # type: ignore[attr-defined]
    execute, num_steps = workers.execute, 0

    def poisoned(*args: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        logits = execute(*args)
        if num_steps == 6:
            logits[2] = math.nan
        return logits

    workers.execute = poisoned
    try:
        outputs = run(llm, [[8, 9], [5, 6, 7]], [replace(beams, stop_token_ids=[early], early_stopping="never"), free])
    finally:
        del workers.execute
    ended = outputs[0].outputs
    assert outputs[0].finished
    with_tokens = [output for output in ended if output.token_ids]
    assert [output.finish_reason for output in ended] == ["stop"] * len(with_tokens) + ["abort"] * (
        4 - len(with_tokens)
    )
    assert 0 < len(with_tokens) < 4
    assert "NaN" in str(ended[-1].stop_reason)
    assert answers(outputs[1:]) == expected


def test_many_stop_ids_do_not_multiply_the_work_of_many_beams(llm: LLM) -> None:
    """A wide search with many stop ids once looked at (1 + ids) * beams tokens of each beam, and held up the batch."""
    sampler: Any = llm.engine.runner.sampler  # type: ignore[attr-defined]
    params = SamplingParams(beam_width=8, temperature=0.0, max_tokens=4, ignore_eos=True, stop_token_ids=ALL_IDS[:100])
    llm.engine.add_request(EngineRequest("a", [5, 6], params))
    while llm.engine.has_unfinished:
        llm.engine.step()
        assert set(sampler._batch.num_beam_tokens) == {108}


def test_beams_that_become_few_and_many_again_find_their_slots(qwen3: SavedModel) -> None:
    """With two tokens to choose from, one beam becomes 2, 4, 8: other requests must not have taken their slots."""
    llm = make_llm(qwen3.path, max_num_seqs=12, max_num_batched_tokens=12)
    did = Activity(llm)  # checks before each step how many run
    beams = SamplingParams(
        beam_width=8, n=8, temperature=0.0, max_tokens=6, min_tokens=6, stop_token_ids=ALL_IDS[2:], ignore_eos=True
    )
    free = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompts = [[5, 6, 7]] + [[8, i] for i in range(20)]
    expected = answers(run(make_llm(qwen3.path), prompts, [beams] + [free] * 20))
    assert answers(run(llm, prompts, [beams] + [free] * 20)) == expected
    assert len(set(map(tuple, expected[0]))) == 8
    assert did.num_copies > 0
