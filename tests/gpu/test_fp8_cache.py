"""Keys and values in FP8 on a GPU, by teacher forcing: a CPU whose cache is rounded alike judges each token.

Both compute in float32, with sums in other orders. A key that is between two numbers of FP8 may then become the one
here and the other there, which changes log-probabilities by a part of what all rounding changes: on a CPU, keys that
differ by 1e-5 of themselves before they are rounded change them by a tenth of it, and by 0.05 at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.llm import LLM
from engine.sampling_params import SamplingParams
from tests.gpu_rehearsal.rounded_cache import KEY_SCALE, VALUE_SCALE, forced_logprobs, rounded, texts, with_scales
from tests.gpu_rehearsal.scenarios import DEMO_MODEL, OPTIONS

MOST = 0.25  # of the change by rounding, as a root mean square
MOST_SHORT = 0.2  # of a greedy token's log-probability, below that of the most likely token
CPU: dict[str, Any] = {**OPTIONS, "device": "cpu"}
GPU: dict[str, Any] = {**OPTIONS, "device": "cuda", "kv_cache_dtype": "fp8"}
WAYS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "one step at a time": {"async_scheduling": False},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}},
    "swapped": {"num_blocks": 60, "block_size": 4, "swap_space_gib": 0.01, "max_num_seqs": 8},
}


def rms(numbers: torch.Tensor) -> float:
    return float(numbers.square().mean().sqrt())


@contextmanager
def judge(path: str = DEMO_MODEL, *scales: float) -> Iterator[LLM]:
    """Load a model on the CPU, whose cache is rounded inside the ``with``."""
    with pytest.MonkeyPatch.context() as patch, rounded(patch, *scales):
        yield LLM(path, **CPU)


@pytest.mark.parametrize("step_tokens", [128, 7, 1])  # with 1, each token of a prompt is a decode
def test_log_probabilities_are_those_of_a_rounded_cache(step_tokens: int) -> None:
    llm = LLM(DEMO_MODEL, **GPU | {"max_num_batched_tokens": step_tokens, "max_num_seqs": 4})
    got = forced_logprobs(llm, texts())
    with judge() as on_cpu:
        expected = forced_logprobs(on_cpu, texts())
    exact = forced_logprobs(LLM(DEMO_MODEL, **GPU | {"kv_cache_dtype": "auto"}), texts())
    assert rms(got - expected) < MOST * rms(exact - expected)


def test_the_checkpoints_scales(tmp_path: Path) -> None:
    path = with_scales(tmp_path)
    got, exact = (forced_logprobs(LLM(path, **GPU | {"kv_cache_dtype": dtype}), texts()) for dtype in ("fp8", "auto"))
    with judge(path, KEY_SCALE, VALUE_SCALE) as on_cpu:
        expected = forced_logprobs(on_cpu, texts())
    assert rms(got - expected) < MOST * rms(exact - expected)


@pytest.mark.parametrize("way", WAYS)
def test_greedy_tokens_are_the_most_likely_ones(way: str) -> None:
    llm = LLM(DEMO_MODEL, **GPU | WAYS[way])
    greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    prompts = [ids[:40] for ids in texts()]
    for _ in range(2):  # the second time much comes from the prefix cache
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy, use_tqdm=False)
        answers = [prompt + output.outputs[0].token_ids for prompt, output in zip(prompts, outputs, strict=True)]
        assert max(_shortfalls(answers, prompts)) < MOST_SHORT


def _shortfalls(answers: list[list[int]], prompts: list[list[int]]) -> list[float]:
    """Return how far each answer's token is below the most likely one."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    with judge() as on_cpu:
        outputs = on_cpu.generate([{"prompt_token_ids": ids} for ids in answers], params, use_tqdm=False)
    shortfalls = []
    for output, answer, prompt in zip(outputs, answers, prompts, strict=True):
        for token, item in list(zip(answer, output.prompt_logprobs or (), strict=True))[len(prompt) :]:
            assert item is not None
            shortfalls.append(max(entry.logprob for entry in item.values()) - item[token].logprob)
    return shortfalls
