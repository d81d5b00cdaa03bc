"""The dashboard and the alerts on a real Prometheus that scrapes both endpoints of a server after a mixed load."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import MAX_RUNNING
from tests.e2e.prometheus import Prometheus, running_prometheus
from tests.e2e.server import START_HANG_S, Server
from tests.k8s.monitoring_files import PREFIXES, label_queries, queries, rules, write_rules
from tests.waiting import HANG_S, until

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not shutil.which("prometheus") or not shutil.which("promtool"),
        reason="prometheus and promtool are not installed: apt-get install prometheus",
    ),
]

WINDOW = "20s"  # for Grafana's $__rate_interval
CLIENTS = 48
# What the load has to cause, by the counter that shows it.
CAUSED = (
    "preemptions_total",
    "blocks_evicted_total",
    "requests_rejected_total",
    "ingress_rejections_total",
    "routing_predicted_ttft_seconds_count",  # not for the first burst: nothing is measured before it
)
# The server of this load makes no drafts, and has neither a disk cache nor a peer.
NOT_CAUSED = ("spec_decode", "kv_tier_", "prefix_cache_tier_hit", "routing_predicted_fetch", "routing_fetched")
STORY = "You are a patient guide to the rivers of the world, and you tell long stories. " * 2


def _ask(client: httpx.Client, number: int) -> int:
    """Send one request of several kinds and return its status; the first fills the KV pool with two answers."""
    body: dict[str, Any] = {"max_tokens": 200, "seed": number, "temperature": 0.9, "ignore_eos": number % 3 > 0}
    if number == 0:
        body |= {"max_tokens": 1900, "ignore_eos": True, "n": MAX_RUNNING}
    if number % 4 == 0:
        question = {"role": "user", "content": f"What is a KV cache? {number % 3}"}
        return client.post("/v1/chat/completions", json=body | {"messages": [question]}).status_code
    prompt = STORY * (number % 2) + f"Story {number % 11} begins at the"
    with client.stream("POST", "/v1/completions", json=body | {"prompt": prompt, "stream": True}) as answer:
        with suppress(httpx.ReadTimeout):
            for count, _ in enumerate(answer.iter_lines()):
                if number % 13 == 5 and count > 10:
                    break  # this client disconnects
        return answer.status_code


@dataclass
class Scene:
    """A server after its load, and the Prometheus that scrapes it."""

    server: Server
    prometheus: Prometheus
    started: float
    statuses: set[int]


@pytest.fixture(scope="module")
def scene(small_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    directory = tmp_path_factory.mktemp("prometheus")
    # The alerts fire without their waiting time; their expressions are unchanged.
    rule_files = [write_rules(directory / f"{prefix}.yaml", prefix, **{"for": "0s"}) for prefix in PREFIXES]
    with running_prometheus(directory, small_server, rule_files) as prometheus:
        started = time.time()
        yield Scene(small_server, prometheus, started, _load(small_server, prometheus))


def _load(server: Server, prometheus: Prometheus) -> set[int]:
    """Send bursts until both endpoints show their effects; return the status codes of the answers."""
    statuses: set[int] = set()
    with httpx.Client(base_url=server.url, timeout=HANG_S, limits=httpx.Limits(max_connections=CLIENTS)) as client:
        statuses.add(client.post("/v1/completions", json={"prompt": STORY * 500}).status_code)
        with ThreadPoolExecutor(CLIENTS) as pool:

            def burst_is_shown() -> bool:
                statuses.update(pool.map(lambda number: _ask(client, number), range(CLIENTS)))
                return all(_is_shown(prometheus, prefix) for prefix in PREFIXES)

            # Without a pause, so that the engines work at every scrape.
            until(burst_is_shown, "the load's effects are shown", pause_s=0.0, hang_s=START_HANG_S)
    return statuses


def _is_shown(prometheus: Prometheus, prefix: str) -> bool:
    """Return whether an endpoint was scraped while requests ran, and before and after all that the load causes."""
    return all(
        _has_result(prometheus, expression)
        for expression in (
            f"min(max_over_time({prefix}_num_requests_running[2m])) > 0",
            *(f"sum(increase({prefix}_{name}[2m])) > 0" for name in (*CAUSED, "requests_finished_total")),
        )
    )


def _has_result(prometheus: Prometheus, expression: str) -> bool:
    with suppress(httpx.TransportError):  # it is starting
        return bool(prometheus.query(expression))
    return False


def _chosen(prometheus: Prometheus, prefix: str) -> dict[str, str]:
    """Return the dashboard's variables with everything selected, and the text that Grafana substitutes for each."""
    chosen = {"${prefix}": prefix, "$__rate_interval": WINDOW, "$namespace": ".*"}
    for name, series, label in label_queries():
        if name != "namespace":
            values = prometheus.values(_with(chosen, series), label)
            assert values, f"variable {name} has no values"
            chosen[f"${name}"] = "|".join(values)
    return chosen


def _with(chosen: dict[str, str], text: str) -> str:
    for name, value in chosen.items():
        text = text.replace(name, value)
    return text


def test_the_load_was_mixed(scene: Scene) -> None:
    assert {200, 400, 503} <= scene.statuses
    samples = scene.server.metrics()
    for name in CAUSED:
        assert sum(value for (sample, _), value in samples.items() if sample == f"pagoda_{name}"), name


def test_each_expected_first_token_stands_beside_the_one_that_came(scene: Scene) -> None:
    """In the metrics, and on the page for each request but the first ones: then nothing is measured yet."""
    samples = scene.server.metrics()
    counted = [
        sum(value for (sample, _), value in samples.items() if sample == f"pagoda_routing_{kind}_ttft_seconds_count")
        for kind in ("predicted", "measured")
    ]
    assert counted[0] == counted[1] > 0
    with httpx.Client(base_url=scene.server.url, timeout=HANG_S) as client:
        assert client.post("/v1/completions", json={"prompt": STORY, "max_tokens": 4}).status_code == 200

        def ended() -> list[dict[str, Any]]:
            routed = client.get("/live").json()["routed"]
            return [entry for entry in routed if entry["measured_s"] is not None and entry["predicted_s"] is not None]

        until(ended, "the page lists an answered request")
        assert all(entry["predicted_s"] > 0 and entry["measured_s"] > 0 for entry in ended())


@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_panel_has_data(scene: Scene, prefix: str) -> None:
    chosen = _chosen(scene.prometheus, prefix)
    assert (chosen["$model"], chosen["$replica"].count("|"), chosen["$ingress"].count("|")) == ("pagoda-demo", 0, 0)
    for title, expression in queries():
        if any(name in expression for name in NOT_CAUSED):
            continue
        text = _with(chosen, expression)

        def has_data(text: str = text) -> bool:
            return bool(scene.prometheus.numbers(text, scene.started, time.time()))

        until(has_data, f"{title}: {text} has data")


@pytest.mark.parametrize(
    "expression",
    [
        "sum(${prefix}_prompt_tokens_total)",
        "sum by (reason) (${prefix}_requests_finished_total)",
        "sum by (kind) (${prefix}_preemptions_total)",
        "sum(${prefix}_routing_predicted_hit_tokens_total)",
        "sum(${prefix}_time_to_first_token_seconds_sum)",
        "sum(${prefix}_request_queue_seconds_sum)",
        "sum by (le) (${prefix}_inter_token_latency_seconds_bucket)",
        "sum by (status) (${prefix}_http_requests_total{path='/v1/completions'})",
        "sum by (state) (${prefix}_kv_blocks)",
        "sum by (state) (${prefix}_replicas)",
        "min by (replica) (${prefix}_engine_start_time_seconds)",
    ],
)
def test_both_endpoints_agree(scene: Scene, expression: str) -> None:
    """Nothing has changed since the load, but its last values need seconds to reach Ray's agent.

    Zeros are ignored: Ray's agent lacks series that were never sent.
    """

    def values(prefix: str) -> dict[frozenset[tuple[str, str]], float]:
        return {
            frozenset(series["metric"].items()): float(series["value"][1])
            for series in scene.prometheus.query(expression.replace("${prefix}", prefix))
            if float(series["value"][1])
        }

    def agree() -> bool:
        ours, rays = map(values, PREFIXES)
        return bool(ours) and ours == pytest.approx(rays)

    until(agree, "both endpoints agree", pause_s=0.5, details=lambda: [*map(values, PREFIXES)])


def test_promtool_finds_no_problem_in_the_metrics(scene: Scene) -> None:
    text = httpx.get(f"{scene.server.url}/metrics", timeout=HANG_S).content
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=HANG_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.exhaustive("kills engines; in CI promtool evaluates every alert, and this Prometheus loads them")
def test_an_alert_fires_while_there_is_no_engine(scene: Scene) -> None:
    """The engines and their replacements are killed until the alert fires for both endpoints."""
    firing = 'count by (endpoint) (max_over_time(ALERTS{alertname="PagodaNoHealthyReplica", alertstate="firing"}[10m]))'
    assert not scene.prometheus.query(firing)

    def has_fired() -> bool:
        for pid in scene.server.engine_pids().values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(scene.prometheus.query(firing)) == len(PREFIXES)

    history = scene.prometheus.history
    until(has_fired, "the alert fires", pause_s=0.5, hang_s=START_HANG_S, details=lambda: history("replicas"))
    until(scene.server.engine_pids, "an engine runs again")
    evaluated = [rule for group in scene.prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert len(evaluated) == len(PREFIXES) * len(rules())
    assert {(rule["name"], rule["health"], rule.get("lastError", "")) for rule in evaluated} == {
        (rule["alert"], "ok", "") for rule in rules()
    }
