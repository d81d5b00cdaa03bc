"""Prefills of one model, beside the time to compute its linears and attention."""

from __future__ import annotations

import random
import statistics
from time import perf_counter

from benchmarks.gpu.engines import generate, has_cache, loaded, random_ids
from benchmarks.gpu.run.part_run import PartRun
from benchmarks.gpu.timing.floors import prefill

__all__ = ["run"]

REPEATS = 3


def run(part: PartRun, model: str, weights: str = "", kv_cache_dtype: str = "auto") -> None:
    """Record the time from prompts to their first tokens, with the linear layers' weights in some format."""
    sizes, limits, shape = part.sizes, part.limits, part.sizes.models[model]
    rng = random.Random(0)
    lines = []
    if not has_cache(part, kv_cache_dtype):
        return
    with loaded(part, f"{model}{weights}", kv_cache_dtype=kv_cache_dtype) as llm:
        part.record("attention_backend", llm.engine.info.attention_backend)
        for num_prompts, num_tokens in sizes.prefills:
            times = []
            for _ in range(1 + REPEATS):
                prompts = [random_ids(rng, num_tokens - 1, shape.vocab_size) for _ in range(num_prompts)]
                started = perf_counter()
                generate(llm, prompts, [1] * num_prompts)
                times.append(perf_counter() - started)
            seconds = statistics.median(times[1:])
            figures = prefill(shape, num_prompts, num_tokens, kv_cache_dtype).figures(seconds, limits)
            tokens_per_s = num_prompts * num_tokens / seconds
            part.record(f"{num_prompts} x {num_tokens}", figures | {"prompt_tokens_per_s": tokens_per_s})
            lines.append(
                f"{num_prompts:3} x {num_tokens:6}: {1e3 * seconds:8.1f} ms, floor "
                f"{figures['floor_milliseconds']:7.1f}, "
                f"{figures['share_of_limit']:4.0%}, {tokens_per_s:8.0f} tokens/s"
            )
            part.record("summary", lines)
