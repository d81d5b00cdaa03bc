"""nano-vllm's benchmark: prompts and answers of 100 to 1,024 tokens, all at once, with temperature 0.6.

https://github.com/GeeeekExplorer/nano-vllm/blob/main/bench.py, with prefix caching, as there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from time import perf_counter

from benchmarks.gpu.engines import draw_lengths, generate, loaded, random_ids
from benchmarks.gpu.run.part_run import PartRun
from benchmarks.gpu.timing.floors import Limits, decode_step, prefill
from benchmarks.limits.model_shape import ModelShape

__all__ = ["floor_s", "run"]

MAX_MODEL_LEN = 4096


def run(part: PartRun, model: str) -> None:
    """Record output tokens per second, without loading and a warm-up."""
    sizes, shape = part.sizes, part.sizes.models[model]
    lengths = draw_lengths(sizes.offline, seed=0)
    rng = random.Random(0)
    prompts = [random_ids(rng, prompt, min(10000, shape.vocab_size)) for prompt, _ in lengths]
    num_output_tokens = sum(output for _, output in lengths)
    max_model_len = min(MAX_MODEL_LEN, sizes.max_model_len)
    with loaded(part, model, max_num_seqs=len(prompts), max_model_len=max_model_len, enable_prefix_caching=True) as llm:
        generate(llm, [random_ids(rng, 8, shape.vocab_size)], [4], temperature=0.6)
        started = perf_counter()
        outputs = generate(llm, prompts, [output for _, output in lengths], temperature=0.6)
        seconds = perf_counter() - started
    generated = sum(len(item.outputs[0].token_ids) for item in outputs)
    if generated != num_output_tokens:
        part.fault(f"{generated} tokens were generated instead of {num_output_tokens}")
    floor = floor_s(shape, lengths, part.limits)
    part.record("requests", len(prompts))
    part.record("output_tokens", generated)
    part.record("seconds", seconds)
    part.record("floor_seconds", floor)
    part.record("output_tokens_per_s", generated / seconds)
    part.record("summary", [f"{generated / seconds:.0f} output tokens/s, {seconds:.1f} s, floor {floor:.1f}"])


def floor_s(shape: ModelShape, lengths: list[tuple[int, int]], limits: Limits) -> float:
    """Return the least time: all prompts, then one decode step for each further token, with all unfinished requests."""
    prefills = sum(prefill(shape, 1, prompt).flop for prompt, _ in lengths) / (limits.bf16_tflop_s * 1e12)
    return prefills + sum(
        decode_step(shape, batch, context).floor_s(limits) for batch, context in _decode_steps(lengths)
    )


def _decode_steps(lengths: list[tuple[int, int]]) -> Iterator[tuple[int, float]]:
    """Yield (sequences, mean context) of each decode step; the prefill has made the first tokens."""
    for generated in range(1, max(output for _, output in lengths)):
        contexts = [prompt + generated for prompt, output in lengths if output > generated]
        yield len(contexts), sum(contexts) / len(contexts)
