"""Answers of tensor-parallel engines, to be compared with those of one rank."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from engine.llm import LLM
from engine.sampling_params import SamplingParams

VOCAB_SIZE = 383  # divided by neither 2 nor 4
KV_HEADS = {"qwen3": 2, "qwen2": 4, "llama": 4, "mistral": 2, "qwen3_moe": 2, "qwen2_moe": 4, "mixtral": 2}
OPTIONS: dict[str, Any] = {
    "max_decode_slowdown": None,  # batches that depend on nothing that is measured: logits are compared row by row
    "dtype": "float32",
    "device": "cpu",
    "skip_tokenizer_init": True,
    "kv_cache_memory": "16MiB",
    "max_num_batched_tokens": 64,  # less than most prompts: they are computed in chunks
    "block_size": 16,
}


def make_prompts(vocab_size: int = VOCAB_SIZE, longest: int = 150) -> list[list[int]]:
    rng = random.Random(3)
    shared = [rng.randrange(3, vocab_size) for _ in range(70)]
    counts = (1, 2, 15, 16, 17, 63, 64, 65, longest)
    prompts = [[rng.randrange(3, vocab_size) for _ in range(count)] for count in counts]
    return prompts + [[*shared, token] for token in range(3, 9)] + [shared]


@dataclass
class Answers:
    token_ids: list[list[int]]
    logits: torch.Tensor
    num_cached_tokens: int


def answer(llm: LLM, prompts: list[list[int]] | None = None) -> Answers:
    """Answer prompts greedily, by default those of ``make_prompts``, and keep the logits that the tokens come from."""
    workers: Any = llm.engine.runner.workers  # type: ignore[attr-defined]
    execute, logits = workers.execute, []

    def keeping(*args: Any) -> torch.Tensor | None:
        result: torch.Tensor | None = execute(*args)
        if result is not None:
            logits.append(result.clone())  # the sampler may write to it
        return result

    workers.execute = keeping
    try:
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts or make_prompts()]
        outputs = llm.generate(inputs, SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True), use_tqdm=False)
    finally:
        del workers.execute
    token_ids = [output.outputs[0].token_ids for output in outputs]
    return Answers(token_ids, torch.cat(logits), sum(output.num_cached_tokens for output in outputs))


def check_equal(got: Answers, expected: Answers) -> None:
    error = (got.logits - expected.logits).abs().max() / expected.logits.abs().max()
    print(f"largest error of the logits, relative to the largest logit: {error:.1e}")
    assert got.token_ids == expected.token_ids
    assert error < 1e-5
    assert got.num_cached_tokens == expected.num_cached_tokens > 0
