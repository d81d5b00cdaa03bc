"""The cost of scheduling: the time of one schedule + update with a model that computes nothing.

    python -m benchmarks.scheduler [--running 16 64 256 1024] [--num-blocks 100000] [--out results.json]

Sequences of random lengths decode; a finished one is replaced at once, so that the batch keeps its size and some
steps mix decodes with a prefill, as on a busy server. The prefix cache is on and every full block is published.
Block counts are compared at one batch size to show that the cost does not grow with the pool.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.machine import describe
from engine.kv.block_manager import BlockManager
from engine.prefix_hash import root_hash
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.scheduler_output import SampledTokens
from engine.sequence import SequenceGroup

VOCAB_SIZE = 150_000


class Load:
    """A scheduler that always has ``num_running`` sequences to run."""

    def __init__(self, num_running: int, num_blocks: int, block_size: int, *, steady: bool) -> None:
        self._random = random.Random(0)
        self._blocks = BlockManager(num_blocks, block_size)
        self.scheduler = Scheduler(self._blocks, max_num_seqs=num_running, max_num_batched_tokens=8192 + num_running)
        self._num_arrived = 0
        self._steady = steady
        self._tokens = [self._random.randrange(VOCAB_SIZE) for _ in range(num_running)]
        for _ in range(num_running):
            self._arrive(first=True)
        while len(self.scheduler.running) < num_running or self._is_prefilling:
            self.step()

    @property
    def _is_prefilling(self) -> bool:
        return any(one.remaining_tokens > 1 for one in self.scheduler.running)

    def _arrive(self, *, first: bool) -> None:
        length = self._random.randint(64, 512)
        longest = 10**6 if self._steady else self._random.randint(16, 512) if first else self._random.randint(64, 512)
        group = SequenceGroup(
            EngineRequest(
                str(self._num_arrived),
                [self._random.randrange(VOCAB_SIZE) for _ in range(length)],
                SamplingParams(max_tokens=None),
            ),
            arrival=self._num_arrived,
            root=root_hash("null"),
            stop_token_ids=frozenset((VOCAB_SIZE,)),
            max_total_tokens=length + longest,
            seed=0,
        )
        self._num_arrived += 1
        self.scheduler.add(group)

    def step(self) -> float:
        """Run one step and return the seconds that schedule and update took."""
        started = perf_counter()
        output = self.scheduler.schedule()
        scheduled = perf_counter()
        sampled = SampledTokens(self._tokens[: len(output.sampling)])
        resumed = perf_counter()
        updated = self.scheduler.update(output, sampled)
        seconds = perf_counter() - resumed + scheduled - started
        for sequence in updated:
            if sequence.is_finished:
                self._arrive(first=False)
        return seconds


def measure(num_running: int, num_blocks: int, block_size: int, num_steps: int, *, steady: bool) -> dict[str, Any]:
    """Return the distribution of one step's cost in microseconds."""
    load = Load(num_running, num_blocks, block_size, steady=steady)
    gc.collect()
    gc.freeze()  # as Ray Serve does when a replica is ready
    for _ in range(num_steps // 10):
        load.step()
    seconds = sorted(load.step() for _ in range(num_steps))
    return {
        "load": "steady decode" if steady else "arrivals and departures",
        "running": num_running,
        "num_blocks": num_blocks,
        "block_size": block_size,
        "steps": num_steps,
        "median_us": round(1e6 * statistics.median(seconds), 1),
        "p99_us": round(1e6 * seconds[int(0.99 * num_steps)], 1),
        "max_us": round(1e6 * seconds[-1], 1),
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table, and write JSON to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--running", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--num-blocks", type=int, default=100_000)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    cases = [(running, args.num_blocks, steady) for steady in (True, False) for running in args.running]
    cases += [(args.running[-1], args.num_blocks * factor, True) for factor in (2, 4)]
    results = []
    print(f"{'load':24} {'running':>8} {'blocks':>8} {'median us':>10} {'p99 us':>8} {'max us':>8}")
    for running, num_blocks, steady in cases:
        one = measure(running, num_blocks, args.block_size, args.steps, steady=steady)
        results.append(one)
        print(f"{one['load']:24} {running:8} {num_blocks:8} {one['median_us']:10} {one['p99_us']:8} {one['max_us']:8}")
    if args.out:
        args.out.write_text(json.dumps({"machine": describe(torch.device("cpu")), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
