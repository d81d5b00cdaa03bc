"""Prefix caching and routing over HTTP: a shared prefix goes to the replica that caches it, other prompts spread."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from typing import Any

import httpx
import pytest

from tests.e2e.losses import stopped_engines, until_unfinished
from tests.e2e.server import Server, by_replica
from tests.waiting import HANG_S, until

NUM_PROMPTS = 24


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


@pytest.mark.parametrize("num_rules", [15, 0], ids=["several blocks", "no full block"])
async def test_unrelated_prompts_spread_over_the_replicas(server: Server, num_rules: int) -> None:
    """The engines are stopped meanwhile, so that the ingress chooses by what it has sent, and not by late reports."""
    prompts = [_system_prompt(num_rules) if num_rules else f"Hi {number}" for number in range(NUM_PROMPTS)]
    async with httpx.AsyncClient(base_url=server.url, timeout=HANG_S) as client:
        with stopped_engines(server):
            bodies = [{"prompt": prompt, "max_tokens": 1} for prompt in prompts]
            posts = [asyncio.create_task(client.post("/v1/completions", json=body)) for body in bodies]
            await until_unfinished(server, NUM_PROMPTS)
        answers = await asyncio.gather(*posts)
    chosen = Counter(answer.raise_for_status().headers["x-pagoda-replica"] for answer in answers)
    assert len(chosen) == 2
    assert min(chosen.values()) >= NUM_PROMPTS // 6  # not half: their prefill rates may have been measured differently


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
