"""Where the time of a workload goes on a CPU: layers, logits, sampling and the rest, by the tokens of a step.

    python -m benchmarks.step_profile --model DIR w1 w16 wshare --out result.json

The offline LLM runs each workload once, with clocks around the C kernels' two calls of a step, the sampler, and the
step itself. The rest is scheduling, packing the batch, and updating the sequences.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import groupby
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

import engine.models.decoder.cpu_decoder as cpu_decoder
from benchmarks.engine_options import add_engine_arguments, engine_options
from benchmarks.machine import describe
from benchmarks.peers.runner import WARM_UP
from benchmarks.result_file import write_result
from benchmarks.throughput import load_engine
from benchmarks.workloads import load as load_workload
from engine.engine import Engine
from engine.sampling.pending import PendingTokens
from engine.sampling.sampler import Sampler
from engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput, StepTimes
from engine.worker.model_runner import ModelRunner
from kernels.cpu.step import all_layers, logits

__all__ = ["PARTS", "Step", "main", "recorded_steps", "summarize"]

PARTS = ("layers", "logits", "sampling", "rest")
GROUPS = (1, 4, 8, 12, 16, 32, 64)  # upper bounds of the groups of steps by tokens; larger steps are one more group


@dataclass(slots=True)
class Step:
    """Tokens that a step computed, and the seconds of its parts."""

    tokens: int = 0
    layers: float = 0.0
    logits: float = 0.0
    sampling: float = 0.0
    rest: float = 0.0


class _Recorder:
    """Records a Step for each engine step; its clocks wrap functions of the engine."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._now = Step()

    def clock(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its time added to a part."""

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = perf_counter()
            result = function(*args, **kwargs)
            setattr(self._now, part, getattr(self._now, part) + perf_counter() - started)
            return result

        return timed

    def run(self, runner: ModelRunner, output: SchedulerOutput, times: StepTimes) -> SampledTokens:
        """Replace ModelRunner.run."""
        self._now.tokens = output.num_tokens
        return _run(runner, output, times)

    def step(self, engine: Engine) -> Any:
        """Replace Engine.step."""
        self._now = step = Step()
        started = perf_counter()
        result = _step(engine)
        step.rest = perf_counter() - started - step.layers - step.logits - step.sampling
        if step.tokens:
            self.steps.append(step)
        return result


_run, _step = ModelRunner.run, Engine.step


@contextmanager
def recorded_steps() -> Iterator[list[Step]]:
    """Record each step that an engine of this process computes while the block runs; yields the growing list."""
    recorder = _Recorder()
    with (
        patch.object(cpu_decoder, "all_layers", recorder.clock("layers", all_layers)),
        patch.object(cpu_decoder, "logits", recorder.clock("logits", logits)),
        patch.object(Sampler, "start", recorder.clock("sampling", Sampler.start)),
        patch.object(PendingTokens, "finish", recorder.clock("sampling", PendingTokens.finish)),
        patch.object(
            ModelRunner, "run", lambda *args: recorder.run(*args)
        ),  # a function becomes a method, a bound method does not
        patch.object(Engine, "step", lambda engine: recorder.step(engine)),
    ):
        yield recorder.steps


def summarize(steps: list[Step]) -> list[dict[str, Any]]:
    """Return the median and sum of each part, for groups of steps by number of tokens, smallest first."""
    rows = []
    for group, members in groupby(sorted(steps, key=lambda step: step.tokens), key=_group):
        seconds: dict[str, list[float]] = {part: [] for part in PARTS}
        for step in members:
            for part in PARTS:
                seconds[part].append(getattr(step, part))
        rows.append(
            {"tokens": group, "steps": len(seconds["rest"])}
            | {f"{part}_ms": round(1e3 * statistics.median(many), 2) for part, many in seconds.items()}
            | {f"{part}_s": round(sum(many), 3) for part, many in seconds.items()}
        )
    return rows


def _group(step: Step) -> str:
    below = 1
    for most in GROUPS:
        if step.tokens <= most:
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
    """Measure, print a table for each workload, and write JSON to ``--out``."""
    parser = argparse.ArgumentParser(description="Where the time of a workload goes on a CPU.")
    parser.add_argument("workloads", nargs="+", help="names (w1, w16, wshare) or files")
    add_engine_arguments(parser)
    parser.add_argument("--out", type=Path)
    parsed = parser.parse_args(arguments)
    try:
        workloads = [load_workload(item) for item in parsed.workloads]
        options = engine_options(parsed) | {"device": "cpu"}
    except ValueError as error:
        parser.error(str(error))
    generate = load_engine(parsed.model, workloads, **options)
    with recorded_steps() as steps:
        generate(WARM_UP)
    if not steps or not all(step.layers and step.logits for step in steps):
        parser.error("only calls of the C kernels are timed: they need one rank, float32 or bfloat16, and a C compiler")
    results: list[dict[str, Any]] = []
    for index, workload in enumerate(workloads):
        with recorded_steps() as steps:
            started = perf_counter()
            generate(workload.shifted(index).requests)  # other ids each time, so that nothing is cached
            seconds = perf_counter() - started
        results.append({"workload": workload.name, "seconds": round(seconds, 3), "steps": summarize(steps)})
        _print(workload.name, seconds, results[-1]["steps"])
    if parsed.out:
        document = {"machine": describe(torch.device("cpu")), "model": Path(parsed.model).name, "options": options}
        write_result(parsed.out, document | {"results": results})


if __name__ == "__main__":
    main()
