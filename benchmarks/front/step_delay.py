"""How late an engine's steps start, without and with HTTP load on the event loop of its process.

    python -m benchmarks.front.step_delay [--step-ms 4] [--seconds 6] [--out result.json]

The engine computes nothing: a step waits, as for a GPU. `alone` steps 256 sequences in a process without an event loop,
`1 stream` and the full load (256 streams beside 64 clients that ask for one token) go through the real server. Client
and server share this machine, so the part of a delay in which another thread had the processor is given apart.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.front import IMPORT_PATH
from benchmarks.front.runner import DELAYS_FILE, STEP_MS, ComputeFreeEngine
from benchmarks.machine import describe
from benchmarks.result_file import write_result
from benchmarks.serving.load import LoadProcess
from benchmarks.serving.measures import MODEL_NAME
from benchmarks.serving.server import serve
from engine.config import EngineConfig
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams

__all__ = ["Delays", "delays_of", "main"]

STREAMS, WHOLE = 256, 64
STREAM_TOKENS = 64


@dataclass(frozen=True)
class Delays:
    """The delays of the steps of one load, in microseconds; ``waiting``: without the queue for a processor."""

    load: str
    steps: int
    mean: float
    p50: float
    p99: float
    largest: float
    waiting_mean: float
    waiting_p99: float


def delays_of(load: str, lines: Sequence[str]) -> Delays:
    """Return the figures of the lines that StepDelays has written.

    Raises:
        ValueError: if there are none.
    """
    if not lines:
        raise ValueError(f"the engine has recorded no step of '{load}'; run it for longer")
    pairs = [tuple(map(float, line.split())) for line in lines]
    delays = sorted(max(0.0, delay) for delay, _ in pairs)
    waiting = sorted(max(0.0, delay - queued) for delay, queued in pairs)
    return Delays(
        load,
        len(pairs),
        mean=round(sum(delays) / len(delays), 1),
        p50=_quantile(delays, 0.5),
        p99=_quantile(delays, 0.99),
        largest=delays[-1],
        waiting_mean=round(sum(waiting) / len(waiting), 1),
        waiting_p99=_quantile(waiting, 0.99),
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def alone(model: str, step_ms: float, seconds: float, path: Path) -> Delays:
    """Step STREAMS sequences in this process, which does nothing else."""
    os.environ |= {STEP_MS: str(step_ms), DELAYS_FILE: str(path)}
    options = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192}
    engine = ComputeFreeEngine.from_config(EngineConfig.from_options(model, options))
    for _ in range(max(1, round(seconds * 1e3 / step_ms / STREAM_TOKENS))):
        for number in range(STREAMS):
            params = SamplingParams(max_tokens=STREAM_TOKENS, ignore_eos=True)
            engine.add_request(EngineRequest(str(number), [300 + number % 1000], params))
        while engine.has_unfinished:
            engine.step()
    return delays_of(f"alone, {STREAMS} sequences", path.read_text(encoding="utf-8").splitlines())


def served(model: str, step_ms: float, seconds: float, path: Path) -> list[Delays]:
    """Measure a server with one stream, and with all clients."""

    def change(args: dict[str, Any]) -> None:
        args["model"], args["model_name"] = model, MODEL_NAME
        args["replicas"] |= {"num_engine_replicas": 1, "num_ingress_replicas": 1, "cpus_per_ingress": 0.1}
        args["engine"] = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192}

    environment = {STEP_MS: str(step_ms), DELAYS_FILE: str(path)}
    with serve(change, import_path=IMPORT_PATH, launcher="benchmarks.front.launch", environment=environment) as server:
        return [
            _measure(server.url, path, seconds, [(1, True)], "1 stream"),
            _measure(server.url, path, seconds, [(STREAMS, True), (WHOLE, False)], f"{STREAMS} streams, {WHOLE} whole"),
        ]


def _measure(url: str, path: Path, seconds: float, loads: Sequence[tuple[int, bool]], name: str) -> Delays:
    running = [
        LoadProcess(
            url,
            clients,
            model=MODEL_NAME,
            max_tokens=STREAM_TOKENS if streamed else 1,
            streamed=streamed,
            seconds=seconds,
        )
        for clients, streamed in loads
    ]
    for load in running:
        load.wait_until_measuring()
    start = path.stat().st_size
    for load in running:
        load.result()
    with path.open(encoding="utf-8") as file:
        file.seek(start)
        return delays_of(name, file.read().splitlines())


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the figures, and write JSON to ``--out``."""
    parser = argparse.ArgumentParser(description="How late an engine's steps start.")
    parser.add_argument("--model", default="demo/model", help="whose tokenizer is used")
    parser.add_argument("--step-ms", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each load, after two of warm-up")
    parser.add_argument("--out", type=Path)
    parsed = parser.parse_args(arguments)
    model = str(Path(parsed.model).resolve())
    with tempfile.TemporaryDirectory(prefix="pg-delay") as directory:
        measured = [alone(model, parsed.step_ms, parsed.seconds, Path(directory) / "alone")]
        measured += served(model, parsed.step_ms, parsed.seconds, Path(directory) / "served")
    print(f"{'microseconds':24} {'steps':>6} {'mean':>8} {'p50':>8} {'p99':>8} {'largest':>8}   without the queue")
    for item in measured:
        columns = " ".join(f"{value:8.0f}" for value in (item.mean, item.p50, item.p99, item.largest))
        print(f"{item.load:24} {item.steps:6} {columns}   mean {item.waiting_mean:6.0f}  p99 {item.waiting_p99:6.0f}")
    if parsed.out:
        document = {"machine": describe(torch.device("cpu")), "step_ms": parsed.step_ms}
        write_result(parsed.out, document | {"delays": [asdict(item) for item in measured]})


if __name__ == "__main__":
    main()
