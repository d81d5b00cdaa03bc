"""How many tokens fit where layers cache different things: sliding windows, latents, and states of recurrent layers.

    python -m benchmarks.kv_memory.layer_kinds --out benchmarks/results/layer_kinds.json

Sequences of one length get their pages from the engine's own BlockManager, without a model, until no more fit. The
tokens that they hold are compared with what arithmetic allows: the memory divided by the bytes that one sequence must
keep. Beside it stands the layout that keeps the keys and values of all layers for every token.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.result_file import write_result
from engine.kv.block_manager import BlockManager
from engine.kv.growth import Growth
from engine.kv.layer_cache import KeyValue, Latent, LayerCache, SharedWith, State, TokenCache, without_windows
from engine.kv.pool_sizes import PageSizes, PoolSizes
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.sequence import SequenceGroup
from kernels.attention.window import most_keys

BLOCK_SIZE, STEP_TOKENS, ELEMENT_SIZE = 16, 2048, 2
CONTEXTS = (1024, 8192, 65_536)
MAX_NUM_SEQS = 4096
MEMORY = {
    "gemma3-27b": 64 * 2**30,
    "gpt-oss-20b": 32 * 2**30,
    "qwen3.5-9b": 64 * 2**30,
    "deepseek-v3": 32 * 2**30,
    "gemma4-26b-a4b": 32 * 2**30,
    "gemma4-e4b": 32 * 2**30,
}


def gemma3_27b() -> list[LayerCache]:
    """62 layers, of which every sixth attends to everything."""
    return [KeyValue(16, 128, 128, None if (layer + 1) % 6 == 0 else 1024) for layer in range(62)]


def gpt_oss_20b() -> list[LayerCache]:
    """24 layers, of which every second attends to everything."""
    return [KeyValue(8, 64, 64, 128 if layer % 2 == 0 else None) for layer in range(24)]


def qwen3_5_9b() -> list[LayerCache]:
    """32 layers, of which every fourth is attention; the states of the others."""
    state = State(((3, 2 * 16 * 128 + 32 * 128), (32, 128, 128)))
    return [KeyValue(4, 256, 256) if (layer + 1) % 4 == 0 else state for layer in range(32)]


def deepseek_v3() -> list[LayerCache]:
    """61 layers of latent attention."""
    return [Latent(512, 64)] * 61


def gemma4_26b_a4b() -> list[LayerCache]:
    """30 layers, of which every sixth attends to everything, with fewer and wider heads."""
    return [KeyValue(2, 512, 512) if (layer + 1) % 6 == 0 else KeyValue(8, 256, 256, 1024) for layer in range(30)]


def gemma4_e4b() -> list[LayerCache]:
    """42 layers, of which the last 18 read the keys and values of the last ones before them."""
    own = [KeyValue(2, 512, 512) if (layer + 1) % 6 == 0 else KeyValue(2, 256, 256, 512) for layer in range(24)]
    return [*own, *(SharedWith(23 if (layer + 1) % 6 == 0 else 22) for layer in range(24, 42))]


SHAPES = {
    "gemma3-27b": gemma3_27b,
    "gpt-oss-20b": gpt_oss_20b,
    "qwen3.5-9b": qwen3_5_9b,
    "deepseek-v3": deepseek_v3,
    "gemma4-26b-a4b": gemma4_26b_a4b,
    "gemma4-e4b": gemma4_e4b,
}


@dataclass(frozen=True)
class Capacity:
    """What fits of one shape and context.

    Attributes:
        share: tokens held, of those that arithmetic allows.
        all_layers_kept: tokens that fit with the keys and values of all layers kept, and the same states.
    """

    shape: str
    context: int
    memory_gib: float
    sequences: int
    tokens: int
    allowed: int
    share: float
    all_layers_kept: int


def measure(name: str, context: int, num_snapshots: int) -> Capacity:
    """Run sequences of ``context`` tokens until no more fit."""
    layers, memory = SHAPES[name](), MEMORY[name]
    sizes = PageSizes.of(layers, BLOCK_SIZE, ELEMENT_SIZE)
    pools = sizes.divide(
        memory,
        num_tokens=context,
        max_model_len=context,
        max_num_seqs=MAX_NUM_SEQS,
        max_step_tokens=STEP_TOKENS,
        num_snapshots=num_snapshots,
    )
    assert sizes.num_bytes(pools) <= memory
    sequences = _most_running(sizes, pools, context)
    allowed = memory // _least_bytes(layers, context) * context
    kept = PageSizes.of(without_windows(layers), BLOCK_SIZE, ELEMENT_SIZE)
    return Capacity(
        shape=name,
        context=context,
        memory_gib=memory / 2**30,
        sequences=sequences,
        tokens=sequences * context,
        allowed=allowed,
        share=sequences * context / allowed,
        all_layers_kept=memory // kept.bytes_of_sequence(context) * context,
    )


def _least_bytes(layers: Sequence[LayerCache], context: int) -> int:
    """Return what a sequence must keep: every token within each layer's reach, and one state."""
    num_bytes = 0
    for layer in layers:
        if isinstance(layer, TokenCache):
            num_tokens = context if layer.window is None else min(context, most_keys(layer.window))
            num_bytes += num_tokens * layer.elements_per_token * ELEMENT_SIZE
        elif isinstance(layer, State):
            num_bytes += layer.elements * 4
    return num_bytes


def _most_running(sizes: PageSizes, pools: PoolSizes, context: int) -> int:
    """Return how many sequences fit, one after the other, in chunks of a step."""
    windows = [(window, count) for (window, _), count in zip(sizes.windows, pools.num_window_pages, strict=True)]
    blocks = BlockManager(
        pools.num_blocks,
        BLOCK_SIZE,
        windows=windows,
        num_slots=pools.num_slots,
        num_snapshots=pools.num_snapshots,
        enable_prefix_caching=False,
    )
    limit = MAX_NUM_SEQS if blocks.states is None else blocks.states.max_used
    for index in range(limit):
        sequence = _request(index, context).sequences[0]
        blocks.take_prefix(sequence, blocks.match_prefix(sequence))
        while sequence.num_computed_tokens < context:
            end = min(context, sequence.num_computed_tokens + STEP_TOKENS)
            if not blocks.can_grow([Growth(sequence, end)]):
                return index
            blocks.allocate(sequence, end)
            sequence.num_computed_tokens = end
            blocks.slide([sequence])
    return limit


def _request(arrival: int, context: int) -> SequenceGroup:
    return SequenceGroup(
        EngineRequest(str(arrival), [1] * context, SamplingParams(max_tokens=1)),
        arrival=arrival,
        root=0,
        stop_token_ids=frozenset(),
        max_total_tokens=context + 1,
        seed=0,
    )


def main() -> None:
    """Measure every shape and context, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    rows = [measure(name, context, num_snapshots=0) for name in SHAPES for context in CONTEXTS]
    for row in rows:
        print(
            f"{row.shape:14} {row.context:6,} tokens: {row.tokens:9,} of {row.allowed:9,} fit, {row.share:.3f}; "
            f"with all layers kept {row.all_layers_kept:9,}"
        )
    if args.out:
        write_result(args.out, {"capacity": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
