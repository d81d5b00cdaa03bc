"""The cost of a routing decision, with the production classes: ``python -m benchmarks.routing.decision``.

The setting of the goal: prompts of 32,768 tokens in blocks of 16 over 64 replicas, and an index of a million blocks.
Each replica holds its own conversations, which begin with one of a few system prompts that all replicas hold. Decisions
are timed one by one, each for another prompt. An ingress does other work between two of them, so each begins with
processor caches from which an array of 8 MB has evicted everything; "choose again" repeats it at once, from the caches.
The clock is the thread's own time: another process's share of the processor is not part of a decision. But what other
processes evict from the caches is, so beside busy ones a decision takes two to four times as long: compare versions in
turns, or by "choose again". Garbage is collected as in an ingress: rarely, and without what it holds from the start.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
from msgspec.structs import replace

from benchmarks.result_file import write_result
from deployments.routing.cluster_view import ClusterView
from deployments.routing.policy import Decision
from deployments.routing.state import RoutingState
from deployments.transport.pages.address import PageAddress
from deployments.transport.request_channel.dispatch import Dispatch
from engine.observability.load import EngineLoad, SourceRate
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams

__all__ = ["main", "measure"]

PROMPT_TOKENS = 32_768
BLOCK_SIZE = 16
BLOCKS = PROMPT_TOKENS // BLOCK_SIZE
SHARED_BLOCKS = 64  # of a system prompt
CONVERSATIONS = 8  # of each replica
EVICTED_BYTES = 1 << 23
GC_THRESHOLD = 10_000  # that of deployments/ingress.py, which imports Ray


def measure(num_replicas: int, repeats: int, seed: int = 0, *, pulls: bool = False) -> dict[str, Any]:
    """Return percentiles in microseconds by kind of prompt, of ``choose``, ``choose again`` and ``choose and sent``.

    Args:
        num_replicas: of the cluster.
        repeats: decisions of each kind.
        seed: of the prompts and loads.
        pulls: all replicas serve pages and have measured how fast they fetch them.
    """
    rng = random.Random(seed)
    names = tuple(f"replica-{number:02}" for number in range(num_replicas))
    now = 100.0
    view = ClusterView(clock=lambda: now)
    view.set_replicas({name: PageAddress(f"tcp://{name}:1", "secret").metadata if pulls else {} for name in names})
    state = view.routing
    state.block_size = BLOCK_SIZE
    system_prompts = [_hashes(rng, SHARED_BLOCKS) for _ in range(8)]
    held = [list(_conversations(state, name, system_prompts, rng)) for name in names]
    blocks = len(state.index)
    kinds: dict[str, Callable[[], list[int]]] = {
        "cold": lambda: _hashes(rng, BLOCKS),
        "system prompt": lambda: rng.choice(system_prompts) + _hashes(rng, BLOCKS - SHARED_BLOCKS),
        "partly cached": lambda: _partly(rng, rng.choice(rng.choice(held))),
        "fully cached": lambda: list(rng.choice(rng.choice(held))),
    }
    results: dict[str, Any] = {
        "replicas": num_replicas,
        "pulls": pulls,
        "index_blocks": blocks,
        "decisions": repeats,
        "load_average": round(os.getloadavg()[0], 1),
        "kinds": {},
    }
    tokens, params, evicting = [0] * PROMPT_TOKENS, SamplingParams(), np.ones(EVICTED_BYTES // 8)
    for kind, prompt in kinds.items():
        calls: dict[str, list[float]] = {"choose": [], "choose again": [], "choose and sent": []}
        with _ingress_garbage():
            for number in range(repeats):
                now += 0.01
                hashes = prompt()
                if number % 10 == 0:
                    _report(state, names, rng, now, _rates(names, rng) if pulls else ())
                dispatch = Dispatch(EngineRequest(f"{kind}{number}", tokens, params), hashes)
                evicting.sum()
                decision = _choose(view, dispatch, names, calls["choose"])
                _choose(view, dispatch, names, calls["choose again"])
                dispatch.replica = decision.replica
                started = thread_time()
                view.sent(dispatch, decision)
                calls["choose and sent"].append(calls["choose"][-1] + thread_time() - started)
                view.ended(dispatch)
                # Its events confirm the blocks and later evict them, so that the size of the index stays constant.
                computed = hashes[decision.num_cached_blocks :]
                state.stored(decision.replica, computed)
                state.removed(decision.replica, computed)
        results["kinds"][kind] = {name: _percentiles(seconds) for name, seconds in calls.items()}
    return results


def _choose(view: ClusterView, dispatch: Dispatch, names: tuple[str, ...], seconds: list[float]) -> Decision:
    started = thread_time()
    decision = view.choose(dispatch, names)
    seconds.append(thread_time() - started)
    assert decision is not None
    return decision


@contextmanager
def _ingress_garbage() -> Iterator[None]:
    """Collect garbage as an ingress does."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _conversations(
    state: RoutingState, name: str, system_prompts: Sequence[list[int]], rng: random.Random
) -> Iterator[list[int]]:
    """Fill a replica with all system prompts and its own conversations that continue them."""
    state.replaced(name, [block for prompt in system_prompts for block in prompt])
    for number in range(CONVERSATIONS):
        own = system_prompts[number % len(system_prompts)] + _hashes(rng, BLOCKS - SHARED_BLOCKS)
        state.stored(name, own)
        yield own


def _partly(rng: random.Random, conversation: list[int]) -> list[int]:
    known = rng.randrange(SHARED_BLOCKS, BLOCKS)
    return conversation[:known] + _hashes(rng, BLOCKS - known)


def _hashes(rng: random.Random, number: int) -> list[int]:
    return [rng.getrandbits(64) for _ in range(number)]


def _rates(names: Sequence[str], rng: random.Random) -> tuple[SourceRate, ...]:
    return tuple(
        SourceRate(f"tcp://{name}:1", 0.01, rng.uniform(2e4, 8e4)) for name in rng.sample(names, min(8, len(names)))
    )


def _report(
    state: RoutingState, names: Sequence[str], rng: random.Random, now: float, rates: tuple[SourceRate, ...]
) -> None:
    for name in names:
        load = EngineLoad(8, 2, rng.randrange(50_000), 40_000, rng.randrange(40_000), 6_500.0, int(now * 30))
        state.report(name, replace(load, source_rates=rates), now=now)


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    values = np.percentile(np.array(seconds) * 1e6, [50, 90, 99, 99.9])
    return {name: round(float(value), 1) for name, value in zip(("p50", "p90", "p99", "p99.9"), values, strict=True)}


def main() -> None:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3_000)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/routing_decision.json"))
    args = parser.parse_args()
    results = measure(args.replicas, args.repeats)
    results["with_pulls"] = measure(args.replicas, args.repeats, pulls=True)
    for title, measured in (("no pulls", results), ("replicas pull from each other", results["with_pulls"])):
        print(f"{title}: {measured['index_blocks']:,} blocks in the index, {args.replicas} replicas; microseconds")
        print(f"{'prompt':<16} {'call':<22} {'p50':>8} {'p90':>8} {'p99':>8} {'p99.9':>8}")
        for kind, calls in measured["kinds"].items():
            for call, figures in calls.items():
                print(f"{kind:<16} {call:<22} " + " ".join(f"{value:8.1f}" for value in figures.values()))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_result(args.out, results)


if __name__ == "__main__":
    main()
