"""One workload with engine options switched on and off. A new option is one line of OPTIONS."""

from __future__ import annotations

import random
from time import perf_counter
from typing import Any

from benchmarks.gpu.backends import usable_backends
from benchmarks.gpu.engines import StepRecorder, draw_lengths, generate, loaded, random_ids
from benchmarks.gpu.run.part_run import PartRun
from engine.llm import LLM

__all__ = ["OPTIONS", "run"]

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no prefix caching": {"enable_prefix_caching": False},
    "no CUDA graphs": {"enforce_eager": True},
    "no overlap": {"async_scheduling": False},
    "batch_invariant": {"batch_invariant": True},
    "drafts of 4": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    "blocks of 256": {"block_size": 256},
    "2,048 tokens a step": {"max_num_batched_tokens": 2048},
}
DEFAULTS: dict[str, Any] = {"enable_prefix_caching": True, "max_num_seqs": 256}


def run(part: PartRun, model: str) -> None:
    """Record output tokens per second for each set of options, with requests that share half of their prompts."""
    lines = []
    backends = {f"attention_backend {item.name}": {"attention_backend": item.name} for item in usable_backends(part)}
    for name, options in (OPTIONS | (backends if len(backends) > 1 else {})).items():
        memory = {"kv_cache_memory": "16GiB"} if part.on_gpu else {}
        with loaded(part, model, **(DEFAULTS | memory | options)) as llm:
            figures = _measure(part, llm, model)
        part.record(name, figures)
        lines.append(f"{name:24} {figures['output_tokens_per_s']:8.0f} tokens/s, {figures['cached_tokens']} cached")
        part.record("summary", lines)


def _measure(part: PartRun, llm: LLM, model: str) -> dict[str, float]:
    rng = random.Random(0)
    lengths = draw_lengths(part.sizes.options, seed=0)
    vocab_size = part.sizes.models[model].vocab_size
    shared = random_ids(rng, min(prompt for prompt, _ in lengths) // 2, vocab_size)
    prompts = [shared + random_ids(rng, prompt - len(shared), vocab_size) for prompt, _ in lengths]
    generate(llm, [shared + random_ids(rng, 8, vocab_size)], [4])  # warms up, and fills the prefix cache
    recorder = StepRecorder()
    llm.engine.observers.members.append(recorder)
    started = perf_counter()
    outputs = generate(llm, prompts, [output for _, output in lengths])
    seconds = perf_counter() - started
    return {
        "output_tokens_per_s": sum(output for _, output in lengths) / seconds,
        "cached_tokens": sum(item.num_cached_tokens for item in outputs),
        "draft_tokens": recorder.num_draft_tokens,
        "accepted_draft_tokens": recorder.num_accepted_tokens,
        "steps": len(recorder.times),
    }
