"""One ingress of a large cluster: ``python -m benchmarks.routing.scale``.

- *decisions*: as ``benchmarks.routing.decision``, with more replicas.
- *ingress*: the CPU time of the messages of a replica, decoding included, their bytes, and the memory of a block in the
  index; and what they come to with all replicas. Replicas compute prompts at 6,500 tokens/s, so they store and evict
  406 blocks of 16 tokens a second, in batches of 2,048 tokens, and report their load ten times a second.
- *subsets*: the router beyond one ingress's limits. The cluster is cut into groups of equal size; the hash of a
  prompt's second block of 512 tokens says which group it belongs to (rendezvous hashing, so that a change moves few
  prompts). The first block, a system prompt, is the same in all prompts of this trace: it would choose one group.
  Mooncake trace, free decodes, the same load per replica; the cost of it is in hits and in time.

Times are the thread's own CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import thread_time
from typing import Any

import psutil

from benchmarks.result_file import write_result
from benchmarks.routing.decision import measure
from benchmarks.routing.replica import Settings
from benchmarks.routing.runs import OURS, Run, run_all
from benchmarks.routing.simulate import TRACE
from deployments.observability.recorder import Recorder
from deployments.routing.kv_index import KVIndex
from deployments.routing.options import RoutingOptions
from deployments.routing.state import RoutingState
from deployments.transport.kv_events.codec import decode_events, decode_load, encode
from deployments.transport.kv_events.feed import ReplicaFeed
from deployments.transport.kv_events.messages import LoadMessage, Snapshot, events_message
from engine.kv.events import BlockRemoved, BlockStored, KVEventBatch
from engine.observability.load import EngineLoad
from engine.observability.metrics import METRICS
from engine.observability.step_costs import StepCosts

__all__ = ["main"]

BLOCKS_PER_S = 6_500 / 16  # of a replica
BATCH_BLOCKS = 2_048 // 16
REPORTS_PER_S = 10
INDEXED_BLOCKS = 1_000_000
HELD_BLOCKS = 65_536  # of a replica
PARTS = ("ingress", "decisions", "subsets")


def measure_ingress(num_replicas: int, repeats: int) -> dict[str, float]:
    """Return what the messages of the replicas cost an ingress, and the memory of its index.

    Args:
        num_replicas: of the cluster.
        repeats: messages of each kind that are timed.
    """
    rng = random.Random(0)
    state = RoutingState(RoutingOptions())
    names = [f"replica-{number}" for number in range(num_replicas)]
    state.set_replicas(names)
    feeds = [_feed(name, state) for name in names]
    batches, reports = [], []
    for number in range(repeats):
        stored, removed = ([rng.getrandbits(64) for _ in range(BATCH_BLOCKS)] for _ in range(2))
        state.stored(names[number % num_replicas], removed)  # which the batch evicts again
        batch = KVEventBatch(1, number // num_replicas, (*map(BlockRemoved, removed), *map(BlockStored, stored)))
        batches.append(encode(events_message(batch, 0.0)))
        costs = StepCosts(0.02, 1e-4, 1e-3, 1e-7)
        load = EngineLoad(8, 2, rng.randrange(50_000), 40_000, rng.randrange(40_000), 6_500.0, number, step_costs=costs)
        reports.append(encode(LoadMessage(1, -1, load)))

    for number, feed in enumerate(feeds):  # the first report of a replica looks at all of them
        feed.load(decode_load(reports[number % repeats]), 1.0)

    def apply_batch(number: int) -> None:
        feeds[number % num_replicas].events(decode_events(batches[number]), 1.0)

    def apply_report(number: int) -> None:
        now = 1.0 + (number + 1) / num_replicas / REPORTS_PER_S
        feeds[number % num_replicas].load(decode_load(reports[number]), now)

    report_s, batch_s = _mean_s(apply_report, repeats), _mean_s(apply_batch, repeats)
    batches_per_s, reports_per_s = num_replicas * BLOCKS_PER_S / BATCH_BLOCKS, num_replicas * REPORTS_PER_S
    block_bytes = _index_bytes() / INDEXED_BLOCKS
    return {
        "batch_us": batch_s * 1e6,
        "report_us": report_s * 1e6,
        "events_cpu_share": batch_s * batches_per_s,
        "reports_cpu_share": report_s * reports_per_s,
        "events_mb_per_s": len(batches[0]) * batches_per_s / 1e6,
        "reports_mb_per_s": len(reports[0]) * reports_per_s / 1e6,
        "index_bytes_per_block": block_bytes,
        "index_gb": block_bytes * HELD_BLOCKS * num_replicas / 1e9,
    }


def _feed(name: str, state: RoutingState) -> ReplicaFeed:
    feed = ReplicaFeed(name, state, Recorder(METRICS), now=0.0, silence_s=5.0, resync_s=1.0)
    feed.snapshot(feed.nonce or "", Snapshot(1, -1, b""), 0.0)
    return feed


def _mean_s(apply: Callable[[int], None], repeats: int) -> float:
    started = thread_time()
    for number in range(repeats):
        apply(number)
    return (thread_time() - started) / repeats


def _index_bytes() -> int:
    """Return the memory of a million blocks, which one replica each holds."""
    rng, process = random.Random(1), psutil.Process()
    index = KVIndex()
    index.add_replica("a")
    before = process.memory_info().rss
    for _ in range(INDEXED_BLOCKS // BATCH_BLOCKS):
        index.stored("a", [rng.getrandbits(64) for _ in range(BATCH_BLOCKS)])
    return int(process.memory_info().rss - before)


def subset_runs(path: str, num_replicas: int, num_ingresses: int, num_subsets: Sequence[int]) -> list[Run]:
    """Return a run for each number of groups."""
    settings = Settings(num_replicas=num_replicas, num_ingresses=num_ingresses)
    return [
        Run(OURS, "mooncake", path, settings=replace(settings, num_subsets=number), stretch=8 / num_replicas)
        for number in num_subsets
    ]


def _ingress(num_replicas: int, repeats: int) -> dict[str, float]:
    figures = measure_ingress(num_replicas, repeats)
    print(
        f"{num_replicas} replicas: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()), flush=True
    )
    return figures


def _decisions(num_replicas: int, repeats: int, pulls: bool) -> dict[str, Any]:
    measured = measure(num_replicas, repeats, pulls=pulls)
    for kind, calls in measured["kinds"].items():
        print(f"{num_replicas} replicas, pulls={pulls}, {kind}, us: choose {calls['choose']}", end=", ")
        print(f"again {calls['choose again']}", flush=True)
    return measured


def _subset(run: Run, figures: dict[str, Any]) -> dict[str, Any]:
    settings, wait = run.settings, f"TTFT mean {figures['ttft_mean']:.2f}, p90 {figures['ttft_p90']:.2f}"
    print(f"{settings.num_replicas} replicas in {settings.num_subsets} groups: hit {figures['hit']:.1%}, {wait}")
    return asdict(settings) | figures


def main() -> None:
    """Print the figures and write the JSON, which keeps its results of the parts that do not run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", default=TRACE, help="the Mooncake conversation trace")
    parser.add_argument("--replicas", type=int, nargs="*", default=[64, 256, 1024])
    parser.add_argument("--subset-replicas", type=int, default=64)
    parser.add_argument("--subset-ingresses", type=int, default=16)
    parser.add_argument("--subsets", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=1_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/routing_scale.json"))
    args = parser.parse_args()
    results: dict[str, Any] = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    if "ingress" in args.parts:
        results["ingress"] = {str(number): _ingress(number, args.repeats) for number in args.replicas}
    if "decisions" in args.parts:
        results["decisions"] = {}
        for number in args.replicas:
            for pulls in (False, True):
                results["decisions"][f"{number}{', pulls' if pulls else ''}"] = _decisions(number, args.repeats, pulls)
    if "subsets" in args.parts:
        runs = subset_runs(args.trace, args.subset_replicas, args.subset_ingresses, args.subsets)
        results["subsets"] = [_subset(run, row) for run, row in zip(runs, run_all(runs, args.processes), strict=True)]
    write_result(args.out, results)


if __name__ == "__main__":
    main()
