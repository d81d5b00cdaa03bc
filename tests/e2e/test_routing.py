"""Prefix caching and routing over HTTP: a shared prefix goes to the replica that caches it, other prompts spread."""

from __future__ import annotations

import uuid
from collections import Counter
from typing import Any

import httpx

from tests.e2e.server import Server, by_replica
from tests.waiting import until


def _system_prompt(num_rules: int = 90) -> str:
    """Return a unique text, by default of well over 500 tokens."""
    rules = " ".join(f"Rule {number}: be kind to guest {number}." for number in range(num_rules))
    return f"Case {uuid.uuid4().hex}. {rules}"


def _ask(client: httpx.Client, system: str, question: str) -> httpx.Response:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    answer = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 4, "temperature": 0})
    return answer.raise_for_status()


def _cached(answer: httpx.Response) -> int:
    usage: dict[str, Any] = answer.json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_a_second_request_finds_its_system_prompt_cached(client: httpx.Client) -> None:
    system = _system_prompt()
    first = _ask(client, system, "What is rule one?")
    assert first.json()["usage"]["prompt_tokens"] > 500
    assert _cached(first) < 448
    for question in ("And rule two?", "And the last one?", "Tell me all of them."):
        again = _ask(client, system, question)
        assert _cached(again) >= 448
        assert again.headers["x-pagoda-replica"] == first.headers["x-pagoda-replica"]


def test_another_salt_shares_nothing(client: httpx.Client) -> None:
    body = {"prompt": _system_prompt(), "max_tokens": 1}
    assert _cached(client.post("/v1/completions", json=body)) == 0
    assert _cached(client.post("/v1/completions", json=body | {"cache_salt": "tenant"})) == 0
    assert _cached(client.post("/v1/completions", json=body | {"cache_salt": "tenant"})) >= 448


def test_unrelated_prompts_spread_over_the_replicas(client: httpx.Client) -> None:
    """The prompts are of several blocks, and short enough to be computed in a moment."""
    chosen = Counter(_ask(client, _system_prompt(15), "Hi").headers["x-pagoda-replica"] for _ in range(24))
    assert len(chosen) == 2
    assert min(chosen.values()) >= 4


def test_short_unrelated_prompts_spread_too(client: httpx.Client) -> None:
    """A prompt without a full block is routed by load only."""
    body = {"max_tokens": 1}
    chosen = Counter(
        client.post("/v1/completions", json=body | {"prompt": f"Hi {number}"}).headers["x-pagoda-replica"]
        for number in range(24)
    )
    assert len(chosen) == 2
    assert min(chosen.values()) >= 4  # not half: a report of the load that comes late favours a replica for a while


def test_the_counters_agree_with_the_answers(client: httpx.Client, server: Server) -> None:
    names = ("pagoda_prefix_cache_hit_tokens_total", "pagoda_prefix_cache_query_tokens_total")

    def counted() -> tuple[float, ...]:
        samples = server.metrics_of_all()
        return tuple(sum(by_replica(samples, name).values()) for name in names)

    hits, queries = counted()
    system = _system_prompt()
    answers = [_ask(client, system, f"Question {number}?") for number in range(4)]
    hits += sum(map(_cached, answers))
    queries += sum(answer.json()["usage"]["prompt_tokens"] for answer in answers)
    until(lambda: counted() == (hits, queries), f"{hits} hits of {queries} tokens", details=counted)
