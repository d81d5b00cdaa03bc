"""`python -m benchmarks.routing.live`: the hit rate of real replicas, beside one engine with the pooled cache.

64 conversations over 8 shared system prompts, sent turn by turn to 2 ingresses with 4 engine replicas; the same
requests to the same deployment without host pools and transfers, and with Serve's default router; and to a single
engine whose cache has the size of all four. Prompts are token ids drawn with a fixed seed, the assistant's turns among
them, so that each server gets the very same requests in the same order.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from benchmarks.machine import describe
from benchmarks.result_file import write_result
from benchmarks.serving.completions import Outcome, complete, connected
from benchmarks.serving.server import Server, serve

VOCABULARY = range(10, 3000)
SYSTEM_PROMPTS, SYSTEM_TOKENS = 8, 320
CONVERSATIONS, TURNS = 64, 6
USER_TOKENS, ASSISTANT_TOKENS = (20, 120), (30, 120)
ANSWER_TOKENS = 8
ENGINES, INGRESSES, CLIENTS = 4, 2, 16
BLOCK_SIZE = 16
HITS, QUERIES = "pagoda_prefix_cache_hit_tokens_total", "pagoda_prefix_cache_query_tokens_total"
PREDICTED, MEASURED = "pagoda_routing_predicted_ttft_seconds", "pagoda_routing_measured_ttft_seconds"
DEFAULT_ROUTER = "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter"


@dataclass(frozen=True)
class Result:
    """The figures of one server."""

    server: str
    requests: int
    failed: int
    hit_rate: float  # share of prompt tokens served from the engines' caches
    hit_rate_seen: float  # the same, from the `usage` of the answers
    ttft_mean_s: float
    ttft_p90_s: float
    imbalance: float  # prompt tokens of the busiest engine over the mean
    predicted_s: float | None  # mean time to the first token as the router expected it; None: it expected none
    measured_s: float | None  # of the same requests, from their dispatch
    correlation: float | None  # of the two, over the last requests that the page lists


def conversations(seed: int) -> list[list[list[int]]]:
    """Return each conversation's prompts, turn by turn; each prompt begins with the previous one."""
    source = random.Random(seed)
    systems = [source.choices(VOCABULARY, k=SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]
    sessions = []
    for number in range(CONVERSATIONS):
        prompt, prompts = list(systems[number % SYSTEM_PROMPTS]), []
        for _ in range(TURNS):
            prompt = prompt + source.choices(VOCABULARY, k=source.randint(*USER_TOKENS))
            prompts.append(prompt)
            prompt = prompt + source.choices(VOCABULARY, k=source.randint(*ASSISTANT_TOKENS))
        sessions.append(prompts)
    return sessions


async def run(url: str, workload: Sequence[Sequence[list[int]]], seed: int) -> list[Outcome]:
    """Send all conversations, CLIENTS at a time, each turn after the answer to the previous turn.

    Before each turn a client takes a random conversation, since real users answer at random times.
    """
    source = random.Random(seed)
    waiting = [list(prompts) for prompts in workload]
    outcomes: list[Outcome] = []

    async def client() -> None:
        while waiting:
            prompts = waiting.pop(source.randrange(len(waiting)))
            body = {"prompt": prompts.pop(0), "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "temperature": 0}
            with connected(url) as target:  # anew for each request, so that HAProxy balances them over the ingresses
                outcomes.append(await complete(target, body))
            if prompts:
                waiting.append(prompts)

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return outcomes


def measure(name: str, server: Server, workload: Sequence[Sequence[list[int]]], seed: int) -> Result:
    """Run the workload on a fresh server."""
    outcomes = asyncio.run(run(server.url, workload, seed))
    done = [outcome for outcome in outcomes if outcome.succeeded]
    first = [outcome.first_token_s for outcome in done]
    by_engine = list(server.metric_by_replica(QUERIES).values())
    num_predicted = server.metric(f"{PREDICTED}_count")
    routed = httpx.get(f"{server.url}/live", timeout=60).json()["routed"]
    pairs = [(entry["predicted_s"], entry["measured_s"]) for entry in routed]
    pairs = [pair for pair in pairs if None not in pair]
    return Result(
        server=name,
        requests=len(outcomes),
        failed=len(outcomes) - len(done),
        hit_rate=server.metric(HITS) / server.metric(QUERIES),
        hit_rate_seen=sum(item.cached_tokens for item in done) / sum(item.prompt_tokens for item in done),
        ttft_mean_s=float(np.mean(first)),
        ttft_p90_s=float(np.percentile(first, 90)),
        imbalance=max(by_engine) * len(by_engine) / sum(by_engine),
        predicted_s=server.metric(f"{PREDICTED}_sum") / num_predicted if num_predicted else None,
        measured_s=server.metric(f"{MEASURED}_sum") / num_predicted if num_predicted else None,
        correlation=float(np.corrcoef(np.array(pairs).T)[0, 1]) if len(pairs) > 1 else None,
    )


def _setting(engines: int, ingresses: int, num_blocks: int, *, tiers: bool = True) -> Any:
    def change(args: dict[str, Any]) -> None:
        args["replicas"] |= {"num_engine_replicas": engines, "num_ingress_replicas": ingresses}
        args["replicas"] |= {"cpus_per_engine": 0.1, "cpus_per_ingress": 0.1}
        args["engine"].pop("kv_cache_memory", None)
        args["engine"] |= {"num_blocks": num_blocks, "block_size": BLOCK_SIZE, "max_num_seqs": 64}
        if not tiers:
            args["engine"] |= {"swap_space_gib": 0, "kv_transfer": False}

    return change


def main() -> None:
    """Measure the servers and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=1600, help="KV blocks of each engine")
    parser.add_argument("--only", nargs="*", help="names of the servers to measure, that of the pooled cache first")
    arguments = parser.parse_args()
    workload = conversations(arguments.seed)
    default = [{"name": "engine", "request_router_config": {"request_router_class": DEFAULT_ROUTER}}]
    results = []
    for name, engines, ingresses, overrides, tiers in (
        ("one engine, pooled cache", 1, 1, None, False),
        ("Pagoda's router", ENGINES, INGRESSES, None, True),
        ("the same without tiers", ENGINES, INGRESSES, None, False),
        ("Serve's default router", ENGINES, INGRESSES, default, False),
    ):
        if arguments.only and name not in arguments.only:
            continue
        blocks = arguments.blocks * ENGINES // engines
        with serve(_setting(engines, ingresses, blocks, tiers=tiers), overrides, engines) as server:
            results.append(measure(name, server, workload, arguments.seed))
        print(results[-1], flush=True)
    pooled = results[0].hit_rate
    print(f"\n{'server':28}  hit rate  of pooled  TTFT mean     p90  max/mean  failed")
    for result in results:
        print(
            f"{result.server:28} {result.hit_rate:9.3f} {result.hit_rate / pooled:10.3f} {result.ttft_mean_s:9.3f}s "
            f"{result.ttft_p90_s:6.3f}s {result.imbalance:9.2f} {result.failed:7d}"
        )
    if arguments.out:
        document = {"machine": describe(torch.device("cpu")), "results": [asdict(result) for result in results]}
        document["blocks_per_engine"] = arguments.blocks
        write_result(arguments.out, document)


if __name__ == "__main__":
    main()
