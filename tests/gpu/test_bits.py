"""Bits of the log-probabilities with ``batch_invariant``: a replayed graph's are an eager step's, and any batch's."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.llm import LLM
from engine.sampling_params import SamplingParams
from tests.gpu_rehearsal.scenarios import DEMO_MODEL, OPTIONS, VOCAB_SIZE

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=20)
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True, logprobs=20)


def prompts(count: int) -> list[dict[str, list[int]]]:
    rng = random.Random(count)
    return [
        {"prompt_token_ids": [rng.randrange(10, VOCAB_SIZE) for _ in range(rng.randint(1, 90))]} for _ in range(count)
    ]


def bits(llm: LLM, asked: list[dict[str, list[int]]], params: SamplingParams) -> list[Any]:
    """Return each answer's tokens, and the log-probabilities as they are."""
    return [
        [{token: item.logprob for token, item in at.items()} for at in output.outputs[0].logprobs or ()]
        for output in llm.generate(asked, params, use_tqdm=False)  # type: ignore[arg-type]
    ]


def load(**options: Any) -> LLM:
    return LLM(DEMO_MODEL, **{**OPTIONS, "device": "cuda", "enable_prefix_caching": False, **options})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_graph_computes_what_an_eager_step_does(dtype: str) -> None:
    """Bit for bit where padding does not choose another kernel for products, which it does with cuBLAS."""
    asked = prompts(13)
    graphs, eager = (load(dtype=dtype, batch_invariant=True, enforce_eager=is_eager) for is_eager in (False, True))
    for params in (GREEDY, DRAWN):
        assert bits(graphs, asked, params) == bits(eager, asked, params)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_answer_is_the_same_in_any_batch(dtype: str) -> None:
    llm = load(dtype=dtype, batch_invariant=True)
    asked = prompts(13)
    for params in (GREEDY, DRAWN):
        together = bits(llm, asked, params)
        assert [bits(llm, [prompt], params)[0] for prompt in asked[:4]] == together[:4]


def test_answers_repeat() -> None:
    llm = load(dtype="bfloat16")
    asked = prompts(16)
    assert bits(llm, asked, DRAWN) == bits(llm, asked, DRAWN)
