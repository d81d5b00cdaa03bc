"""The share of KV memory that holds tokens, and the blocks that sharing saves.

Reproduces figures 2 and 15 of the PagedAttention paper.

    python -m benchmarks.kv_utilization --out result.json
    python -m benchmarks.kv_utilization --trace requests.jsonl    # fields input_length and output_length

Four ways of reserving memory serve the same queue from the same pool. Contiguous pieces come from a buddy allocator,
as the paper (Kwon et al., 2023) assumes for Orca; paged memory is that of the engine's scheduler and block manager.
The default pool is the paper's: 12 GiB of OPT-13B's keys and values are 15,728 tokens. Time is counted in steps.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.kv_memory.length_traces import DATASETS, Lengths, read_trace, synthetic_trace
from benchmarks.kv_memory.occupancy import Occupancy, next_power_of_two, simulate_contiguous, simulate_paged
from benchmarks.kv_memory.sharing import SharedBlocks, beam_search_savings, parallel_savings
from benchmarks.machine import describe
from benchmarks.result_file import write_result

__all__ = ["main", "measure_sharing", "measure_utilization"]

BLOCK_SIZES = (16, 256)
WIDTHS = (2, 4, 6)
SHARING_REQUESTS = 300
PAPER_TOKENS = {"contiguous, maximum": 0.204, "contiguous, power of two": 0.268, "contiguous, oracle": 0.382}
PAPER_TOKENS |= {"blocks of 16": 0.963}  # figure 2: Orca (Max), Orca (Pow2), Orca (Oracle), vLLM
PAPER_SAVED = {  # figure 15, for 2 and for 6 continuations, block size 16
    "sharegpt": {"parallel": (0.162, 0.305), "beam": (0.443, 0.663)},
    "alpaca": {"parallel": (0.061, 0.098), "beam": (0.376, 0.552)},
}


def measure_utilization(requests: list[Lengths], pool: int, max_length: int) -> dict[str, Occupancy]:
    """Serve the requests under every way of reserving memory.

    Raises:
        ValueError: if the pool is too small for the longest request, or so large that no request ever waits.
    """
    largest_piece = max(next_power_of_two(max_length), *(-(-max_length // size) * size for size in BLOCK_SIZES))
    if largest_piece > pool:
        raise ValueError(f"a pool of {pool} tokens has no room for a piece of {largest_piece}; raise --pool-tokens")

    def to_power_of_two(request: Lengths) -> int:
        return min(max_length, request.prompt + next_power_of_two(request.output))

    results = {
        "contiguous, maximum": simulate_contiguous(requests, pool, lambda request: max_length),
        "contiguous, power of two": simulate_contiguous(requests, pool, to_power_of_two),
        "contiguous, oracle": simulate_contiguous(requests, pool, lambda request: request.total),
    }
    results |= {f"blocks of {size}": simulate_paged(requests, pool, size) for size in BLOCK_SIZES}
    for name, occupancy in results.items():
        if not occupancy.steps:
            raise ValueError(
                f"no request waits for the {pool} tokens ({name}); raise --requests or lower --pool-tokens"
            )
    return results


def measure_sharing(requests: list[Lengths], block_size: int, seed: int) -> dict[str, dict[int, float]]:
    """Return the share of blocks that parallel samples and beams save, by their number."""
    longest = max(request.total for request in requests)
    pools = {n: SharedBlocks(block_size, longest, n) for n in WIDTHS}
    return {
        "parallel": {n: parallel_savings(requests, n, pool) for n, pool in pools.items()},
        "beam": {n: beam_search_savings(requests, n, pool, seed=seed) for n, pool in pools.items()},
    }


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        description="Share of KV memory that holds tokens, and the blocks that sharing saves."
    )
    parser.add_argument(
        "--trace", type=Path, help="JSONL with input_length and output_length, instead of synthetic lengths"
    )
    parser.add_argument("--dataset", choices=sorted(DATASETS), default="sharegpt", help="what to resemble")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--max-length", type=int, help="context length; of a trace, by default, its longest request's")
    parser.add_argument("--pool-tokens", type=int, help="default: 15728, or eight times the context length of a trace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    options = parser.parse_args(arguments)
    started = perf_counter()
    try:
        result = _run(options)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    result["seconds"] = round(perf_counter() - started, 1)
    print(f"{result['seconds']} s")
    if options.out:
        write_result(options.out, {"machine": describe(torch.device("cpu"))} | result)
    return 0


def _run(options: argparse.Namespace) -> dict[str, Any]:
    if options.trace:
        requests = read_trace(options.trace, limit=options.requests)
        max_length = options.max_length or max(request.total for request in requests)
        pool = options.pool_tokens or 8 * next_power_of_two(max_length)
        source, sharing = f"trace {options.trace.name}", {options.trace.name: requests[:SHARING_REQUESTS]}
    else:
        max_length, pool = options.max_length or 2048, options.pool_tokens or 15728
        traces = {
            name: synthetic_trace(name, options.requests, max_length=max_length, seed=options.seed) for name in DATASETS
        }
        requests, source = traces[options.dataset], f"synthetic lengths (log-normal) like {options.dataset}"
        sharing = {name: trace[:SHARING_REQUESTS] for name, trace in traces.items()}
    kept = [request for request in requests if request.total <= max_length]
    workload = {
        "source": source,
        "requests": len(kept),
        "too_long": len(requests) - len(kept),
        "mean_prompt": sum(request.prompt for request in kept) / max(1, len(kept)),
        "mean_output": sum(request.output for request in kept) / max(1, len(kept)),
        "max_length": max_length,
        "pool_tokens": pool,
        "seed": options.seed,
    }
    utilization = measure_utilization(kept, pool, max_length)
    savings = {
        name: {size: measure_sharing(trace, size, options.seed) for size in BLOCK_SIZES}
        for name, trace in sharing.items()
    }
    _print_utilization(workload, utilization, with_paper=source.endswith("sharegpt"))
    _print_sharing(savings)
    return {
        "workload": workload,
        "utilization": {name: occupancy.to_json() for name, occupancy in utilization.items()},
        "sharing": {"requests": SHARING_REQUESTS, "saved": savings},
        "paper": {"tokens": PAPER_TOKENS, "saved": PAPER_SAVED},
    }


def _print_utilization(workload: dict[str, Any], utilization: dict[str, Occupancy], *, with_paper: bool) -> None:
    print(
        f"{workload['requests']} requests, {workload['source']}: prompts of {workload['mean_prompt']:.1f} tokens and "
        f"answers of {workload['mean_output']:.1f} on average, at most {workload['max_length']} in all; "
        f"a pool of {workload['pool_tokens']} tokens"
    )
    if workload["too_long"]:
        print(f"left out: {workload['too_long']} requests longer than that")
    print("\nUse of the pool, % of its slots, averaged over the steps in which requests wait")
    print("(internal: never used; external: rounding of the buddy allocator; free: not allocated)\n")
    names = ("tokens", "reserved", "internal", "external", "free")
    titles = [*(f"{name:>9}" for name in names), "  tokens/allocated", "   batch", "  preempted", "    paper"]
    print(f"{'memory':<26}" + "".join(titles))
    for name, occupancy in utilization.items():
        shares = occupancy.shares()
        paper = PAPER_TOKENS.get(name) if with_paper else None
        print(
            f"{name:<26}"
            + "".join(f"{100 * shares[use]:>9.1f}" for use in names)
            + f"{100 * shares['tokens_of_allocated']:>18.1f}{shares['mean_batch']:>8.1f}{occupancy.preemptions:>11d}"
            + (f"{100 * paper:>9.1f}" if paper else f"{'-':>9}")
        )
    if with_paper:
        print("paper: figure 2, the share of token states with ShareGPT's real lengths; compare with the first column")
    print()


def _print_sharing(savings: dict[str, dict[int, dict[str, dict[int, float]]]]) -> None:
    print("Blocks saved by sharing, % of the blocks of n continuations of a prompt without it, over their lifetime")
    print("(beams are those of a synthetic score process, see benchmarks/kv_memory/sharing.py)\n")
    print(f"{'lengths':<28}{'blocks of':>9}  {'':<9}" + "".join(f"{f'n = {n}':>8}" for n in WIDTHS) + "   paper")
    for source, by_size in savings.items():
        for size, kinds in by_size.items():
            for kind, saved in kinds.items():
                paper = PAPER_SAVED.get(source, {}).get(kind) if size == 16 else None
                print(
                    f"{source:<28}{size:>9}  {kind:<9}"
                    + "".join(f"{100 * saved[n]:>8.1f}" for n in WIDTHS)
                    + (f"   {100 * paper[0]:.1f} to {100 * paper[1]:.1f}" if paper else "   -")
                )


if __name__ == "__main__":
    sys.exit(main())
