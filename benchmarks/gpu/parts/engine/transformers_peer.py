"""The same requests with transformers: its continuous batching, and plain generate for a batch of equal lengths."""

from __future__ import annotations

import random
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks.gpu.engines import draw_lengths, generate, loaded, random_ids
from benchmarks.gpu.run.part_run import PartRun
from benchmarks.machine import release_memory, synchronize

__all__ = ["run"]

WAIT_S = 5.0  # for the next result; the thread that computes is looked at in between


def run(part: PartRun, model: str) -> None:
    """Record output tokens per second of Pagoda, then of transformers; a peer that fails is recorded and left out."""
    lengths = draw_lengths(part.sizes.peer, seed=0)
    rng = random.Random(0)
    vocab_size = part.sizes.models[model].vocab_size
    prompts = [random_ids(rng, prompt, vocab_size) for prompt, _ in lengths]
    outputs = [output for _, output in lengths]
    lines: list[str] = []

    def record(name: str, num_tokens: int, seconds: float) -> None:
        rate = num_tokens / seconds
        part.record(name, {"output_tokens_per_s": rate, "seconds": seconds})
        lines.append(f"{name:32} {rate:8.0f} output tokens/s")
        part.record("summary", lines)

    length, count = min(map(len, prompts)), min(outputs)
    equal = [prompt[:length] for prompt in prompts]
    with loaded(part, model) as llm:
        generate(llm, prompts[:2], [2, 2])
        record("Pagoda", sum(outputs), _seconds(part, lambda: generate(llm, prompts, outputs)))
        record(
            "Pagoda, equal lengths",
            len(equal) * count,
            _seconds(part, lambda: generate(llm, equal, [count] * len(equal))),
        )
    peer: Any = AutoModelForCausalLM.from_pretrained(
        part.work / model, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    peer = peer.to(part.device).eval()
    _generate(peer, equal, 2)
    record("transformers, generate", len(equal) * count, _seconds(part, lambda: _generate(peer, equal, count)))
    release_memory(part.device)
    try:
        record("transformers, continuous batching", sum(outputs), _continuous_batching_s(peer, prompts, outputs))
    except Exception as error:
        part.record("transformers, continuous batching", f"failed: {type(error).__name__}: {error}"[:500])


def _seconds(part: PartRun, run: Any) -> float:
    started = perf_counter()
    run()
    synchronize(part.device)
    return perf_counter() - started


def _generate(model: Any, prompts: list[list[int]], count: int) -> None:
    ids = torch.tensor(prompts, device=model.device)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
    )


def _continuous_batching_s(model: Any, prompts: list[list[int]], outputs: list[int]) -> float:
    """Return the seconds from the first request to the last result, without the warm-up and graph capture.

    Raises:
        RuntimeError: if requests fail or are lost.
    """
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=max(outputs))
    memory = {"max_memory_percent": 0.6} if model.device.type == "cuda" else {"num_blocks": 64, "max_batch_tokens": 256}
    config = ContinuousBatchingConfig(**memory)
    with model.continuous_batching_context_manager(
        generation, continuous_batching_config=config, timeout=30
    ) as manager:
        _answer(manager, prompts[:2], [2, 2])
        started = perf_counter()
        num_tokens = _answer(manager, prompts, outputs)
        seconds = perf_counter() - started
    if num_tokens != sum(outputs):
        raise RuntimeError(f"{num_tokens} tokens were generated instead of {sum(outputs)}")
    return seconds


def _answer(manager: Any, prompts: list[list[int]], outputs: list[int]) -> int:
    """Return how many tokens were generated for the prompts."""
    for prompt, count in zip(prompts, outputs, strict=True):
        manager.add_request(prompt, max_new_tokens=count, eos_token_id=-1)
    num_tokens, missing = 0, len(prompts)
    while missing:
        result = manager.get_result(timeout=WAIT_S)
        if result is None and not manager.is_running():
            raise RuntimeError("transformers' generation thread has ended")
        if result is not None and result.is_finished():
            if result.error:
                raise RuntimeError(result.error)
            num_tokens, missing = num_tokens + len(result.generated_tokens), missing - 1
    return num_tokens
