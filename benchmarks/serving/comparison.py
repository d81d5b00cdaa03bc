"""Our server beside vLLM's on one machine, alternating: streams of 64 tokens, and whole answers of one token."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engine_options import parse_option
from benchmarks.serving.load import LoadResult, measure
from benchmarks.serving.measures import MODEL_NAME
from benchmarks.serving.server import serve
from benchmarks.serving.vllm_server import vllm_server

__all__ = ["LOADS", "Load", "compare_servers", "contestants", "summarize", "table"]

OURS = "pagoda"
FIGURES = ("tokens_per_s", "requests_per_s", "ttft_p50_ms", "ttft_p99_ms")


@dataclass(frozen=True)
class Load:
    """A number of clients that keep one request each running."""

    clients: int
    max_tokens: int = 64
    streamed: bool = True

    @property
    def name(self) -> str:
        """In tables and in JSON."""
        return f"{self.clients} {'streams' if self.streamed else 'whole'}"


LOADS = (Load(1), Load(8), Load(32), Load(64), Load(64, max_tokens=1, streamed=False))

Run = Callable[[], AbstractContextManager[str]]  # a server while a block runs; yields its URL


@contextmanager
def our_server(model: str, options: dict[str, Any]) -> Iterator[str]:
    """Run the shipped configuration with one engine."""

    def change(args: dict[str, Any]) -> None:
        args["model"], args["model_name"] = str(Path(model).resolve()), MODEL_NAME
        args["replicas"] |= {"num_engine_replicas": 1}
        args["engine"] = options

    with serve(change) as server:
        yield server.url


def contestants(model: str, peers: list[str], options: dict[str, Any]) -> dict[str, Run]:
    """Return what to run for us and for each ``vllm=PYTHON`` or ``ours:KEY=VALUE`` of ``peers``.

    The latter is our own server with another option of the engine.

    Args:
        model: directory of a checkpoint that all read.
        peers: as given to ``--peer``.
        options: of our engine; peers get its ``max_num_seqs`` and ``max_model_len``.

    Raises:
        ValueError: for another peer than vllm.
    """
    runs: dict[str, Run] = {OURS: partial(our_server, model, options)}
    sizes = {key: options[key] for key in ("max_num_seqs", "max_model_len")}
    for text in peers:
        if text.startswith("ours:"):
            runs[text] = partial(our_server, model, options | parse_option(text.removeprefix("ours:")))
            continue
        name, _, python = text.partition("=")
        if name != "vllm" or not python:
            raise ValueError(f"--peer {text!r} is not vllm=PYTHON or ours:KEY=VALUE; no other server is known")
        runs[name] = partial(vllm_server, python, str(Path(model).resolve()), **sizes)
    return runs


def compare_servers(
    runs: dict[str, Run], repeats: int, seconds: float, loads: tuple[Load, ...] = LOADS
) -> dict[str, dict[str, list[LoadResult]]]:
    """Run one server after the other, ``repeats`` times, and return the results by load and server."""
    results: dict[str, dict[str, list[LoadResult]]] = {load.name: {name: [] for name in runs} for load in loads}
    for repeat in range(repeats):
        for name, run in runs.items():
            with run() as url:
                for load in loads:
                    result = measure(
                        url,
                        load.clients,
                        model=MODEL_NAME,
                        max_tokens=load.max_tokens,
                        streamed=load.streamed,
                        seconds=seconds,
                    )
                    results[load.name][name].append(result)
                    print(f"run {repeat + 1} of {repeats}, {name}, {load.name}: {_shown(asdict(result))}", flush=True)
    return results


def summarize(results: dict[str, dict[str, list[LoadResult]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the medians of the repeats, and how our rate relates to each server's."""
    summary: dict[str, dict[str, dict[str, float]]] = {}
    for load, servers in results.items():
        medians = {
            name: {figure: statistics.median(getattr(measured, figure) for measured in many) for figure in FIGURES}
            for name, many in servers.items()
        }
        for median in medians.values():
            median["ours_over_this"] = round(medians[OURS]["tokens_per_s"] / median["tokens_per_s"], 3)
        summary[load] = medians
    return summary


def table(summary: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return the summary as text, a line for each load and server."""
    lines = [f"{'load':12} {'server':8} {'tokens/s':>9} {'answers/s':>9} {'TTFT ms':>8} {'p99':>8} {'ours/it':>8}"]
    for load, servers in summary.items():
        for name, row in servers.items():
            lines.append(
                f"{load:12} {name:8} {row['tokens_per_s']:9.0f} {row['requests_per_s']:9.1f} "
                f"{row['ttft_p50_ms']:8.1f} {row['ttft_p99_ms']:8.1f} {row['ours_over_this']:8.2f}"
            )
    return "\n".join(lines)


def _shown(row: dict[str, Any]) -> str:
    return (
        f"{row['tokens_per_s']:.0f} tokens/s, first token p50 {row['ttft_p50_ms']:.1f} p99 {row['ttft_p99_ms']:.1f} ms"
    )
