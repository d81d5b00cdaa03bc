"""Decode steps of transformers' modules beside those of our own decoder, on the same checkpoint.

    python -m benchmarks.adapter --model DIR --streams 1 16 --steps 100 --out result.json

One process holds all engines and steps them in turn, so that other load on the machine affects all alike:

- ``transformers``: the modules of transformers, with our attention and the C kernels' linear layers;
- ``torch``: our own decoder on torch's operators, with the same attention as the others;
- ``C``: our own decoder in the C kernels.

*Ratio* is the median, over all rounds, of an engine's time over that of ``transformers`` in the same round: its speed
as a share of that engine's.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.engine_options import add_engine_arguments, engine_options
from benchmarks.machine import describe
from benchmarks.result_file import write_result
from deployments.cli.bench.prompts import VOCABULARY
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams

__all__ = ["decode_seconds", "load_engines", "main", "summarize"]

ADAPTER, TORCH, C = "transformers", "torch", "C"
PROMPT_TOKENS = 64
WARM_UP_STEPS = 5


def load_engines(model: str, options: dict[str, Any]) -> dict[str, Engine]:
    """Load the checkpoint once for each implementation."""

    def load(model_impl: str) -> Engine:
        return Engine.from_config(EngineConfig.from_options(model, options | {"model_impl": model_impl}))

    with patch("engine.models.decoder.loader.cpu_kernels_can_run", return_value=False):
        own_in_torch = load("pagoda")
    return {ADAPTER: load("transformers"), TORCH: own_in_torch, C: load("pagoda")}


def decode_seconds(engines: dict[str, Engine], num_streams: int, num_steps: int) -> dict[str, list[float]]:
    """Return the seconds of each engine's decode steps of ``num_streams`` sequences, taken in turn."""
    for name, engine in engines.items():
        _start(engine, f"{name}-{num_streams}", num_streams, WARM_UP_STEPS + num_steps + 2)
    names = list(engines)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for step in range(WARM_UP_STEPS + num_steps):
        shift = step % len(names)
        for name in names[shift:] + names[:shift]:
            started = perf_counter()
            outputs = engines[name].step()
            seconds[name].append(perf_counter() - started)
            assert len(outputs) == num_streams
    for engine in engines.values():
        while engine.has_unfinished:
            engine.step()
    return {name: times[WARM_UP_STEPS:] for name, times in seconds.items()}


def _start(engine: Engine, request_id: str, num_streams: int, num_tokens: int) -> None:
    """Add the requests and compute their prompts."""
    rng = random.Random(num_streams)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for index in range(num_streams):
        prompt = [rng.randrange(*VOCABULARY) for _ in range(PROMPT_TOKENS)]
        engine.add_request(EngineRequest(f"{request_id}-{index}", prompt, params))
    while not engine.step():
        pass


def summarize(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of each engine's steps, and its ratio."""
    return {
        name: {
            "step_median_ms": round(1e3 * statistics.median(times), 3),
            "ratio": round(statistics.median(a / b for a, b in zip(times, seconds[ADAPTER], strict=True)), 3),
        }
        for name, times in seconds.items()
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table, and write JSON to ``--out``."""
    parser = argparse.ArgumentParser(description="transformers' modules beside our own decoder.")
    add_engine_arguments(parser)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16], help="sequences of a step")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path)
    parsed = parser.parse_args(arguments)
    try:
        chosen = engine_options(parsed) | {"kv_cache_memory": "512MiB", "async_scheduling": False}
    except ValueError as error:
        parser.error(str(error))
    engines = load_engines(parsed.model, chosen)
    load_before = os.getloadavg()[0]
    results = {}
    print(f"{'streams':>8} {'engine':14} {'step ms, median':>16} {'ratio':>7}")
    for num_streams in parsed.streams:
        results[num_streams] = summarize(decode_seconds(engines, num_streams, parsed.steps))
        for name, figures in results[num_streams].items():
            print(f"{num_streams:8} {name:14} {figures['step_median_ms']:16.2f} {figures['ratio']:7.2f}", flush=True)
    for engine in engines.values():
        engine.close()
    if parsed.out:
        document = {"machine": describe(torch.device("cpu")), "load_average_before": round(load_before, 2)}
        document |= {"model": Path(parsed.model).name, "options": chosen, "steps": parsed.steps}
        document |= {"threads": torch.get_num_threads(), "by_streams": results}
        write_result(parsed.out, document)


if __name__ == "__main__":
    main()
