"""What a step costs the host of a GPU: schedule, plan, inputs and update, with a model that computes nothing.

    python -m benchmarks.scheduler [--running 16 64 256 1024] [--num-blocks 100000] [--out results.json]
    python -m benchmarks.scheduler --context 4096 --running 256 1024 --steps 200 [--out results.json]

Sequences decode; a finished one is replaced at once, so that the batch keeps its size and some steps mix decodes with a
prefill, as on a busy server. Prompts have random lengths, or ``--context`` tokens. The prefix cache is on and every
full block is published. Without ``--context``, block counts are compared at one batch size to show that the cost does
not grow with the pool.

Steps overlap, as on a GPU: one is scheduled before the last one's tokens are known. Steps that only decode fill the
static inputs of a CUDA graph, the others make tensors. One thread does everything, and the memory is a CPU's: what the
driver takes to start a copy or a kernel is not in it.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

from benchmarks.machine import describe
from benchmarks.result_file import write_result
from engine.kv.block_manager import BlockManager
from engine.kv.block_tables import BlockTables
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput
from engine.sequence import SequenceGroup
from engine.worker.graphs.batch_shape import BatchShape, decode_sizes
from engine.worker.graphs.static_inputs import StaticInputs, make_slab
from engine.worker.step_plan import StepPlan
from engine.worker.step_planner import StepPlanner

VOCAB_SIZE = 150_000
PREFILL_TOKENS = 8192  # of a step, beside the decodes
LONGEST_RANDOM = 512  # tokens of a prompt, or of an answer
CPU = torch.device("cpu")


class StepCost(NamedTuple):
    """Seconds of one step on the host."""

    schedule: float  # and update
    plan: float
    inputs: float  # copies' preparation

    @property
    def total(self) -> float:
        """Seconds of all parts."""
        return sum(self)


class Load:
    """A scheduler that always has ``num_running`` sequences to run.

    Args:
        num_running: sequences.
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        max_blocks: blocks of a sequence, at most.
        context: tokens of each prompt; 0: random lengths.
        steady: no sequence ends.
    """

    def __init__(
        self, num_running: int, num_blocks: int, block_size: int, *, max_blocks: int, context: int, steady: bool
    ) -> None:
        self._random = random.Random(0)
        self._blocks = BlockManager(num_blocks, block_size)
        self.scheduler = Scheduler(
            self._blocks, max_num_seqs=num_running, max_num_batched_tokens=PREFILL_TOKENS + num_running
        )
        self._num_arrived = 0
        self._context = context
        self._steady = steady
        # Prompts are computed at twice the rate at which sequences end: at less, the batch would never fill.
        self._longest = max(LONGEST_RANDOM, 4 * num_running * context // PREFILL_TOKENS)
        self._planner = StepPlanner(block_size, num_running, max_blocks)
        self._tables = BlockTables(num_running, max_blocks, CPU)
        self._graphs = self._graph_inputs(num_running)
        self._in_flight: SchedulerOutput | None = None
        self._tokens = [self._random.randrange(VOCAB_SIZE) for _ in range(num_running)]
        for _ in range(num_running):
            self._arrive(first=True)
        while len(self.scheduler.running) < num_running or (steady and self._is_prefilling):
            self.step()

    def _graph_inputs(self, num_running: int) -> dict[int, StaticInputs]:
        shapes = {size: BatchShape(size) for size in decode_sizes(num_running)}
        slab = make_slab(list(shapes.values()), num_running, CPU)
        return {
            size: StaticInputs(shape, slab, self._tables, self._blocks.block_size) for size, shape in shapes.items()
        }

    @property
    def _is_prefilling(self) -> bool:
        return any(item.remaining_tokens > 1 for item in self.scheduler.running)

    def _arrive(self, *, first: bool) -> None:
        length = self._context or self._random.randint(64, LONGEST_RANDOM)
        longest = 10**6 if self._steady else self._random.randint(16 if first else 64, self._longest)
        prompt = [self._random.randrange(VOCAB_SIZE) for _ in range(length)]
        request = EngineRequest(str(self._num_arrived), prompt, SamplingParams(max_tokens=None))
        group = SequenceGroup(
            request,
            arrival=self._num_arrived,
            root=request.cache_root("null"),
            stop_token_ids=frozenset((VOCAB_SIZE,)),
            max_total_tokens=length + longest,
            seed=0,
        )
        self._num_arrived += 1
        self.scheduler.add(group)

    def step(self) -> StepCost:
        """Run one step and return its cost."""
        started = perf_counter()
        output = self.scheduler.schedule()
        scheduled = perf_counter()
        plan = self._planner.plan(output)
        planned = perf_counter()
        self._make_inputs(plan)
        inputs_ready = perf_counter()
        before, self._in_flight = self._in_flight, output
        sampled = None if before is None else SampledTokens(self._tokens[: len(before.sampling)])
        resumed = perf_counter()
        updated = [] if before is None or sampled is None else self.scheduler.collect(before, sampled, output)
        self.scheduler.launch(output)
        schedule = perf_counter() - resumed + scheduled - started
        for sequence in updated:
            if sequence.is_finished:
                self._arrive(first=False)
        return StepCost(schedule, planned - scheduled, inputs_ready - planned)

    def _make_inputs(self, plan: StepPlan) -> None:
        num_seqs = len(plan.seq_lens)
        if plan.num_decodes == num_seqs and num_seqs:
            size = next(size for size in self._graphs if size >= num_seqs)
            self._graphs[size].load(plan)
        else:
            plan.to_device(self._tables, self._blocks.block_size)


def measure(
    num_running: int, num_blocks: int, block_size: int, num_steps: int, *, context: int, steady: bool
) -> dict[str, Any]:
    """Return the medians of a step's parts, and the distribution of their sum, in microseconds."""
    prompt = context or LONGEST_RANDOM
    # A steady sequence decodes while the other prompts are computed, and then in every step.
    num_prefills = num_running * prompt // PREFILL_TOKENS  # steps
    max_len = prompt + max(LONGEST_RANDOM, 4 * num_prefills, num_prefills + 2 * num_running + 2 * num_steps)
    max_blocks = max_len // block_size + 1
    if context:
        num_blocks = max(num_blocks, num_running * max_blocks)
    load = Load(num_running, num_blocks, block_size, max_blocks=max_blocks, context=context, steady=steady)
    gc.collect()
    gc.freeze()  # as Ray Serve does when a replica is ready
    for _ in range(num_steps // 10):
        load.step()
    costs = [load.step() for _ in range(num_steps)]
    gc.unfreeze()
    totals = sorted(cost.total for cost in costs)
    medians = {part: statistics.median(getattr(cost, part) for cost in costs) for part in StepCost._fields}
    return {
        "load": "steady decode" if steady else "arrivals and departures",
        "running": num_running,
        "context": context or "random",
        "num_blocks": num_blocks,
        "block_size": block_size,
        "steps": num_steps,
        **{f"{part}_us": round(1e6 * seconds, 1) for part, seconds in medians.items()},
        "median_us": round(1e6 * statistics.median(totals), 1),
        "p99_us": round(1e6 * totals[int(0.99 * num_steps)], 1),
        "max_us": round(1e6 * totals[-1], 1),
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table, and write JSON to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--running", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--context", type=int, default=0, help="tokens of each prompt (default: random, 64 to 512)")
    parser.add_argument("--num-blocks", type=int, default=100_000)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cases = [(running, args.num_blocks, steady) for steady in (True, False) for running in args.running]
    if not args.context:
        cases += [(args.running[-1], args.num_blocks * factor, True) for factor in (2, 4)]
    figures = ("schedule_us", "plan_us", "inputs_us", "median_us", "p99_us", "max_us")
    results = []
    print(f"{'load':24} {'running':>8} {'blocks':>8}" + "".join(f"{figure:>12}" for figure in figures))
    for running, num_blocks, steady in cases:
        result = measure(running, num_blocks, args.block_size, args.steps, context=args.context, steady=steady)
        results.append(result)
        print(
            f"{result['load']:24} {running:8} {result['num_blocks']:8}"
            + "".join(f"{result[name]:12}" for name in figures)
        )
    if args.out:
        write_result(args.out, {"machine": describe(CPU), "results": results})


if __name__ == "__main__":
    main()
