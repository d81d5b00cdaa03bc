"""The cost of metrics: throughput with all of them on and off, and their microseconds in a step.

    python -m benchmarks.telemetry --model DIR [--workload w16] [--repeats 3] [--out result.json]

One engine runs the workload in turn with nothing that keeps numbers, and with a recorder as a replica has it, and what
reads that recorder in threads beside the engine: the exporter to Ray's agent, and every five seconds a scrape of GET
/metrics.
``--part MODULE:CLASS`` adds more: it is made with the recorder and has ``start()`` and ``stop()``. The token ids of
each run are its own, so that no cache knows the prompts.

The microseconds are those of the calls that an engine's step makes, with sequences that decode on a model that computes
nothing.
"""

from __future__ import annotations

import argparse
import importlib
import pickle
import statistics
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch

from benchmarks.engine_options import add_engine_arguments, engine_options
from benchmarks.machine import describe
from benchmarks.peers import runner
from benchmarks.result_file import write_result
from benchmarks.workloads import Request, load
from deployments.observability.prometheus import render
from deployments.observability.recorder import Recorder
from engine.config import EngineConfig, EngineInfo
from engine.engine import Engine
from engine.errors import OverloadedError
from engine.observability.engine_metrics import EngineMetrics
from engine.observability.metrics import METRICS, MetricSink, NullSink
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput, StepTimes
from engine.sequence import Sequence, SequenceGroup
from engine.worker.runner import ComputedStep

__all__ = ["main"]

PARTS = ("deployments.observability.ray_exporter:RayExporter", "benchmarks.telemetry:Scraper")
SCRAPE_PERIOD_S = 5.0  # more often than Prometheus usually scrapes
NULL_SEQUENCES, NULL_STEPS, NULL_BLOCKS = 64, 2000, 5000


class Part(Protocol):
    """A component that reads the metrics while the engine runs."""

    def start(self) -> None:
        """Start reading."""

    def stop(self) -> None:
        """Stop reading."""


class Scraper:
    """The work of a scrape by Prometheus in a replica and in the ingress: the text of GET /metrics."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Start to scrape."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(SCRAPE_PERIOD_S):
            render({"replica": pickle.loads(pickle.dumps(self._recorder.snapshot()))}, {})


def find_part(name: str) -> Callable[[Recorder], Part]:
    """Return the class that ``module:name`` names.

    Raises:
        ValueError: if there is none.
    """
    module, _, attribute = name.partition(":")
    try:
        part_class: Callable[[Recorder], Part] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError):
        raise ValueError(f"--part {name!r} names no class; give, say, {PARTS[0]}") from None
    return part_class


# ---- throughput --------------------------------------------------------------------------------------------------


def replace_metrics(engine: Engine, metrics: EngineMetrics) -> None:
    """Replace the metrics of an idle engine."""
    observers = engine.observers.members
    observers[:] = [metrics if isinstance(observer, EngineMetrics) else observer for observer in observers]


@contextmanager
def telemetry(engine: Engine, parts: Iterable[Callable[[Recorder], Part]], *, is_on: bool) -> Iterator[None]:
    """Connect the metrics of an idle engine to a recorder that is read, or to no sink."""
    recorder = Recorder(METRICS)
    sink: MetricSink = recorder if is_on else NullSink()
    replace_metrics(engine, EngineMetrics(sink, engine.block_manager, engine.scheduler))
    with ExitStack() as stack:
        for make in parts if is_on else ():
            part = make(recorder)
            part.start()
            stack.callback(part.stop)
        yield


def generate(engine: Engine, requests: list[Request]) -> int:
    """Answer all requests; return the number of generated tokens."""
    for number, request in enumerate(requests):
        params = SamplingParams(temperature=0.0, max_tokens=request.out, ignore_eos=True)
        engine.add_request(EngineRequest(str(number), request.prompt, params))
    count = 0
    while engine.has_unfinished:
        count += sum(len(output.token_ids) for output in engine.step())
    return count


def throughput(
    engine: Engine, workload_name: str, repeats: int, parts: list[Callable[[Recorder], Part]]
) -> dict[str, Any]:
    """Run the workload with metrics off and on, alternating, and compare the medians."""
    workload = load(workload_name)
    rates: dict[bool, list[float]] = {False: [], True: []}
    generate(engine, workload.shifted(0).requests)  # warms up
    for number in range(2 * repeats):
        is_on = number % 4 in (1, 2)  # off on on off ...: a machine that becomes slower favours neither
        with telemetry(engine, parts, is_on=is_on):
            measured = runner.measure(lambda requests: generate(engine, requests), workload.shifted(1 + number))
        rates[is_on].append(measured["output_tokens_per_s"])
        print(f"  {'on ' if is_on else 'off'} {rates[is_on][-1]:8.1f} tok/s", flush=True)
    off, on = statistics.median(rates[False]), statistics.median(rates[True])
    return {
        "workload": workload.name,
        "output_tokens_per_s_off": rates[False],
        "output_tokens_per_s_on": rates[True],
        "median_off": off,
        "median_on": on,
        "on_by_off": round(on / off, 4),
    }


# ---- microseconds of a step --------------------------------------------------------------------------------------


class NullRunner:
    """A model runner that always returns the same token."""

    info = EngineInfo(
        model="null",
        block_size=256,
        num_blocks=NULL_BLOCKS,
        num_host_blocks=0,
        max_model_len=10**6,
        vocab_size=1000,
        dtype="none",
        device="cpu",
        attention_backend="none",
        eos_token_ids=(),
        default_sampling={},
    )

    def start(self, output: SchedulerOutput) -> ComputedStep:
        """Do what ``run`` does."""
        return ComputedStep(self.run(output, StepTimes()))

    def run(self, output: SchedulerOutput, times: StepTimes) -> SampledTokens:
        """Return a token for each sequence."""
        return SampledTokens([7] * len(output.sampling))

    @property
    def host_memory(self) -> None:
        """None: it has no memory."""

    @property
    def draft_model(self) -> None:
        """None: it drafts nothing."""

    def check_health(self) -> None:
        """Always healthy."""

    def close(self) -> None:
        """Nothing to release."""


class _TimedMetrics(EngineMetrics):
    """Adds up the time of the calls in a step."""

    seconds = 0.0

    def step_scheduled(self, output: SchedulerOutput) -> None:
        started = perf_counter()
        super().step_scheduled(output)
        self.seconds += perf_counter() - started

    def step_finished(self, output: SchedulerOutput, updated: Iterable[Sequence], times: StepTimes) -> None:
        started = perf_counter()
        super().step_finished(output, updated, times)
        self.seconds += perf_counter() - started

    def request_left(self, group: SequenceGroup, rejection: OverloadedError | None) -> None:
        started = perf_counter()
        super().request_left(group, rejection)
        self.seconds += perf_counter() - started


def step_microseconds(sink: MetricSink) -> float:
    """Return the microseconds that a step of ``NULL_SEQUENCES`` decodes spends on metrics."""
    engine = Engine(EngineConfig(model="null", max_num_seqs=NULL_SEQUENCES), NullRunner(), sink)
    timed = _TimedMetrics(sink, engine.block_manager, engine.scheduler)
    replace_metrics(engine, timed)
    for number in range(NULL_SEQUENCES):
        engine.add_request(
            EngineRequest(str(number), [number + 1] * 16, SamplingParams(max_tokens=10**5, temperature=0.0))
        )
    for _ in range(100):
        engine.step()
    timed.seconds = 0.0
    for _ in range(NULL_STEPS):
        engine.step()
    return round(1e6 * timed.seconds / NULL_STEPS, 1)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write JSON to ``--out``."""
    parser = argparse.ArgumentParser(description="The cost of metrics.")
    add_engine_arguments(parser)
    parser.add_argument("--workload", default="w16", help="a workload's name or a file")
    parser.add_argument("--repeats", type=int, default=3, help="runs with metrics, and as many without")
    parser.add_argument(
        "--part", action="append", default=[], metavar="MODULE:CLASS", help="further component that is turned on"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    names = [*PARTS, *options.part]
    try:
        chosen = engine_options(options)
        parts = [find_part(name) for name in names]
    except ValueError as error:
        parser.error(str(error))
    micros = {
        name: [step_microseconds(sink()) for _ in range(3)]
        for name, sink in {"no sink": NullSink, "recorder": Recorder}.items()
    }
    for name, values in micros.items():
        print(f"metrics of a step of {NULL_SEQUENCES} decodes, reported to {name}: {statistics.median(values):.1f} us")
    engine = Engine.from_config(EngineConfig.from_options(options.model, chosen))
    result = throughput(engine, options.workload, options.repeats, parts)
    engine.close()
    rates = f"off {result['median_off']:.1f}, on {result['median_on']:.1f} tok/s"
    print(f"{result['workload']}: {rates}, on by off {result['on_by_off']:.4f}")
    if options.out:
        document = {
            "machine": describe(torch.device("cpu")),
            "model": Path(options.model).name,
            "options": chosen,
            "on": names,
            "step_microseconds": micros,
            "throughput": result,
        }
        write_result(options.out, document)


if __name__ == "__main__":
    main()
