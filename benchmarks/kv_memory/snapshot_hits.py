"""The share of a trace's prompt tokens that snapshots of states save, beside snapshots at every block.

    python -m benchmarks.kv_memory.snapshot_hits --out benchmarks/results/snapshot_hits.json

The first requests of Mooncake's conversation trace pass through the engine's own BlockManager, one after the other,
with the sizes of Qwen3.5-9B's keys, values and states: without snapshots within prompts, with those of the default
interval, and with about twice as many. The other figure is that of a model without states whose pool
has as many blocks: all that is cached can be resumed.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.kv_memory.layer_kinds import ELEMENT_SIZE, qwen3_5_9b
from benchmarks.result_file import write_result
from engine.kv.block_manager import BlockManager
from engine.kv.pool_sizes import PageSizes, PoolSizes
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence, SequenceGroup

TRACE = Path("../shared/traces/mooncake_conversation.jsonl")
BLOCK_SIZE = 512  # as in the trace: smaller blocks would end within one of its hashes
STEP_TOKENS, TYPICAL_TOKENS, MAX_MODEL_LEN, MAX_NUM_SEQS = 2048, 8192, 131_072, 256
NUM_REQUESTS = 4000
MEMORIES = (32 * 2**30, 64 * 2**30, 128 * 2**30)


@dataclass(frozen=True)
class Hits:
    """What a pool of this memory saves.

    Attributes:
        snapshot_gib: of the memory, what the slots take that are not for running sequences.
        interval: tokens of a prefill after each of which a snapshot is kept; 0: none.
        hit_rate: share of the prompt tokens that were not computed.
        every_block: the same if every cached block could be resumed.
        share: the first of the second.
    """

    memory_gib: float
    num_snapshots: int
    snapshot_gib: float
    interval: int
    hit_rate: float
    every_block: float
    share: float


def requests(path: Path) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the prompt and the answer of each request as tokens: equal hashes are equal tokens."""
    fresh = itertools.count(2**20)
    with path.open(encoding="utf-8") as lines:
        for line in itertools.islice(lines, NUM_REQUESTS):
            fields = json.loads(line)
            prompt = [token for number in fields["hash_ids"] for token in [number] * BLOCK_SIZE]
            yield prompt[: fields["input_length"]], [next(fresh)] * fields["output_length"]


def hit_rate(blocks: BlockManager, path: Path) -> float:
    """Return the share of prompt tokens that are not computed."""
    num_cached = num_tokens = 0
    for arrival, (prompt, answer) in enumerate(requests(path)):
        sequence = _sequence(arrival, prompt)
        blocks.take_prefix(sequence, blocks.match_prefix(sequence))
        num_cached += sequence.num_computed_tokens
        num_tokens += len(prompt)
        while sequence.num_computed_tokens < len(prompt):
            _compute(blocks, sequence, min(len(prompt), sequence.num_computed_tokens + STEP_TOKENS))
        for token_id in answer:
            sequence.token_ids.append(token_id)
            if sequence.num_computed_tokens >= sequence.next_block_boundary:
                _compute(blocks, sequence, sequence.num_tokens)
            sequence.num_computed_tokens = sequence.num_tokens
        blocks.free(sequence)
    return num_cached / num_tokens


def _compute(blocks: BlockManager, sequence: Sequence, num_tokens: int) -> None:
    blocks.allocate(sequence, num_tokens)
    if blocks.states is not None:
        blocks.states.take_copies()
    sequence.num_computed_tokens = num_tokens


def _sequence(arrival: int, prompt: list[int]) -> Sequence:
    group = SequenceGroup(
        EngineRequest(str(arrival), prompt, SamplingParams()),
        arrival=arrival,
        root=0,
        stop_token_ids=frozenset(),
        max_total_tokens=2**30,
        seed=0,
    )
    return group.sequences[0]


def measure(memory: int, path: Path, num_snapshots: int = 2) -> Iterator[Hits]:
    """Replay the trace without states, then with them and snapshots at several intervals."""
    sizes = PageSizes.of(qwen3_5_9b(), BLOCK_SIZE, ELEMENT_SIZE)
    pools = sizes.divide(
        memory,
        num_tokens=TYPICAL_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        max_step_tokens=STEP_TOKENS,
        num_snapshots=num_snapshots,
    )
    every_block = hit_rate(_blocks(PoolSizes(pools.num_blocks), 0), path)
    num_spare = pools.num_slots * num_snapshots // (1 + num_snapshots)
    default = sizes.snapshot_interval(pools, None)
    for interval in (0, default, sizes.snapshot_interval(pools, default // 2)):
        with_states = hit_rate(_blocks(pools, interval), path)
        yield Hits(
            memory_gib=memory / 2**30,
            num_snapshots=num_spare,
            snapshot_gib=num_spare * sizes.slot / 2**30,
            interval=interval,
            hit_rate=with_states,
            every_block=every_block,
            share=with_states / every_block,
        )


def _blocks(pools: PoolSizes, interval: int) -> BlockManager:
    return BlockManager(
        pools.num_blocks,
        BLOCK_SIZE,
        num_slots=pools.num_slots,
        num_snapshots=pools.num_snapshots,
        snapshot_interval=interval,
    )


def main() -> None:
    """Replay the trace for every memory, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE, help=f"JSON lines; default: {TRACE}")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    rows = []
    for memory in MEMORIES:
        for row in measure(memory, args.trace):
            rows.append(row)
            print(json.dumps(asdict(row)), flush=True)
    if args.out:
        write_result(args.out, {"num_requests": NUM_REQUESTS, "hits": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
