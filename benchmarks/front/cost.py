"""The cost of a token and of a request in each process, around an engine that computes nothing.

    python -m benchmarks.front.cost --out result.json [--py-spy PATH]

Two loads for each number of clients: streams of 64 tokens, and whole answers of one token. The engine's step waits for
4 ms, as for a GPU, or not at all. Client and server share this machine; the client's CPU time is given apart.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.front import IMPORT_PATH
from benchmarks.front.hot_spots import Profile, profile
from benchmarks.front.processes import ENGINE, INGRESS, KINDS, CpuTimes
from benchmarks.front.runner import STEP_MS, STEPS_FILE
from benchmarks.machine import describe
from benchmarks.result_file import write_result
from benchmarks.serving.load import LoadProcess, LoadResult
from benchmarks.serving.measures import MODEL_NAME
from benchmarks.serving.server import Server, serve

__all__ = ["Cost", "cost_of", "main"]

STREAM_TOKENS, WHOLE_TOKENS = 64, 1
PROFILED_CLIENTS, PROFILE_S = 64, 10.0
CLIENT = "client"
RELOAD_S = 3.0  # HAProxy closes idle connections when it reloads the list of ingresses


@dataclass(frozen=True)
class Cost:
    """One load on one server."""

    step_ms: float
    ingresses: int
    load: LoadResult
    us: dict[str, float]  # microseconds of CPU by process, for a token of a stream or for a whole answer
    step_us: float  # of the engine's, what its steps take: to schedule, and to update what was sampled
    cores: dict[str, float]  # busy in each process

    @property
    def rate(self) -> float:
        """Tokens of streams, or whole answers, per second."""
        return self.load.tokens_per_s if self.load.streamed else self.load.requests_per_s


def cost_of(load: LoadResult, cpu_s: Mapping[str, float], step_s: float, *, step_ms: float, ingresses: int) -> Cost:
    """Divide the CPU seconds of the measured time by its tokens, or by its whole answers.

    Args:
        load: what the clients saw.
        cpu_s: seconds by process.
        step_s: of the engine's, those of its steps.
        step_ms: how long the steps waited.
        ingresses: number of ingress replicas.
    """
    rate = load.tokens_per_s if load.streamed else load.requests_per_s
    count = max(1.0, rate * load.seconds)
    cpu_s = dict(cpu_s) | {CLIENT: load.client_cpu_s}
    return Cost(
        step_ms,
        ingresses,
        load,
        us={kind: round(1e6 * seconds / count, 1) for kind, seconds in cpu_s.items()},
        step_us=round(1e6 * step_s / count, 1),
        cores={kind: round(seconds / load.seconds, 3) for kind, seconds in cpu_s.items()},
    )


class FrontServer:
    """A running server around an engine that computes nothing, and its processes."""

    def __init__(self, server: Server, steps_file: Path, step_ms: float, ingresses: int) -> None:
        self.url = server.url
        self.cpu = CpuTimes(server.process.pid)
        self._steps_file = steps_file
        self._step_ms, self._ingresses = step_ms, ingresses

    def measure(self, clients: int, seconds: float, *, streamed: bool) -> Cost:
        """Run a load and divide what the processes used by what it brought."""
        load = self._load(clients, seconds, streamed=streamed)
        load.wait_until_measuring()
        before, steps = self.cpu.read(), self._step_cpu_s()
        result = load.result()
        after, steps = self.cpu.read(), self._step_cpu_s() - steps
        cpu_s = {kind: after[kind] - before[kind] for kind in KINDS}
        return cost_of(result, cpu_s, steps, step_ms=self._step_ms, ingresses=self._ingresses)

    def profile(self, py_spy: str, cost: Cost, kind: str = INGRESS) -> Profile:
        """Run a load again with a profiler beside it; its microseconds are those of ``cost``, by the samples."""
        load = self._load(cost.load.clients, PROFILE_S + 2.0, streamed=cost.load.streamed)
        load.wait_until_measuring()
        sampled = profile(py_spy, self.cpu.pids(kind)[0], PROFILE_S, cost.us[kind])
        load.result()
        return sampled

    def _load(self, clients: int, seconds: float, *, streamed: bool) -> LoadProcess:
        max_tokens = STREAM_TOKENS if streamed else WHOLE_TOKENS
        return LoadProcess(
            self.url, clients, model=MODEL_NAME, max_tokens=max_tokens, streamed=streamed, seconds=seconds
        )

    def _step_cpu_s(self) -> float:
        return float(self._steps_file.read_text(encoding="utf-8")) if self._steps_file.exists() else 0.0


@contextmanager
def front_server(model: str, step_ms: float, ingresses: int) -> Iterator[FrontServer]:
    """Run the shipped configuration with one engine that computes nothing, and room for 1,024 sequences."""

    def change(args: dict[str, Any]) -> None:
        args["model"], args["model_name"] = str(Path(model).resolve()), MODEL_NAME
        args["replicas"] |= {"num_engine_replicas": 1, "num_ingress_replicas": ingresses, "cpus_per_ingress": 0.1}
        args["engine"] = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192}

    with tempfile.TemporaryDirectory(prefix="pg-front") as directory:
        steps_file = Path(directory) / "steps"
        environment = {STEP_MS: str(step_ms), STEPS_FILE: str(steps_file)}
        with serve(
            change, import_path=IMPORT_PATH, launcher="benchmarks.front.launch", environment=environment
        ) as server:
            while len(CpuTimes(server.process.pid).pids(INGRESS)) < ingresses:
                time.sleep(RELOAD_S)
            time.sleep(RELOAD_S)
            yield FrontServer(server, steps_file, step_ms, ingresses)


def _print_head() -> None:
    print(f"{'':43} CPU us for a token of a stream, or for a whole answer of one token")
    columns = " ".join(f"{name:>8}" for name in (INGRESS, ENGINE, "its step", "haproxy", "others", CLIENT))
    print(
        f"{'step ms':>7} {'ingresses':>9} {'load':>12} {'rate/s':>9}   {columns} {'TTFT ms':>8} {'p99':>7} {'cores':>5}"
    )


def _print(cost: Cost) -> None:
    load, us = cost.load, cost.us
    columns = (us[INGRESS], us[ENGINE], cost.step_us, us["haproxy"], us["others"], us[CLIENT])
    name = f"{load.clients} {'streams' if load.streamed else 'whole'}"
    microseconds = " ".join(f"{column:8.1f}" for column in columns)
    print(
        f"{cost.step_ms:7} {cost.ingresses:9} {name:>12} {cost.rate:9.0f}   {microseconds}"
        f" {load.ttft_p50_ms:8.1f} {load.ttft_p99_ms:7.1f} {sum(cost.cores.values()):5.2f}"
        + (f"  {load.failed} failed" if load.failed else ""),
        flush=True,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="The cost of a token and of a request, without a model.")
    parser.add_argument("--model", default="demo/model", help="whose tokenizer is used")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64, 256, 512])
    parser.add_argument("--ingresses", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--step-ms", type=float, nargs="+", default=[4.0, 0.0])
    parser.add_argument("--seconds", type=float, default=6.0, help="of each load, after two of warm-up")
    parser.add_argument("--py-spy", metavar="PATH", help="profile the ingress at 64 clients with this program")
    parser.add_argument("--out", type=Path)
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the figures, and write JSON to ``--out``."""
    parsed = _parser().parse_args(arguments)
    costs: list[Cost] = []
    profiles: list[dict[str, Any]] = []
    _print_head()
    for step_ms in parsed.step_ms:
        for ingresses in parsed.ingresses:
            with front_server(parsed.model, step_ms, ingresses) as server:
                for streamed in (True, False):
                    for clients in parsed.clients:
                        costs.append(server.measure(clients, parsed.seconds, streamed=streamed))
                        _print(costs[-1])
                        if parsed.py_spy and clients == PROFILED_CLIENTS and ingresses == 1:
                            sampled = server.profile(parsed.py_spy, costs[-1])
                            print(sampled.table())
                            profiles.append({"step_ms": step_ms, "streamed": streamed} | asdict(sampled))
    if parsed.out:
        document = {"machine": describe(torch.device("cpu")), "costs": [asdict(cost) for cost in costs]}
        write_result(parsed.out, document | {"profiles": profiles})


if __name__ == "__main__":
    main()
