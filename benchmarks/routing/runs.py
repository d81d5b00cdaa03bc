"""One run of the simulator as plain data, input and figures; several processes share many runs."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from benchmarks.routing.baselines.registry import BASELINES
from benchmarks.routing.cache import infinite_bound, pooled_bound
from benchmarks.routing.pooled import pooled_run
from benchmarks.routing.production import ProductionPolicy
from benchmarks.routing.replica import Settings
from benchmarks.routing.simulation import Change, Cluster, Policy, Result, simulate
from benchmarks.routing.traces import BLOCK_SIZE, Request, agents, bursts, documents, load_mooncake, no_sharing, popular
from deployments.routing.options import RoutingOptions

__all__ = ["GENERATED", "OURS", "Run", "bounds", "describe", "measure", "pooled_figures", "run_all", "summary"]

OURS = "Pagoda"
GENERATED = {"no sharing": no_sharing, "bursts": bursts, "agents": agents, "documents": documents}
_TRACES = GENERATED | {"popular": popular}
# Student's t for a 95% interval of a mean, by the number of seeds.
_T = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}


@dataclass(frozen=True)
class Run:
    """A policy on a trace."""

    policy: str
    trace: str  # mooncake, or one of GENERATED
    path: str  # of the Mooncake trace
    seed: int = 0
    parameters: dict[str, Any] = field(default_factory=dict)  # of a baseline, or RoutingOptions
    settings: Settings = field(default_factory=Settings)
    changes: tuple[Change, ...] = ()
    stretch: float = 1.0  # of the time between requests
    max_requests: int | None = None

    def with_seed(self, seed: int) -> Run:
        """Return this run with another seed."""
        return replace(self, seed=seed)


def run_all(runs: Sequence[Run], processes: int) -> list[dict[str, Any]]:
    """Return the figures of each run."""
    if processes == 1:
        return [_figures(run) for run in runs]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return pool.map(_figures, runs, chunksize=1)


def bounds(run: Run) -> dict[str, float]:
    """Return the hit rates of an infinite cache and of one LRU cache as large as all replicas' together."""
    requests, settings = _requests(run), run.settings
    pooled = pooled_bound(requests, settings.num_replicas * settings.cache_blocks)
    return {"infinite": infinite_bound(requests), "pooled": pooled}


def pooled_figures(run: Run) -> dict[str, float]:
    """Return the bound of a run with transfers. A host tier is the pooled cache: it holds what the devices hold."""
    settings = run.settings
    host_blocks = settings.num_replicas * settings.host_tokens // BLOCK_SIZE
    figures = pooled_run(_requests(run), settings, max_blocks=host_blocks or None)
    return {name: round(figure, 5) for name, figure in figures.items()}


def summary(figures: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return mean and half width of the 95% interval (Student's t over the seeds) of every figure."""
    rows = list(figures)
    result: dict[str, Any] = {"seeds": len(rows)}
    for name in rows[0]:
        values = np.array([row[name] for row in rows], dtype=float)
        width = _T[len(rows)] * values.std(ddof=1) / len(rows) ** 0.5 if len(rows) > 1 else 0.0
        result[name] = {"mean": round(float(values.mean()), 5), "ci95": round(float(width), 5)}
    return result


def describe(run: Run) -> dict[str, Any]:
    """Return the description of a run, for the JSON."""
    given = {name: None if value == inf else value for name, value in asdict(run.settings).items()}
    settings = given | {"steps": None if run.settings.steps is None else structs.asdict(run.settings.steps)}
    return {"parameters": {name: str(value) for name, value in run.parameters.items()}, **settings}


@lru_cache(maxsize=4)
def _trace(trace: str, path: str, seed: int) -> list[Request]:
    if trace == "mooncake":
        return load_mooncake(Path(path), seed)
    return _TRACES[trace](seed)


def _requests(run: Run) -> list[Request]:
    requests = _trace(run.trace, run.path, run.seed)[: run.max_requests]
    return [replace(request, at=request.at * run.stretch) for request in requests] if run.stretch != 1 else requests


def _policy(run: Run, cluster: Cluster) -> Policy:
    if run.policy == OURS:
        return ProductionPolicy(cluster, RoutingOptions(**run.parameters), run.seed)
    policy, defaults, _ = BASELINES[run.policy]
    return policy(cluster, **{**defaults, **run.parameters})


def _figures(run: Run) -> dict[str, Any]:
    result = simulate(
        _requests(run), run.settings, lambda cluster: _policy(run, cluster), changes=run.changes, seed=run.seed
    )
    return measure(result)


def measure(result: Result) -> dict[str, Any]:
    """Return the figures of a finished run; times in seconds, but ``token_ms``."""
    waits = np.array([job.first_token_at - job.request.at for job in result.jobs])
    finished = [job for job in result.jobs if job.ended_at >= 0]  # the answers of a lost replica are cut off
    whole = np.array([job.ended_at - job.request.at for job in finished])
    per_token = [
        (job.ended_at - job.first_token_at) / (job.request.output_tokens - 1)
        for job in finished
        if job.request.output_tokens > 1
    ]
    tokens = sum(job.request.input_tokens for job in result.jobs)
    computed = [replica.computed_tokens for replica in result.cluster.all_replicas]
    wrong = [
        abs(min(job.predicted_blocks * BLOCK_SIZE, job.request.input_tokens - 1) - job.hit_tokens)
        for job in result.jobs
    ]
    return {
        "hit": sum(job.hit_tokens for job in result.jobs) / tokens,
        "ttft_mean": float(waits.mean()),
        "ttft_p50": float(np.percentile(waits, 50)),
        "ttft_p90": float(np.percentile(waits, 90)),
        "ttft_p99": float(np.percentile(waits, 99)),
        "whole_mean": float(whole.mean()),
        "whole_p90": float(np.percentile(whole, 90)),
        "token_ms": float(np.mean(per_token)) * 1000 if per_token else 0.0,
        "imbalance": max(computed) / (sum(computed) / len(computed)),
        "mispredicted": sum(wrong) / tokens,
        "retries": sum(job.retries for job in result.jobs),
        "ghosts": result.ghosts,
    }
