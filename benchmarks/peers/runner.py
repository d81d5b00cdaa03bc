"""The common part of all runners: load, warm up, run workloads one after the other, print a JSON line for each.

A runner is a module with a function ``load(model, workloads)`` that returns a ``Generate``. It runs in its engine's own
virtual environment, so this module imports only the standard library.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.workloads import Request, Workload
from benchmarks.workloads import load as load_workload

__all__ = [
    "KV_CACHE_GIB",
    "MAX_MODEL_LEN",
    "MAX_NUM_BATCHED_TOKENS",
    "MAX_NUM_SEQS",
    "WARM_UP",
    "Generate",
    "Load",
    "main",
    "measure",
    "run_workloads",
]

Generate = Callable[[list[Request]], int]  # greedy, without EOS; returns the number of generated tokens
Load = Callable[[str, list[Workload]], Generate]

ROOT = Path(__file__).resolve().parents[2]
MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, KV_CACHE_GIB = 4096, 64, 2048, 4  # the same for every engine
WARM_UP = [Request([5, 6, 7], 4)]


def main(engine: str, load: Load) -> None:
    """Run from the command line: MODEL WORKLOAD [WORKLOAD ...]."""
    parser = argparse.ArgumentParser(description=f"Run workloads with {engine}; one JSON line for each.")
    parser.add_argument("model")
    parser.add_argument("workloads", nargs="+", help="names or files")
    options = parser.parse_args()
    workloads = [load_workload(workload) for workload in options.workloads]
    # Peers import packages with the names of ours ("kernels"); with -m, the checkout would come first.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]
    for result in run_workloads(engine, options.model, load, workloads):
        print(json.dumps(result), flush=True)


def run_workloads(engine: str, model: str, load: Load, workloads: list[Workload]) -> Iterator[dict[str, Any]]:
    """Load the model once and yield each workload's result.

    Nothing is reset in between, and prompts of different workloads begin with the same ids, because they are drawn with
    one seed. So the ids of the second workload are one higher than in its file, those of the third two higher;
    otherwise a prefix cache would serve them.
    """
    started = perf_counter()
    generate = load(model, workloads)
    load_s = perf_counter() - started
    generate(WARM_UP)
    for index, workload in enumerate(workloads):
        yield {"engine": engine, "load_s": round(load_s, 2)} | measure(generate, workload.shifted(index))


def measure(generate: Generate, workload: Workload) -> dict[str, Any]:
    """Run a workload and return its rates.

    Raises:
        RuntimeError: if the engine generated another number of tokens than requested.
    """
    started = perf_counter()
    output_tokens = generate(workload.requests)
    seconds = perf_counter() - started
    if output_tokens != workload.output_tokens:
        raise RuntimeError(
            f"{workload.name}: {output_tokens} tokens came and {workload.output_tokens} were asked for; the rates of "
            "engines could not be compared"
        )
    return {
        "workload": workload.name,
        "seconds": round(seconds, 3),
        "input_tokens": workload.input_tokens,
        "output_tokens": output_tokens,
        "output_tokens_per_s": round(output_tokens / seconds, 4),
        "total_tokens_per_s": round((workload.input_tokens + output_tokens) / seconds, 2),
    }
