"""The experiments: the comparison on the Mooncake trace, the traces without tuning, and the sweeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, log
from typing import Any

from benchmarks.routing.baselines.registry import BASELINES
from benchmarks.routing.replica import CPU_STEPS, SHARED_STEPS, Settings
from benchmarks.routing.runs import GENERATED, OURS, Run, bounds, describe, pooled_figures, run_all, summary
from benchmarks.routing.simulation import Change

__all__ = ["GOALS", "compare", "generated", "leave_one_out", "others", "shared_steps", "sweeps", "transfers", "tune"]

GOALS = ("least queued tokens", "SGLang-like", "llm-d-like", "LMetric")  # the baselines in the goals


def tune(path: str, processes: int, max_requests: int | None) -> dict[str, dict[str, Any]]:
    """Return each baseline's parameters with the lowest TTFT p90 of its grid, on the first seed."""
    tried = [
        Run(name, "mooncake", path, parameters=parameters, max_requests=max_requests)
        for name, (_, defaults, grid) in BASELINES.items()
        for parameters in ([defaults, *grid] if grid else [])
    ]
    best: dict[str, tuple[float, dict[str, Any]]] = {}
    for run, figures in zip(tried, run_all(tried, processes), strict=True):
        if run.policy not in best or figures["ttft_p90"] < best[run.policy][0]:
            best[run.policy] = (figures["ttft_p90"], run.parameters)
    return {name: parameters for name, (_, parameters) in best.items()}


def compare(
    path: str, seeds: int, processes: int, tuned: dict[str, dict[str, Any]], ingresses: Sequence[int] = (1, 4, 16)
) -> list[dict[str, Any]]:
    """Return our policy with several ingresses and the baselines in the goals, on the Mooncake trace."""
    rows = _baselines(path, GOALS, tuned)
    for number in ingresses:
        rows[f"{OURS}, {_ingresses(number)}"] = Run(OURS, "mooncake", path, settings=Settings(num_ingresses=number))
    return _rows(rows, seeds, processes)


def shared_steps(path: str, seeds: int, processes: int) -> list[dict[str, Any]]:
    """Return our policy and baselines where prompts and answers share steps: all traces, 8 replicas and 64."""
    settings = Settings(steps=SHARED_STEPS)
    rows = {}
    for trace in ("mooncake", *GENERATED):
        for name in (*GOALS, "Dynamo-like"):
            rows[f"{trace}: {name}"] = Run(name, trace, path, settings=settings)
        for number in (1, 4, 16):
            label = f"{trace}: {OURS}, {_ingresses(number)}"
            rows[label] = Run(OURS, trace, path, settings=replace(settings, num_ingresses=number))
    for name in (OURS, "llm-d-like"):
        sized = replace(settings, num_replicas=64, num_ingresses=16 if name == OURS else 1)
        rows[f"mooncake, 64 replicas: {name}"] = Run(name, "mooncake", path, settings=sized, stretch=8 / 64)
    slow = replace(settings, steps=CPU_STEPS, chunk_tokens=128)
    for name in (*GOALS, OURS):  # prompts take eight times as long to compute
        rows[f"mooncake, own engine on CPUs: {name}"] = Run(name, "mooncake", path, settings=slow, stretch=8.0)
    return _rows(rows, seeds, processes)


def leave_one_out(path: str, processes: int, weights: Sequence[float] = (7.5, 15.0, 30.0)) -> dict[str, Any]:
    """Return, for each trace, how the constant that the other traces would choose does on it, with shared steps.

    A weight's score on a trace is the mean logarithm of its mean TTFT and mean whole-request time, one seed; the lower
    the better. The others choose the weight with the lowest sum of scores.
    """
    traces = ["mooncake", *GENERATED]
    runs = [
        Run(OURS, trace, path, parameters={"first_token_weight": weight}, settings=Settings(steps=SHARED_STEPS))
        for trace in traces
        for weight in weights
    ]
    keys = [(run.trace, run.parameters["first_token_weight"]) for run in runs]
    figures = dict(zip(keys, run_all(runs, processes), strict=True))
    scores = {key: (log(row["ttft_mean"]) + log(row["whole_mean"])) / 2 for key, row in figures.items()}
    result: dict[str, Any] = {}
    for trace in traces:
        sums = {weight: sum(scores[other, weight] for other in traces if other != trace) for weight in weights}
        result[trace] = {
            "chosen by the others": min(weights, key=sums.__getitem__),
            "best": min(weights, key=lambda weight: scores[trace, weight]),
            "by weight": {str(weight): _chosen(figures[trace, weight]) for weight in weights},
        }
    return result


def _chosen(figures: dict[str, Any]) -> dict[str, float]:
    return {name: round(figures[name], 3) for name in ("ttft_mean", "ttft_p90", "whole_mean")}


def others(path: str, seeds: int, processes: int, tuned: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the other baselines on the Mooncake trace."""
    return _rows(_baselines(path, [name for name in BASELINES if name not in GOALS], tuned), seeds, processes)


def _baselines(path: str, names: Sequence[str], tuned: dict[str, dict[str, Any]]) -> dict[str, Run]:
    rows = {name: Run(name, "mooncake", path) for name in names}
    for name in names:
        parameters = tuned.get(name)
        if parameters and parameters != BASELINES[name][1]:
            rows[f"{name}, tuned"] = Run(name, "mooncake", path, parameters=parameters)
    return rows


def generated(path: str, seeds: int, processes: int) -> list[dict[str, Any]]:
    """Return our policy and the baselines on the traces without tuning."""
    rows = {}
    for trace in GENERATED:
        for name in GOALS:
            rows[f"{trace}: {name}"] = Run(name, trace, path)
        for number in (1, 16):
            for announce in (False, True) if trace == "bursts" else (False,):
                settings = Settings(num_ingresses=number, announce=announce)
                label = f"{trace}: {OURS}, {_ingresses(number)}"
                if trace == "bursts" and not announce:
                    label += ", without announcements"
                rows[label] = Run(OURS, trace, path, settings=settings)
    return _rows(rows, seeds, processes)


def sweeps(path: str, processes: int, max_requests: int | None) -> list[dict[str, Any]]:
    """Return our policy over sizes, delays, losses and failures, on one seed, beside LMetric over the sizes."""
    rows: dict[str, Run] = {}
    base = Settings(num_ingresses=4)
    for name in (OURS, "LMetric"):
        run = Run(name, "mooncake", path, settings=base, max_requests=max_requests)
        for number in (2, 4, 16, 32, 64):  # the same load per replica
            sized = replace(run, settings=replace(base, num_replicas=number), stretch=8 / number)
            rows[f"replicas {number}: {name}"] = sized
        for tokens in (375_000, 750_000, 1_500_000, 3_000_000, 6_000_000):
            rows[f"cache {tokens:,} tokens: {name}"] = replace(run, settings=replace(base, cache_tokens=tokens))
    run = Run(OURS, "mooncake", path, settings=base, max_requests=max_requests)
    for delay in (0.05, 0.25, 1.0, 5.0):
        rows[f"events and reports {delay} s late: {OURS}"] = replace(run, settings=replace(base, network_s=delay))
    for loss in (0.01, 0.1, 0.5):
        rows[f"events and reports lost {loss:.0%}: {OURS}"] = replace(run, settings=replace(base, loss=loss))
    for kind, name in (("kill", "replica-03"), ("add", "replica-08"), ("restart", "replica-03")):
        rows[f"{kind} at 900 s: {OURS}"] = replace(run, changes=(Change(900.0, kind, name),))
    return _rows(rows, 1, processes)


def transfers(path: str, seeds: int, processes: int) -> list[dict[str, Any]]:
    """Return our policy with host tiers and pulls at several rates, each beside the bound of one pooled cache."""
    host = {"host_tokens": 6_000_000, "load_bytes_per_s": 25e9}
    cases: dict[str, tuple[dict[str, Any], Sequence[int]]] = {"no transfers": ({}, (1, 4, 16))}
    rates: dict[float, Sequence[int]] = {inf: (1,), 25e9: (1, 16), 10e9: (1, 4, 16), 1e9: (1, 16), 1e8: (1,)}
    for rate, numbers in rates.items():
        cases[f"devices, {_rate(rate)}"] = {"pull_bytes_per_s": rate}, numbers
    cases["hosts of 4 devices, no pulls, loads 25 GB/s"] = host, (1,)
    cases["hosts of 4 devices, free"] = {"host_tokens": 6_000_000, "pull_bytes_per_s": inf}, (1,)
    cases["hosts of 4 devices, 25 GB/s"] = host | {"pull_bytes_per_s": 25e9}, (1, 4, 16)
    rows = {}
    for label, (options, numbers) in cases.items():
        for number in numbers:
            settings = Settings(num_ingresses=number, **options)
            rows[f"{label}, {_ingresses(number)}"] = Run(OURS, "mooncake", path, settings=settings)
    for trace in ("bursts", "no sharing", "popular"):
        for label, rate in (("no transfers", 0.0), ("10 GB/s", 10e9), ("1 GB/s", 1e9)):
            settings = Settings(num_ingresses=16, pull_bytes_per_s=rate)
            rows[f"{trace}: {label}, {_ingresses(16)}"] = Run(OURS, trace, path, settings=settings)
    result = _rows(rows, seeds, processes)
    for row, run in zip(result, rows.values(), strict=True):
        if run.settings.pull_bytes_per_s:
            row["bounds"]["pooled_queue"] = pooled_figures(run)
    return result


def _rate(bytes_per_s: float) -> str:
    return "free" if bytes_per_s == inf else f"{bytes_per_s / 1e9:g} GB/s"


def _ingresses(number: int) -> str:
    return f"{number} ingress" + ("es" if number > 1 else "")


def _rows(rows: dict[str, Run], seeds: int, processes: int) -> list[dict[str, Any]]:
    runs = [run.with_seed(seed) for run in rows.values() for seed in range(seeds)]
    figures = run_all(runs, processes)
    limits: dict[str, dict[str, float]] = {}
    result = []
    for index, (label, run) in enumerate(rows.items()):
        key = f"{run.trace} {run.settings.num_replicas * run.settings.cache_blocks} {run.max_requests}"
        if key not in limits:
            limits[key] = bounds(run)
        mine = figures[index * seeds : (index + 1) * seeds]
        result.append({"label": label, **describe(run), "bounds": dict(limits[key]), **summary(mine)})
    return result
