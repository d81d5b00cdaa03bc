"""Where the time of a workload goes on a CPU: layers, logits, sampling and the rest, by the tokens of a step.

    python -m benchmarks.step_profile --model DIR w16 wshare --out result.json

The offline LLM runs each workload once, with clocks around the C kernels' two calls of a step, the sampler, and the
step itself. The rest is scheduling, packing the batch, and what becomes of its tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import engine.models.cpu_decoder as cpu_decoder
from benchmarks.engine_options import add_engine_arguments, engine_options
from benchmarks.machine import describe
from benchmarks.peers.runner import WARM_UP
from benchmarks.throughput import load_engine
from benchmarks.workloads import load as load_workload
from engine.engine import Engine
from engine.model_runner import ModelRunner
from engine.sampler import Sampler
from engine.step import SchedulerOutput

__all__ = ["main", "recorded_steps", "summarize"]

PARTS = ("layers", "logits", "sampling", "rest")
GROUPS = (1, 4, 8, 12, 16)  # steps of at most so many tokens are told together; larger ones are told as prefills

Step = dict[str, float]  # tokens, and the seconds of each part


@contextmanager
def recorded_steps() -> Iterator[list[Step]]:
    """Record each step that an engine of this process computes while the block runs; yields the growing list."""
    steps: list[Step] = []
    now: Step = {}
    originals: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, make(getattr(owner, name)))

    def clock(part: str) -> Callable[[Any], Any]:
        def make(function: Any) -> Any:
            def timed(*args: Any, **kwargs: Any) -> Any:
                started = perf_counter()
                result = function(*args, **kwargs)
                now[part] = now.get(part, 0.0) + perf_counter() - started
                return result

            return timed

        return make

    def count_tokens(run: Any) -> Any:
        def counted(self: ModelRunner, output: SchedulerOutput, *args: Any) -> Any:
            now["tokens"] = output.num_tokens
            return run(self, output, *args)

        return counted

    def keep(step: Any) -> Any:
        def kept(self: Engine) -> Any:
            now.clear()
            started = perf_counter()
            result = step(self)
            if "tokens" in now:
                parts = {part: now.get(part, 0.0) for part in PARTS[:-1]}
                steps.append(parts | {"tokens": now["tokens"], "rest": perf_counter() - started - sum(parts.values())})
            return result

        return kept

    replace(cpu_decoder, "all_layers", clock("layers"))
    replace(cpu_decoder, "logits", clock("logits"))
    replace(Sampler, "sample", clock("sampling"))
    replace(ModelRunner, "run", count_tokens)
    replace(Engine, "step", keep)
    try:
        yield steps
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def summarize(steps: list[Step]) -> list[dict[str, Any]]:
    """Return what steps of about as many tokens took, smallest first: the median and the sum of each part."""
    rows = []
    for group, members in groupby(sorted(steps, key=lambda step: step["tokens"]), key=_group):
        of_group = list(members)
        rows.append(
            {"tokens": group, "steps": len(of_group)}
            | {f"{part}_ms": round(1e3 * statistics.median(step[part] for step in of_group), 2) for part in PARTS}
            | {f"{part}_s": round(sum(step[part] for step in of_group), 3) for part in PARTS}
        )
    return rows


def _group(step: Step) -> str:
    below = 1
    for most in GROUPS:
        if step["tokens"] <= most:
            return str(most) if most == below else f"{below}-{most}"
        below = most + 1
    return f"over {GROUPS[-1]}"


def _print(name: str, seconds: float, rows: list[dict[str, Any]]) -> None:
    columns = [(part, unit) for unit in ("ms", "s") for part in PARTS]  # the medians, then the sums
    print(f"\n{name}: {seconds:.2f} s\n{'tokens':>8} {'steps':>6}" + "".join(f"{f'{p}, {u}':>13}" for p, u in columns))
    for row in rows:
        figures = (f"{row[f'{part}_{unit}']:13.{1 if unit == 'ms' else 2}f}" for part, unit in columns)
        print(f"{row['tokens']:>8} {row['steps']:6}" + "".join(figures))


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table for each workload, and keep the figures."""
    parser = argparse.ArgumentParser(description="Where the time of a workload goes on a CPU.")
    parser.add_argument("workloads", nargs="+", help="names (w1, w16, wshare) or files")
    add_engine_arguments(parser)
    parser.add_argument("--out", type=Path)
    parsed = parser.parse_args(arguments)
    workloads = [load_workload(one) for one in parsed.workloads]
    options = engine_options(parsed)
    generate = load_engine(parsed.model, workloads, **options)
    generate(WARM_UP)
    results = []
    for place, workload in enumerate(workloads):
        with recorded_steps() as steps:
            started = perf_counter()
            generate(workload.shifted(place).requests)  # other ids each time, so that nothing is cached
            seconds = perf_counter() - started
        results.append({"workload": workload.name, "seconds": round(seconds, 3), "steps": summarize(steps)})
        _print(workload.name, seconds, results[-1]["steps"])
    if parsed.out:
        document = {"machine": describe(torch.device("cpu")), "model": Path(parsed.model).name, "options": options}
        parsed.out.write_text(json.dumps(document | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
