"""The tiers of the KV cache on a CPU: the first token of a long prompt from each of them, and what they cost decodes.

    python -m benchmarks.tiers --model build/qwen3-0.6b --tokens 2000 --out benchmarks/results/tiers.json

Prompts are computed, come from host memory after others have evicted them, and come from the disk in an engine that was
started again: once with the file in the system's page cache, once without. Decoding is measured three ways, in turns:
without tiers, with idle ones, and while a text is written to the disk; the processor's time of a step, of all threads,
beside its duration, which other programs make longer.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch

from benchmarks.machine import describe
from benchmarks.result_file import write_result
from deployments.cli.bench.prompts import VOCABULARY
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams

__all__ = ["main"]

Prompt = list[int]


def first_token(engine: Engine, prompt: Prompt) -> tuple[float, int]:
    """Return the seconds to a prompt's first token, and how many of its tokens were cached."""
    started = perf_counter()
    group = engine.add_request(EngineRequest("first", prompt, SamplingParams(temperature=0.0, max_tokens=1)))
    while engine.has_unfinished:
        if engine.step():
            break
    seconds = perf_counter() - started
    return seconds, group.sequences[0].num_cached_tokens


def settle(engine: Engine) -> float:
    """Let the engine write what it has to write; return the seconds."""
    started, tiers = perf_counter(), engine.tiers
    while tiers is not None and (tiers.is_saving or engine.has_unfinished):
        tiers.inbox.wait(0.001)
        if engine.can_step:
            engine.step()
    return perf_counter() - started


def forget_file(directory: Path) -> None:
    """Write the files of the disk cache out, and drop them from the system's page cache."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def first_tokens(new_engine: Callable[[], Engine], prompts: list[Prompt], directory: Path) -> dict[str, Any]:
    """Return the seconds to the first token of each prompt: computed, from the host, and from the disk.

    The KV cache holds one prompt, and host memory all of them.
    """
    engine = new_engine()
    first_token(engine, prompts[0][:64][::-1])  # warm
    results: dict[str, list[float]] = {"computed": [], "host": [], "disk": [], "disk, not in the page cache": []}
    written: list[float] = []
    cached: dict[str, list[int]] = {name: [] for name in results}

    def measure(name: str, prompt: Prompt) -> None:
        seconds, num_cached = first_token(engine, prompt)
        results[name].append(round(seconds, 4))
        cached[name].append(num_cached)

    for prompt in prompts:
        measure("computed", prompt)
        written.append(round(settle(engine), 4))
    for prompt in prompts:
        measure("host", prompt)
        settle(engine)
    for name in ("disk", "disk, not in the page cache"):
        engine.close()
        gc.collect()
        if name != "disk":
            forget_file(directory)
        engine = new_engine()
        first_token(engine, prompts[0][:64][::-1])  # warm: kernels, and the pages of the KV cache
        for prompt in prompts:
            measure(name, prompt)
            settle(engine)
    assert engine.tiers is not None
    rate = engine.tiers.meter.rate("disk")
    engine.close()
    medians = {name: statistics.median(seconds) for name, seconds in results.items()}
    return {
        "first_token_s": results,
        "cached_tokens": cached,
        "writing_s": written,
        "disk_mb_per_s": round(rate.bytes_per_s / 1e6),
        "share_of_computing": {name: round(median / medians["computed"], 4) for name, median in medians.items()},
    }


def step_seconds(
    engine: Engine, prompts: list[Prompt], num_tokens: int, text: Prompt | None = None
) -> list[tuple[float, float]]:
    """Return the seconds, and those of the processor, of each step that only decodes.

    If there is a ``text``, these are the steps while it is written to the disk.
    """
    if text is not None:
        first_token(engine, text)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add_request(EngineRequest(str(number), prompt, params))
    seconds: list[tuple[float, float]] = []
    while engine.scheduler.has_unfinished:
        decodes = bool(engine.scheduler.running) and not engine.scheduler.waiting
        started, started_cpu = perf_counter(), process_time()
        engine.step()
        if decodes and (text is None or (engine.tiers is not None and engine.tiers.is_saving)):
            seconds.append((perf_counter() - started, process_time() - started_cpu))
    settle(engine)
    return seconds


def decoding(engines: dict[str, Engine], num_rounds: int, num_tokens: int, text_tokens: int) -> dict[str, Any]:
    """Return the median step of a few streams with and without tiers, and while a text is written."""
    rng, results = random.Random(1), dict[str, list[tuple[float, float]]]()
    for number in range(num_rounds):
        prompts = [random_prompt(rng, 64) for _ in range(4)]
        order = list(engines.items())
        for name, engine in order if number % 2 else order[::-1]:
            results.setdefault(name, []).extend(step_seconds(engine, prompts, num_tokens))
        text = random_prompt(rng, text_tokens)
        results.setdefault("writing", []).extend(step_seconds(engines["idle"], prompts[::-1], num_tokens, text))
    return {
        name: {
            "steps": len(steps),
            "median_ms": round(1e3 * statistics.median(wall for wall, _ in steps), 3),
            "p90_ms": round(1e3 * statistics.quantiles((wall for wall, _ in steps), n=10)[-1], 3),
            "median_cpu_ms": round(1e3 * statistics.median(cpu for _, cpu in steps), 3),
        }
        for name, steps in results.items()
        if len(steps) > 1  # a tiny model's text is written within a step
    }


def random_prompt(rng: random.Random, num_tokens: int) -> Prompt:
    return [rng.randrange(*VOCABULARY) for _ in range(num_tokens)]


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the result, and write it to ``--out``."""
    parser = argparse.ArgumentParser(description="First tokens and decodes with the tiers of the KV cache.")
    parser.add_argument("--model", required=True, help="directory of a checkpoint")
    parser.add_argument("--tokens", type=int, default=2000, help="of a prompt")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4, help="of decoding")
    parser.add_argument("--answer-tokens", type=int, default=48)
    parser.add_argument("--directory", type=Path, help="of the disk cache; default: a temporary one")
    parser.add_argument("--out", type=Path)
    parsed = parser.parse_args(arguments)
    rng = random.Random(0)
    with tempfile.TemporaryDirectory(dir=parsed.directory) as directory:
        block_size = 16
        num_blocks = -(-parsed.tokens // block_size) + 40  # more than one prompt, less than two of the default length
        options: dict[str, Any] = {
            "block_size": block_size,
            "num_blocks": num_blocks,
            "max_model_len": num_blocks * block_size,
            "max_decode_slowdown": None,
            "skip_tokenizer_init": True,
            "use_tqdm_on_load": False,
        }
        tiers = {"swap_space_gib": 1.5, "disk_cache_path": directory, "disk_cache_gib": 4.0}

        def new_engine(with_tiers: bool = True) -> Engine:
            chosen = options | (tiers if with_tiers else {"swap_space_gib": 0.0})
            return Engine.from_config(EngineConfig.from_options(parsed.model, chosen))

        prompts = [random_prompt(rng, parsed.tokens) for _ in range(parsed.prompts)]
        first = first_tokens(new_engine, prompts, Path(directory))
        engines = {"off": new_engine(with_tiers=False), "idle": new_engine()}
        steps = decoding(engines, parsed.rounds, parsed.answer_tokens, parsed.tokens // 2)
        for engine in engines.values():
            engine.close()
    document = {
        "machine": describe(torch.device("cpu")),
        "load_average": [round(load, 1) for load in os.getloadavg()],  # others may have computed beside it
        "model": Path(parsed.model).name,
        "prompt_tokens": parsed.tokens,
        "options": options | {name: value for name, value in tiers.items() if name != "disk_cache_path"},
        **first,
        "decoding": steps,
    }
    print({name: document[name] for name in ("first_token_s", "share_of_computing", "disk_mb_per_s", "decoding")})
    if parsed.out:
        write_result(parsed.out, document)


if __name__ == "__main__":
    main()
