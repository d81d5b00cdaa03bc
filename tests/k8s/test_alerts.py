"""Each alert fires if its cause exists and not otherwise, as evaluated by Prometheus itself.

A series is written as promtool has it, a value a minute: `1x5` is 1 and five times 1 again, `0+60x5` rises by 60 five
times, `_x5` is nothing for five minutes. Of an alert that compares days it is a value every five minutes.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.k8s.monitoring_files import rules, write_rules
from tests.waiting import HANG_S

WHERE = 'namespace="pagoda", ray_io_cluster="c"'
RUNNING, LEAST = 'replicas{ingress="i", state="running"}', 'replicas_min{ingress="i"}'
HITS, QUERIES = 'prefix_cache_hit_tokens_total{replica="a"}', 'prefix_cache_query_tokens_total{replica="a"}'
USAGE, PREEMPTIONS = 'kv_cache_usage_ratio{replica="a"}', 'preemptions_total{replica="a", kind="recompute"}'
GOOD, BAD = (f'http_requests_total{{ingress="i", path="/v1/completions", status="{status}"}}' for status in (200, 503))
HEALTHY = {'engine_start_time_seconds{replica="healthy"}': "0x90"}
STEP = {"PagodaHitRateCollapsed": 5}  # minutes between two values, if not 1
DAY = 1440 // 5  # values


def first_tokens(within_objective: str, all_of_them: str) -> dict[str, str]:
    """Return the histogram of times to the first token with two buckets that matter."""
    buckets = {"2.5": within_objective, "5.0": all_of_them, "+Inf": all_of_them}
    name = "time_to_first_token_seconds"
    series = {f'{name}_bucket{{replica="a", le="{bound}"}}': values for bound, values in buckets.items()}
    return series | {f'{name}_count{{replica="a"}}': all_of_them}


def starts(*minutes: int) -> dict[str, str]:
    """Return the start times of an engine that restarts, under another name, at each of these minutes."""
    series = {}
    for number, (start, end) in enumerate(zip(minutes, (*minutes[1:], 90), strict=True)):
        before = f"_x{start - 1} " if start else ""
        series[f'engine_start_time_seconds{{replica="r{number}"}}'] = f"{before}{start * 60}x{end - start - 2}"
    return series


CASES: dict[str, list[tuple[str, dict[str, str], int, bool]]] = {
    "PagodaNoHealthyReplica": [
        ("all engines went", {RUNNING: "2x5 0x20", LEAST: "2x30"}, 10, True),
        ("one is left", {RUNNING: "2x5 1x20", LEAST: "2x30"}, 10, False),
        ("an idle server may have none", {RUNNING: "2x5 0x20", LEAST: "0x30"}, 10, False),
    ],
    "PagodaMetricsMissing": [
        ("nothing is scraped", {}, 10, True),
        ("an ingress reports", {RUNNING: "0x20"}, 10, False),
    ],
    "PagodaReplicasMissing": [
        ("one does not come back", {RUNNING: "2x5 1x40", LEAST: "2x60"}, 30, True),
        ("one is replaced", {RUNNING: "2x5 1x5 2x40", LEAST: "2x60"}, 30, False),
    ],
    "PagodaReplicaRestartLoop": [
        ("every six minutes", HEALTHY | starts(*range(2, 60, 6)), 45, True),
        ("once", HEALTHY | starts(2, 20), 45, False),
        ("never", starts(0), 45, False),
    ],
    "PagodaTimeToFirstTokenHigh": [
        ("two in a hundred are late", first_tokens("0+588x60", "0+600x60"), 30, True),
        ("all are in time", first_tokens("0+600x60", "0+600x60"), 30, False),
        ("hardly anybody asks", first_tokens("0+0x60", "0+1x60"), 30, False),
    ],
    "PagodaHitRateCollapsed": [
        ("no hits any more", {HITS: f"0+30000x{DAY} {30000 * DAY}x18", QUERIES: f"0+60000x{DAY + 18}"}, DAY + 12, True),
        ("new replicas without a hit", {HITS: f"0+30000x{DAY}", QUERIES: f"0+60000x{DAY + 18}"}, DAY + 12, True),
        ("as ever", {HITS: f"0+30000x{DAY + 18}", QUERIES: f"0+60000x{DAY + 18}"}, DAY + 12, False),
        ("never were any", {HITS: f"0x{DAY + 18}", QUERIES: f"0+60000x{DAY + 18}"}, DAY + 12, False),
    ],
    "PagodaKVCacheFull": [
        ("full and preempting", {USAGE: "0.97x60", PREEMPTIONS: "0+2x60"}, 30, True),
        ("full", {USAGE: "0.97x60", PREEMPTIONS: "5x60"}, 30, False),
        ("a crowd that passes", {USAGE: "0.97x4 0.3x60", PREEMPTIONS: "0+2x4 8x60"}, 30, False),
    ],
    "PagodaIndexGaps": [
        ("again and again", {'kv_index_gaps_total{ingress="i"}': "0+1x60"}, 40, True),
        ("once", {'kv_index_gaps_total{ingress="i"}': "0x30 1x30"}, 40, False),
    ],
    "PagodaServerErrors": [
        ("one in six", {GOOD: "0+100x60", BAD: "0+20x60"}, 30, True),
        ("one in a hundred", {GOOD: "0+100x60", BAD: "0+1x60"}, 30, False),
    ],
}


def _input(series: dict[str, str]) -> list[dict[str, str]]:
    """Return the series as Prometheus gets them from Kubernetes."""
    names = [f"ray_pagoda_{name.replace('{', '{' + WHERE + ', ', 1)}" for name in series]
    return [{"series": name, "values": values} for name, values in zip(names, series.values(), strict=True)]


def _tests(step: int) -> list[dict[str, object]]:
    """Return the cases of the alerts whose series have a value every ``step`` minutes."""
    return [
        {
            "name": f"{alert}: {what}",
            "interval": f"{step}m",
            "input_series": _input(series),
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{alert}", alertstate="firing"}}) or vector(0)',
                    "eval_time": f"{at * step}m",
                    "exp_samples": [{"labels": "{}", "value": int(fires)}],
                }
            ],
        }
        for alert, cases in CASES.items()
        if STEP.get(alert, 1) == step
        for what, series, at, fires in cases
    ]


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    assert list(CASES) == [rule["alert"] for rule in rules()]
    for cases in CASES.values():
        assert {fires for _, _, _, fires in cases} == {True, False}


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed: apt-get install prometheus")
@pytest.mark.parametrize("step", [1, pytest.param(5, marks=pytest.mark.long)])
def test_alerts_fire_when_they_should(tmp_path: Path, step: int) -> None:
    write_rules(tmp_path / "rules.yaml")
    document = {"rule_files": ["rules.yaml"], "evaluation_interval": f"{step}m", "tests": _tests(step)}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(document))
    for command in (["check", "rules", "rules.yaml"], ["test", "rules", "tests.yaml"]):
        done = subprocess.run(["promtool", *command], cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S)
        assert done.returncode == 0, done.stdout + done.stderr
