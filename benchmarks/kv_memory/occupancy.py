"""The use of the slots of a KV pool while requests wait for it, averaged over steps.

All requests arrive at the start, and each step computes the whole prompt of a new request or one token of a running
one. Steps count from when a fifth of the requests has finished, so that the batch is mixed, to when the queue is empty.
Contiguous pieces are simulated here; pages are the engine's own Scheduler and BlockManager.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass

from benchmarks.kv_memory.buddy_allocator import BuddyAllocator
from benchmarks.kv_memory.length_traces import Lengths
from engine.kv.block_manager import BlockManager
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.scheduler_output import SampledTokens
from engine.sequence import SequenceGroup

__all__ = ["Occupancy", "next_power_of_two", "simulate_contiguous", "simulate_paged"]

_WARM_UP = 0.2  # of the requests


@dataclass
class Occupancy:
    """Slots summed over the measured steps. The first five add up to the pool; the names are the paper's.

    Attributes:
        tokens: slots that hold a token's keys and values.
        reserved: allocated for tokens that this request will generate.
        internal: allocated and never used by this request.
        external: lost to the allocator's rounding.
        free: not allocated, though a request waits; between contiguous pieces this is external fragmentation too.
        running: requests in the batch.
        preemptions: requests that were preempted and recomputed.
    """

    pool: int
    steps: int = 0
    tokens: int = 0
    reserved: int = 0
    internal: int = 0
    external: int = 0
    free: int = 0
    running: int = 0
    preemptions: int = 0

    def shares(self) -> dict[str, float]:
        """Return every use as a share of the pool, and tokens as a share of what is allocated."""
        slots = self.pool * self.steps
        names = ("tokens", "reserved", "internal", "external", "free")
        of_pool = {name: getattr(self, name) / slots for name in names}
        return of_pool | {
            "tokens_of_allocated": self.tokens / (slots - self.free),
            "mean_batch": self.running / self.steps,
        }

    def to_json(self) -> dict[str, object]:
        """Return the shares and the sums they are computed from."""
        return {**self.shares(), "sums": asdict(self)}


def next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()


def simulate_contiguous(requests: list[Lengths], pool: int, reserve: Callable[[Lengths], int]) -> Occupancy:
    """Serve the requests first come, first served, each in one piece of ``reserve(request)`` slots."""
    occupancy = Occupancy(pool)
    allocator = BuddyAllocator(pool)
    waiting = deque(requests)
    running: list[tuple[int, int, Lengths]] = []  # heap of (last step, address, request)
    tokens = to_come = allocated = finished = step = 0
    while waiting:
        tokens += len(running)
        to_come -= len(running)
        while waiting and (address := allocator.allocate(reserve(waiting[0]))) is not None:
            request = waiting.popleft()
            heapq.heappush(running, (step + request.output - 1, address, request))
            tokens += request.prompt
            to_come += request.output
            allocated += reserve(request)
        assert running, "a request does not fit into the pool"
        if waiting and finished >= _WARM_UP * len(requests):
            occupancy.steps += 1
            occupancy.running += len(running)
            occupancy.tokens += tokens
            occupancy.reserved += to_come
            occupancy.internal += allocated - tokens - to_come
            occupancy.external += pool - allocator.num_free - allocated
            occupancy.free += allocator.num_free
        while running and running[0][0] == step:
            _, address, request = heapq.heappop(running)
            allocator.free(address)
            tokens -= request.total - 1  # the last token is sampled, its keys and values are never computed
            to_come -= 1
            allocated -= reserve(request)
            finished += 1
        step += 1
    return occupancy


def simulate_paged(requests: list[Lengths], pool: int, block_size: int) -> Occupancy:
    """Serve the requests with the engine's scheduler and block manager; answers have the lengths of the trace."""
    blocks = BlockManager(
        pool // block_size, block_size, enable_prefix_caching=False
    )  # unrelated prompts share nothing
    scheduler = Scheduler(blocks, max_num_seqs=len(requests), max_num_batched_tokens=pool)
    for arrival, request in enumerate(requests):
        scheduler.add(_group(request, arrival))
    occupancy = Occupancy(len(blocks.pool.blocks) * block_size)
    finished = 0
    while scheduler.waiting:
        output = scheduler.schedule()
        if scheduler.waiting and finished >= _WARM_UP * len(requests):
            used = blocks.pool.counts().used * block_size
            tokens = sum(item.num_computed_tokens for item in output.sequences) + output.num_tokens
            occupancy.steps += 1
            occupancy.running += len(output.sequences)
            occupancy.tokens += tokens
            occupancy.internal += used - tokens
            occupancy.free += occupancy.pool - used
            occupancy.preemptions += len(output.preempted)
        updated = scheduler.update(output, SampledTokens([0] * len(output.sampling)))
        finished += sum(sequence.is_finished for sequence in updated)
    return occupancy


def _group(request: Lengths, arrival: int) -> SequenceGroup:
    return SequenceGroup(
        EngineRequest(str(arrival), [0] * request.prompt, SamplingParams()),
        arrival=arrival,
        root=0,
        stop_token_ids=frozenset(),
        max_total_tokens=request.total,
        seed=0,
    )
