"""Report: the figures of a run, as JSON and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from deployments.cli.bench.http import Outcome
from deployments.cli.bench.load import Run
from engine.errors import ConfigError

__all__ = ["Slo", "figures", "parse_slo", "table"]

QUANTILES = (50, 90, 99)
_LATENCIES = {
    "ttft_ms": "first token (TTFT)",
    "itl_ms": "between two events (ITL)",
    "tpot_ms": "a token, mean of an answer (TPOT)",
    "e2e_ms": "whole answer (E2E)",
}
_OF_SLO = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s"}


@dataclass(frozen=True, slots=True)
class Slo:
    """Most milliseconds of each named latency of a good answer."""

    limits_ms: Mapping[str, float]

    def is_met(self, outcome: Outcome) -> bool:
        """Whether a complete answer keeps every limit."""
        for name, limit_ms in self.limits_ms.items():
            seconds = getattr(outcome, _OF_SLO[name])
            if seconds is not None and 1e3 * seconds > limit_ms:
                return False
        return True


def parse_slo(texts: Iterable[str]) -> Slo:
    """Return the limits of ``ttft=MS``, ``tpot=MS`` and ``e2e=MS``.

    Raises:
        ConfigError: a text is none of these.
    """
    limits: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = 0.0
        if name not in _OF_SLO or not limits[name] > 0:
            remedy = "give milliseconds of ttft, tpot or e2e, such as ttft=500"
            raise ConfigError("is not a limit", param="--slo", value=text, remedy=remedy)
    return Slo(limits)


def figures(run: Run, slo: Slo) -> dict[str, Any]:
    """Return the figures of a run; latencies in milliseconds, of the complete answers."""
    done = [outcome for outcome in run.outcomes if not outcome.error and outcome.arrivals]
    errors = Counter(outcome.error or "no token" for outcome in run.outcomes if outcome.error or not outcome.arrivals)
    seconds = max(run.ended_at - run.started_at, 1e-9)
    prompt, cached = (sum(getattr(item, name) for item in done) for name in ("prompt_tokens", "cached_tokens"))
    tokens = sum(outcome.num_tokens for outcome in done)
    received = sum(outcome.num_tokens for outcome in run.outcomes)
    result: dict[str, Any] = {
        "requests": len(run.outcomes),
        "complete": len(done),
        "errors": dict(errors.most_common()),
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(done) / seconds, 3),
        "output_tokens_per_s": round(tokens / seconds, 2),
        "prompt_tokens_per_s": round(prompt / seconds, 2),
        "prompt_tokens": prompt,
        "output_tokens": tokens,
        "hit_rate": round(cached / prompt, 4) if prompt else None,
    }
    result |= {name: _summary(values) for name, values in _latencies(done).items()}
    if slo.limits_ms:
        good = sum(map(slo.is_met, done))
        share = good / len(run.outcomes) if run.outcomes else 0.0
        limits = {f"{name}_ms": limit for name, limit in slo.limits_ms.items()}
        result["goodput"] = {"slo": limits, "requests_per_s": round(good / seconds, 3), "share": round(share, 4)}
    result["client"] = {
        "cpu_s": round(run.cpu_s, 3),
        "cpu_us_per_token": round(1e6 * run.cpu_s / received, 2) if received else None,
        "late_ms": _summary([1e3 * item.late_s for item in run.outcomes if item.late_s is not None]),
    }
    return result | ({"interrupted": True} if run.was_interrupted else {})


def _latencies(done: list[Outcome]) -> dict[str, list[float]]:
    gaps = [np.diff(np.asarray(outcome.arrivals)) for outcome in done]
    return {
        "ttft_ms": [1e3 * outcome.ttft_s for outcome in done],
        "itl_ms": list(1e3 * np.concatenate(gaps)) if gaps else [],
        "tpot_ms": [1e3 * outcome.tpot_s for outcome in done if outcome.tpot_s is not None],
        "e2e_ms": [1e3 * outcome.e2e_s for outcome in done],
    }


def _summary(values: list[float]) -> dict[str, float] | None:
    """Return mean, quantiles and maximum; None of nothing."""
    if not values:
        return None
    quantiles = np.percentile(values, QUANTILES)
    pairs = {"mean": np.mean(values), **{f"p{q}": value for q, value in zip(QUANTILES, quantiles, strict=True)}}
    return {name: round(float(value), 3) for name, value in (pairs | {"max": max(values)}).items()}


def table(result: Mapping[str, Any]) -> tuple[list[tuple[str, str]], Table]:
    """Return the figures as pairs of a name and a text, and the latencies as a table."""
    errors = ", ".join(f"{count} {code}" for code, count in result["errors"].items())
    pairs = [
        ("requests", f"{result['complete']} of {result['requests']} complete in {result['seconds']:.1f} s"),
        ("errors", errors or "none"),
        ("throughput", f"{result['output_tokens_per_s']:.1f} tokens/s, {result['requests_per_s']:.2f} requests/s"),
        ("prompts", f"{result['prompt_tokens_per_s']:.1f} tokens/s{_hits(result)}"),
    ]
    if goodput := result.get("goodput"):
        slo = ", ".join(f"{name.removesuffix('_ms')} {limit:g} ms" for name, limit in goodput["slo"].items())
        text = f"{goodput['requests_per_s']:.2f} requests/s ({goodput['share']:.1%}) within {slo}"
        pairs.append(("goodput", text))
    client = result["client"]
    if client["cpu_us_per_token"] is not None:
        text = f"{client['cpu_us_per_token']:.1f} us of CPU a token"
        if late := client["late_ms"]:
            text += f"; requests were sent late by p50 {late['p50']:.1f} and p99 {late['p99']:.1f} ms"
        pairs.append(("this client", text))
    return pairs, _latency_table(result)


def _hits(result: Mapping[str, Any]) -> str:
    return "" if result["hit_rate"] is None else f", {result['hit_rate']:.1%} of them cached"


def _latency_table(result: Mapping[str, Any]) -> Table:
    columns = ("mean", *(f"p{quantile}" for quantile in QUANTILES), "max")
    shown = Table("milliseconds", box=None, padding=(0, 2, 0, 0), header_style="")
    for column in columns:
        shown.add_column(column, justify="right")
    for name, label in _LATENCIES.items():
        if (values := result[name]) is not None:
            shown.add_row(label, *(f"{values[column]:.1f}" for column in columns))
    return shown
