"""Beams and log-probabilities equal transformers' for every family, whatever the engine's blocks, pool and batch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.llm import LLM, RequestOutput
from engine.outputs import TokenLogprobs
from engine.sampling_params import SamplingParams
from tests.engine.conftest import SavedModel, families
from tests.engine.oracle import Activity, answers, make_llm, oracle_beams, random_tokens, raw_logprobs, run

TOLERANCE = 1e-4
PENALTIES = (1.0, 0.0, -1.0, 2.0, 0.5)
EARLY = (False, True, "never")
LENGTHS = (1, 5, 16, 23, 70)
POOL_TOKENS = 384  # the widest beams fit at full length even where they share nothing, but hardly anything beside them
# Between them every block size, with and without prefix caching, with each way to preempt and with both of them.
SETTINGS: list[dict[str, Any]] = [
    {"block_size": 1, "enable_prefix_caching": True, "swap_space_gib": 0.0001},  # 200 tokens: some are recomputed
    {"block_size": 1, "enable_prefix_caching": False, "swap_space_gib": 0.0},
    {"block_size": 4, "enable_prefix_caching": True, "swap_space_gib": 0.0},
    {"block_size": 4, "enable_prefix_caching": False, "swap_space_gib": 0.001},
    {"block_size": 16, "enable_prefix_caching": True, "swap_space_gib": 0.001},
    {"block_size": 16, "enable_prefix_caching": False, "swap_space_gib": 0.0},
]


def beam_requests(path: str) -> tuple[list[list[int]], list[SamplingParams], list[list[int]]]:
    """Prompts, parameters and stop ids; the stop ids occur in the greedy answers, so that beams do end early."""
    rng = random.Random(11)
    shared = random_tokens(rng, 16)
    cases = [(width, early) for width in range(1, 7) for early in EARLY if width > 1 or early != "never"]
    prompts = [random_tokens(rng, LENGTHS[i % (5 if width < 4 else 4)]) for i, (width, _) in enumerate(cases)]
    prompts[1::4] = [shared + prompt[:7] for prompt in prompts[1::4]]
    free = run(make_llm(path), prompts, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    params, stop_ids = [], []
    for index, ((width, early), output) in enumerate(zip(cases, free, strict=True)):
        greedy = output.outputs[0].token_ids
        stops = [[], [greedy[3]], [greedy[2], greedy[5]], [greedy[1], greedy[4]]][index % 4]
        stop_ids.append(list(dict.fromkeys(stops)))
        params.append(
            SamplingParams(
                beam_width=width,
                temperature=0.0,
                n=rng.randint(1, width),
                length_penalty=PENALTIES[index % len(PENALTIES)],
                early_stopping=early,
                max_tokens=rng.randint(12, 32),
                min_tokens=4 if index % 4 == 3 else 0,
                stop_token_ids=stop_ids[-1],
                ignore_eos=True,
            )
        )
    return prompts, params, stop_ids


@pytest.mark.parametrize("family", families("qwen3"), indirect=True)
def test_beams_equal_transformers_for_every_family(family: SavedModel) -> None:
    prompts, params, stop_ids = beam_requests(family.path)
    expected = [oracle_beams(family.model, *asked) for asked in zip(prompts, params, stop_ids, strict=True)]
    lengths = [len(tokens) for answer, _ in expected for tokens in answer]
    limits = [asked.max_tokens for asked, (answer, _) in zip(params, expected, strict=True) for _ in answer]
    num_early = sum(length < (limit or 0) for length, limit in zip(lengths, limits, strict=True))
    assert num_early > len(lengths) // 4, "hardly a beam ended early, so nothing was shown about that"
    rng = random.Random(5)
    others = [random_tokens(rng, 20) for _ in range(4)]
    others_params = [
        SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True),
        SamplingParams(temperature=0.8, max_tokens=100, ignore_eos=True, seed=3),
        SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True, seed=4, n=3),
        SamplingParams(temperature=0.0, max_tokens=20, logprobs=2, prompt_logprobs=1),
    ]
    others_alone = [
        answers(run(make_llm(family.path), [prompt], [asked]))[0]
        for prompt, asked in zip(others, others_params, strict=True)
    ]
    for options in SETTINGS:
        num_blocks = POOL_TOKENS // options["block_size"]
        llm = make_llm(family.path, **options, num_blocks=num_blocks, max_num_batched_tokens=64)
        did = Activity(llm)
        outputs = run(llm, others + prompts, others_params + params)
        print(options, did)
        for prompt, asked, output, (tokens, totals) in zip(
            prompts, params, outputs[len(others) :], expected, strict=True
        ):
            name = f"{options} {len(prompt)} tokens {asked}"
            assert [answer.token_ids for answer in output.outputs] == tokens, name
            assert [answer.cumulative_logprob for answer in output.outputs] == pytest.approx(totals, abs=TOLERANCE)
            for answer in output.outputs:
                ended = answer.token_ids[-1] in (asked.stop_token_ids or ())
                assert answer.finish_reason == ("stop" if ended else "length"), name
                assert answer.stop_reason == (answer.token_ids[-1] if ended else None), name
        assert answers(outputs[: len(others)]) == others_alone, options
        assert did.num_copies > 0 or options["block_size"] == 1  # blocks of one token are always full
        swaps = options["swap_space_gib"] > 0
        assert (did.num_swapped_out > 0, did.swapped_beams > 0, did.num_swapped_in > 0) == (swaps,) * 3, did
        assert swaps or did.recomputed_beams > 0, did


def test_beams_end_at_every_eos_id_of_the_checkpoint_but_not_before_min_tokens(family: SavedModel) -> None:
    """As above, but the ids come from the model, and a request adds one of its own."""
    rng = random.Random(23)
    prompt = random_tokens(rng, 12)
    llm = make_llm(family.path)
    free = run(llm, [prompt], SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True))[0].outputs[0].token_ids
    for early, min_tokens in ((False, 0), (True, 0), ("never", 6), (False, 6)):
        params = SamplingParams(
            beam_width=4,
            n=4,
            temperature=0.0,
            early_stopping=early,
            max_tokens=12,
            min_tokens=min_tokens,
            stop_token_ids=[free[2], free[4]],
        )
        output = run(llm, [prompt], params)[0]
        tokens, _ = oracle_beams(family.model, prompt, params, [2, free[2], free[4]])
        assert answers([output])[0] == tokens
        assert min(map(len, tokens)) > min_tokens


# --- log-probabilities ----------------------------------------------------------------------------------------------


def check_position(got: TokenLogprobs, expected: torch.Tensor, token_id: int, count: int) -> None:
    """Compare one position's entry, the token's own and the ``count`` most likely, with the oracle's logprobs."""
    ids = list(got)
    top = expected.topk(count)
    assert ids[0] == token_id
    assert ids == list(dict.fromkeys([token_id, *top.indices.tolist()]))
    for candidate, logprob in got.items():
        assert logprob.logprob == pytest.approx(float(expected[candidate]), abs=TOLERANCE)
        assert logprob.rank == int((expected > expected[candidate]).sum()) + 1


def check_logprobs(model: PreTrainedModel, output: RequestOutput, params: SamplingParams) -> None:
    prompt = output.prompt_token_ids
    for answer in output.outputs:
        rows = raw_logprobs(model, prompt + answer.token_ids)
        assert answer.logprobs is not None
        assert params.logprobs is not None
        generated = rows[len(prompt) - 1 : -1]
        for position, row, token_id in zip(answer.logprobs, generated, answer.token_ids, strict=True):
            check_position(position, row, token_id, params.logprobs)
        total = sum(float(row[token_id]) for row, token_id in zip(generated, answer.token_ids, strict=True))
        assert answer.cumulative_logprob == pytest.approx(total, abs=TOLERANCE)
    if params.prompt_logprobs is None:
        assert output.prompt_logprobs is None
        return
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    rows = raw_logprobs(model, prompt)[:-1]
    for position, row, token_id in zip(output.prompt_logprobs[1:], rows, prompt[1:], strict=True):
        assert position is not None
        check_position(position, row, token_id, params.prompt_logprobs)


LOGPROB_PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 20, "prompt_logprobs": 20},
    {"temperature": 0.0, "logprobs": 0, "prompt_logprobs": 0},
    {"temperature": 1.0, "seed": 1, "logprobs": 3, "prompt_logprobs": 2, "n": 3},
    {"temperature": 0.3, "seed": 2, "logprobs": 5},
    {"temperature": 2.0, "seed": 3, "logprobs": 1, "top_k": 5, "top_p": 0.7, "min_p": 0.01},
    {"temperature": 0.0, "logprobs": 4, "repetition_penalty": 3.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
    {"temperature": 0.9, "seed": 4, "logprobs": 2, "logit_bias": {5: 100.0}, "prompt_logprobs": 1},
    {"temperature": 0.9, "seed": 5, "logprobs": 2, "allowed_token_ids": [7, 8, 9], "bad_words_token_ids": ((9,),)},
]


@pytest.mark.parametrize("budget", [16, 2048])
def test_logprobs_equal_transformers_for_every_family(family: SavedModel, budget: int) -> None:
    """Of the model as it is: neither temperature nor penalties nor masks show in what is reported."""
    rng = random.Random(31)
    lengths = [1, 2, 15, 16, 17, 48, 61, 100]
    shared = random_tokens(rng, 32)
    prompts = [
        (shared + random_tokens(rng, count))[-count:] if count < 48 else shared + random_tokens(rng, count - 32)
        for count in lengths
    ]
    params = [SamplingParams(**fields, max_tokens=12, ignore_eos=True) for fields in LOGPROB_PARAMS]
    llm = make_llm(
        family.path, block_size=16, num_blocks=24, max_num_batched_tokens=budget, swap_space_gib=0.0001 * (budget > 16)
    )
    did = Activity(llm)
    cold = run(llm, prompts, params)
    warm = run(llm, prompts, params)
    assert answers(cold) == answers(warm)
    for output, asked in zip(cold + warm, params * 2, strict=True):
        check_logprobs(family.model, output, asked)
    for output, asked in zip(warm, params, strict=True):  # prompt logprobs need every prompt token computed
        has_block = len(output.prompt_token_ids) >= 16
        assert (output.num_cached_tokens > 0) == (has_block and asked.prompt_logprobs is None)
    assert did.num_copies > 0


def test_logprobs_survive_preemption(qwen3: SavedModel) -> None:
    """In the middle of a prompt whose logprobs are wanted too."""
    rng = random.Random(37)
    prompts = [random_tokens(rng, 60) for _ in range(8)]
    params = [
        SamplingParams(temperature=1.0, seed=seed, logprobs=2, prompt_logprobs=2, max_tokens=40, ignore_eos=True)
        for seed in range(8)
    ]
    for swap, caching in ((0.0, True), (0.0, False), (0.001, True)):
        llm = make_llm(
            qwen3.path,
            block_size=4,
            num_blocks=60,
            max_num_batched_tokens=16,
            swap_space_gib=swap,
            enable_prefix_caching=caching,
        )
        did = Activity(llm)
        outputs = run(llm, prompts, params)
        assert (did.num_swapped_out if swap else did.num_recomputed) > 0
        for output, asked in zip(outputs, params, strict=True):
            check_logprobs(qwen3.model, output, asked)


# --- several answers ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(qwen3: SavedModel) -> LLM:
    return make_llm(qwen3.path, kv_cache_memory="8MiB")


def mean_logprob(output: RequestOutput) -> float:
    answer = output.outputs[0]
    assert answer.cumulative_logprob is not None
    return answer.cumulative_logprob / len(answer.token_ids)


def test_answer_i_of_n_is_the_answer_of_seed_plus_i(llm: LLM) -> None:
    rng = random.Random(41)
    for length, options in ((3, {}), (21, {"top_p": 0.9}), (64, {"presence_penalty": 1.0})):
        prompt = random_tokens(rng, length)
        common: dict[str, Any] = {"temperature": 1.0, "max_tokens": 24, **options}
        did = Activity(llm)
        together = run(llm, [prompt], SamplingParams(n=5, seed=100, **common))[0]
        assert did.num_copies == (4 if length % 16 else 0)  # of the prompt's last block, by all but the last writer
        alone = run(llm, [prompt] * 5, [SamplingParams(seed=100 + i, **common) for i in range(5)])
        assert answers([together])[0] == [output.outputs[0].token_ids for output in alone]
        assert [output.finish_reason for output in together.outputs] == [
            output.outputs[0].finish_reason for output in alone
        ]
        assert len(set(map(tuple, answers([together])[0]))) > 1


def test_best_of_returns_the_answers_with_the_best_mean_logprob(llm: LLM) -> None:
    rng = random.Random(43)
    for n in (1, 2, 6):
        prompt = random_tokens(rng, 37)
        common: dict[str, Any] = {"temperature": 1.0, "max_tokens": 20}
        best = run(llm, [prompt], SamplingParams(n=n, best_of=6, seed=7, **common))[0]
        alone = run(llm, [prompt] * 6, [SamplingParams(seed=7 + i, logprobs=0, **common) for i in range(6)])
        if n < 6:  # else there is nothing to choose from
            alone.sort(key=mean_logprob, reverse=True)
        assert answers([best])[0] == [output.outputs[0].token_ids for output in alone[:n]]
        assert best.finished
        assert [output.index for output in best.outputs] == list(range(n))
