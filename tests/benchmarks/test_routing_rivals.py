"""Rivals in the routing simulator: the protocol, the HTTP harness and faults, with routers that the tests bring."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.routing.replica import SHARED_STEPS, Settings
from benchmarks.routing.rivals.configurations import CONFIGURATIONS, ENVIRONMENTS, ROUND_ROBIN
from benchmarks.routing.rivals.errors import (
    InvalidReplyError,
    RivalDiedError,
    RivalError,
    RivalHungError,
    RivalMissingError,
)
from benchmarks.routing.rivals.install import pinned, python_of
from benchmarks.routing.rivals.process import RivalProcess
from benchmarks.routing.rivals.prompts import CHARACTERS, Prompts
from benchmarks.routing.rivals.run import check_round_robin, run_rival
from benchmarks.routing.rivals.side import Request as RivalRequest
from benchmarks.routing.traces import BLOCK_SIZE
from tests.benchmarks.fake_rival import MAX_IN_FLIGHT
from tests.benchmarks.test_routing_simulator import conversations

SETTINGS = Settings(num_replicas=4, cache_tokens=100 * BLOCK_SIZE)
REQUESTS = conversations(number=120)
BOTH_ENGINES = pytest.mark.parametrize("steps", [None, SHARED_STEPS], ids=["decodes free", "shared steps"])


@contextmanager
def fake_rival(tmp_path: Path, mode: str, reply_s: float = 60.0) -> Iterator[RivalProcess]:
    command = [sys.executable, "-m", "tests.benchmarks.fake_rival", mode]
    with RivalProcess(command, tmp_path / "log", reply_s=reply_s) as process:
        yield process


@contextmanager
def http_rival(tmp_path: Path) -> Iterator[RivalProcess]:
    with RivalProcess([sys.executable, "-m", "benchmarks.routing.rivals.http_router"], tmp_path / "log") as process:
        yield process


def http_options(policy: str) -> dict[str, Any]:
    program = [sys.executable, "-m", "tests.benchmarks.fake_http_router"]
    return {**ROUND_ROBIN.options, "policy": policy, "program": program}


@BOTH_ENGINES
def test_a_rivals_round_robin_is_the_simulated_one(tmp_path: Path, steps: Any) -> None:
    settings = replace(SETTINGS, steps=steps)
    with fake_rival(tmp_path, "round robin") as process:
        result, report = run_rival(process, REQUESTS, settings, {})
    check_round_robin(result, REQUESTS, settings)
    assert report["queued"] == 0
    # It had all KV events: its index is as the caches are.
    assert report["checked_prompts"] > 100
    assert report["wrong_overlaps"] == 0


def test_the_check_of_round_robin_finds_a_difference(tmp_path: Path) -> None:
    with fake_rival(tmp_path, "queue") as process:
        result, _ = run_rival(process, REQUESTS, SETTINGS, {})
    with pytest.raises(InvalidReplyError, match="differs from the simulated one at request"):
        check_round_robin(result, REQUESTS, SETTINGS)


@BOTH_ENGINES
def test_requests_may_wait_in_the_routers_own_queue(tmp_path: Path, steps: Any) -> None:
    settings = replace(SETTINGS, steps=steps)
    with fake_rival(tmp_path, "queue") as process:
        result, report = run_rival(process, REQUESTS, settings, {})
    assert report["queued"] > 0
    assert report["in_flight"] == 0
    assert all(job.ended_at > job.first_token_at > job.request.at for job in result.jobs)
    in_flight = [
        sum(other.first_token_at <= job.first_token_at < other.ended_at for other in result.jobs) for job in result.jobs
    ]
    assert max(in_flight) <= MAX_IN_FLIGHT


def test_a_router_admits_requests_at_first_tokens(tmp_path: Path) -> None:
    with fake_rival(tmp_path, "one prefill") as process:
        result, report = run_rival(process, REQUESTS, SETTINGS, {})
    assert report["queued"] > 0
    placed_at = 0.0
    for job in result.jobs:  # the prefills follow each other, in order of arrival
        placed_at = max(placed_at, job.request.at)
        computed = job.request.input_tokens - job.hit_tokens
        placed_at += SETTINGS.dispatch_s + computed / SETTINGS.prefill_rate
        assert job.first_token_at == pytest.approx(placed_at)


@pytest.mark.parametrize(
    ("mode", "error", "message"),
    [
        ("die", RivalDiedError, "exit code 3; the end of .*\nout of luck"),
        ("raise", RivalDiedError, "at 'choose': ValueError: no worker is healthy"),
        ("unknown replica", InvalidReplyError, "sent request 5 to 'replica-99'; the replicas are replica-00, "),
        ("unknown request", InvalidReplyError, "placed .*10000"),
        ("no object", InvalidReplyError, "placed 17"),
        ("keep", InvalidReplyError, "never placed requests .5."),
    ],
)
def test_a_faulty_router_ends_the_run_with_a_typed_error(
    tmp_path: Path, mode: str, error: type[RivalError], message: str
) -> None:
    with pytest.raises(error, match=message), fake_rival(tmp_path, mode) as process:
        run_rival(process, REQUESTS, SETTINGS, {})


def test_a_router_that_hangs_ends_the_run(tmp_path: Path) -> None:
    message = r"did not answer '\w+' within 1.0 s"  # 'choose', unless the machine itself stalls for a second before
    with pytest.raises(RivalHungError, match=message), fake_rival(tmp_path, "hang", reply_s=1.0) as process:
        run_rival(process, REQUESTS[:6], SETTINGS, {})


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RivalDiedError, match="no-such-program cannot be started"):
        RivalProcess([str(tmp_path / "no-such-program")], tmp_path / "log")


@BOTH_ENGINES
def test_round_robin_of_an_http_router_is_the_simulated_one(tmp_path: Path, steps: Any) -> None:
    settings, requests = replace(SETTINGS, steps=steps), REQUESTS[:60]
    with http_rival(tmp_path) as process:
        result, report = run_rival(process, requests, settings, http_options("round_robin"))
    check_round_robin(result, requests, settings)
    assert report["repeated_requests"] == 0


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        ("die", RivalDiedError, "at 'choose'"),
        ("hang", RivalHungError, "has not passed on request 5 to an engine within"),
    ],
)
def test_an_http_router_that_fails_ends_the_run(
    tmp_path: Path, policy: str, error: type[RivalError], message: str
) -> None:
    options = {**http_options(policy), "patience_s": 1.0} if policy == "hang" else http_options(policy)
    with pytest.raises(error, match=message), http_rival(tmp_path) as process:
        run_rival(process, REQUESTS[:6], SETTINGS, options)


def test_prompts_share_prefixes_as_their_hashes_do() -> None:
    prompts, requests = Prompts(BLOCK_SIZE), REQUESTS[:40]
    made = [RivalRequest(number, r.input_tokens, r.output_tokens, r.hashes) for number, r in enumerate(requests)]
    for request in made:
        prompts.add(request)
    texts = [prompts.text(request) for request in made]
    tokens = [prompts.tokens(request, 60_000_000 + request.job) for request in made]
    assert [len(text) for text in texts] == [CHARACTERS * request.input_tokens for request in requests]
    assert [len(ids) for ids in tokens] == [request.input_tokens for request in requests]
    for first in range(len(made)):
        for other in range(first):
            shared = common_prefix(requests[first].hashes, requests[other].hashes) * BLOCK_SIZE
            assert common_prefix(tokens[first], tokens[other]) == shared
            assert shared <= common_prefix(texts[first], texts[other]) / CHARACTERS < shared + 2


def common_prefix(first: Any, other: Any) -> int:
    return next((n for n, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(len(first), len(other)))


def test_versions_are_pinned_and_a_missing_rival_names_the_remedy(tmp_path: Path) -> None:
    assert {configuration.environment for configuration in CONFIGURATIONS.values()} == set(ENVIRONMENTS)
    for name in ENVIRONMENTS:
        assert all("==" in line for line in pinned(name))
        with pytest.raises(RivalMissingError, match=f"run: python -m benchmarks.routing.rivals.install {name}"):
            python_of(name, tmp_path)
