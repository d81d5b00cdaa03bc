"""The step in which a prompt arrives while others decode, with CUDA graphs and without, beside a step that decodes."""

from __future__ import annotations

import random
import statistics
from time import perf_counter

from benchmarks.gpu.engines import decoding, loaded, random_ids, timed_steps
from benchmarks.gpu.run.part_run import PartRun
from engine.engine import Engine
from engine.llm import LLM
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams

__all__ = ["run"]

REPEATS = 9


def run(part: PartRun, model: str) -> None:
    """Record the milliseconds from a prompt's arrival to its first token, and those of a step without it."""
    lines: list[str] = []
    most = max(streams for streams, _ in part.sizes.arrivals) + 1
    for name, enforce_eager in (("graphs", False), ("eager", True)):
        with loaded(part, model, max_num_seqs=most, enforce_eager=enforce_eager) as llm:
            for streams, prompt in part.sizes.arrivals:
                decode, first_token = _measure(part, llm, streams, prompt)
                figures = {"decode_milliseconds": 1e3 * decode, "first_token_milliseconds": 1e3 * first_token}
                part.record(f"{name}, {streams} streams, {prompt} tokens", figures)
                lines.append(
                    f"{name:7} {streams:4} streams decode in {1e3 * decode:6.2f} ms; "
                    f"{prompt:4} tokens of a prompt beside them take {1e3 * first_token:6.2f}"
                )
                part.record("summary", lines)


def _measure(part: PartRun, llm: LLM, streams: int, prompt: int) -> tuple[float, float]:
    """Return the seconds of a step that decodes, and those until a prompt's token."""
    steps = 4 * REPEATS + 20
    with decoding(llm, streams, part.sizes.decode_context, steps=steps, seed=prompt) as engine:
        decode, _ = timed_steps(part, engine, REPEATS)
        return decode, statistics.median(_first_token_s(engine, prompt, seed) for seed in range(REPEATS))


def _first_token_s(engine: Engine, prompt: int, seed: int) -> float:
    """Return the seconds from a new request to its only token, a step that began before not counted."""
    engine.step()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    name = f"arrival-{seed}"
    ids = random_ids(random.Random(seed), prompt, engine.info.vocab_size)
    started = perf_counter()
    engine.queue_request(EngineRequest(name, ids, params))
    while name not in {output.request_id for output in engine.step()}:
        pass
    return perf_counter() - started
