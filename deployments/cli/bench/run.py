"""`pagoda bench`: from options to the report."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from deployments.cli.bench.http import HttpTarget, Outcome
from deployments.cli.bench.load import Run, run_load
from deployments.cli.bench.plot import write_plot
from deployments.cli.bench.report import Slo, figures, table
from deployments.cli.bench.workload import Workload
from deployments.cli.client import ServerClient
from deployments.cli.console import open_console
from engine.errors import ConfigError

__all__ = ["Options", "bench"]

CLIENTS = 16  # without rate, arrival times and --concurrency
FAILED, INTERRUPTED = 1, 130
REFRESH_PER_S = 2.0  # of the bar; each costs a millisecond


@dataclass(frozen=True, slots=True)
class Options:
    """How a run is made and reported.

    Attributes:
        url: of the server.
        key: API key.
        model: named in the requests; empty: the server's.
        concurrency: clients.
        rate: sessions a second.
        seed: of arrivals at a rate.
        timeout_s: of a request.
        slo: limits of a good answer.
        out: JSON file.
        plot: SVG file.
        described: what the requests are, for the JSON.
    """

    url: str
    key: str | None
    model: str
    concurrency: int | None
    rate: float | None
    seed: int
    timeout_s: float
    slo: Slo
    out: Path | None
    plot: Path | None
    described: dict[str, Any]


def bench(workload: Workload, options: Options) -> int:
    """Run the load, print the figures and write the files; return the exit code.

    Args:
        workload: to send.
        options: of the run.

    Raises:
        ServerError: no server answers.
        ConfigError: a file cannot be written.
    """
    if options.rate is not None and options.concurrency is not None:
        raise ConfigError("--rate and --concurrency exclude each other; give one of them")
    client = ServerClient(options.url, options.key)
    model = options.model or client.get("/v1/models").json()["data"][0]["id"]
    console, progress = open_console(), open_console(to_stderr=True)
    run = _run(workload, model, options, progress)
    result = figures(run, options.slo)
    _print(console, result)
    document = {"url": client.url, "model": model, "workload": options.described, **_load(options), **result}
    if options.out is not None:
        _write(options.out, document)
    if options.plot is not None:
        write_plot(options.plot, run, f"{model}: {result['output_tokens_per_s']:.1f} tokens/s")
    if run.was_interrupted:
        return INTERRUPTED
    return FAILED if result["errors"] else 0


def _load(options: Options) -> dict[str, Any]:
    return {"concurrency": options.concurrency, "rate": options.rate, "seed": options.seed}


def _run(workload: Workload, model: str, options: Options, console: Console) -> Run:
    columns = (TextColumn("{task.description}"), BarColumn(40), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(
        *columns, console=console, refresh_per_second=REFRESH_PER_S, disable=not console.is_terminal, transient=True
    )
    task = bar.add_task("requests", total=workload.num_requests)

    def count(outcome: Outcome) -> None:
        bar.advance(task)

    has_schedule = workload.has_times or options.rate is not None
    clients = options.concurrency or (None if has_schedule else CLIENTS)

    async def run() -> Run:
        target = HttpTarget(options.url, options.key, options.timeout_s)
        load = asyncio.ensure_future(
            run_load(
                target,
                workload.sessions,
                model,
                concurrency=clients,
                rate=options.rate,
                seed=options.seed,
                on_outcome=count,
            )
        )
        with _cancelling(load.cancel):
            return await load

    with bar:
        return asyncio.run(run())


@contextmanager
def _cancelling(cancel: Callable[[], object]) -> Iterator[None]:
    """Call a function at Ctrl-C while the block runs: what has been measured until then is reported."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _print(console: Console, result: dict[str, Any]) -> None:
    pairs, latencies = table(result)
    for name, text in pairs:
        console.print(f"{name:12} {text}", markup=False, soft_wrap=True)
    if latencies.row_count:
        console.print()
        console.print(latencies)


def _write(path: Path, document: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        problem, remedy = f"cannot be written ({error.strerror})", "give a file in a directory that you can write"
        raise ConfigError(problem, param="--out", value=str(path), remedy=remedy) from None
