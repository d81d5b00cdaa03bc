"""The production routing policy beside those of other systems: ``python -m benchmarks.routing.simulate``.

Prints tables, writes ``benchmarks/results/routing.json`` and a plot beside it. README.md says what is modelled.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.result_file import write_result
from benchmarks.routing.experiments import (
    compare,
    generated,
    leave_one_out,
    others,
    shared_steps,
    sweeps,
    transfers,
    tune,
)
from deployments.routing.options import RoutingOptions

__all__ = ["main"]

TRACE = "../shared/traces/mooncake_conversation.jsonl"


def main() -> None:
    """Run the chosen parts; the JSON keeps its results of the other parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", default=TRACE, help="the Mooncake conversation trace")
    parser.add_argument("--seeds", type=int, default=5, help="spreads of the trace's timestamps")
    parser.add_argument("--other-seeds", type=int, default=5, help="for the baselines that are not in the goals")
    parser.add_argument("--processes", type=int, default=2)
    parts = ["tune", "compare", "shared", "generated", "sweeps", "others", "transfers", "leave one out"]
    parser.add_argument("--parts", nargs="+", default=parts)
    parser.add_argument("--sweep-requests", type=int, default=None, help="number of requests of the trace")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/routing.json"))
    args = parser.parse_args()
    results: dict[str, Any] = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    results["options"] = asdict(RoutingOptions())
    for part in args.parts:
        if part == "tune":
            results[part] = tune(args.trace, args.processes, args.sweep_requests)
        elif part == "compare":
            results[part] = compare(args.trace, args.seeds, args.processes, results.get("tune", {}))
        elif part == "shared":
            results[part] = shared_steps(args.trace, args.seeds, args.processes)
        elif part == "generated":
            results[part] = generated(args.trace, args.seeds, args.processes)
        elif part == "others":
            results[part] = others(args.trace, args.other_seeds, args.processes, results.get("tune", {}))
        elif part == "transfers":
            results[part] = transfers(args.trace, args.seeds, args.processes)
        elif part == "sweeps":
            results[part] = sweeps(args.trace, args.processes, args.sweep_requests)
        elif part == "leave one out":
            results[part] = leave_one_out(args.trace, args.processes)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_result(args.out, results)
        if part == "leave one out":
            print(f"\n{part}\n" + "\n".join(f"{trace}: {row}" for trace, row in results[part].items()), flush=True)
        elif part != "tune":
            print(f"\n{part}\n" + "\n".join(table(results[part])), flush=True)
    if "compare" in args.parts:
        from benchmarks.routing.plot import plot  # needs matplotlib, the extra `bench`

        plot(results, args.out.with_suffix(".png"))


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of a table: means, and the 95% interval's half width where there are several seeds."""
    lines = [
        f"{'policy':<46} {'hit %':>12} {'LRU, infinite':>18} {'TTFT mean':>13} {'p90 s':>13} {'p99':>7} {'ghosts':>6} "
        f"{'whole s':>13} {'ms/token':>8}"
    ]
    for row in rows:
        limits = f"{row['bounds']['pooled']:.1%} {row['bounds']['infinite']:.1%}"
        lines.append(
            f"{row['label']:<46} {_cell(row['hit'], 100):>12} {limits:>18} {_cell(row['ttft_mean']):>13} "
            f"{_cell(row['ttft_p90']):>13} {row['ttft_p99']['mean']:7.2f} {row['ghosts']['mean']:6.0f} "
            f"{_cell(row['whole_mean']) if 'whole_mean' in row else '':>13} "
            f"{row['token_ms']['mean'] if 'token_ms' in row else 0:8.1f}"
        )
        if (bound := row["bounds"].get("pooled_queue")) is not None:
            lines.append(
                f"{'':<6}p50 {_cell(row['ttft_p50'])}; one pooled cache, shortest queue: hit {bound['hit']:.1%}, "
                f"mean {bound['ttft_mean']:.2f}, p50 {bound['ttft_p50']:.2f}, p90 {bound['ttft_p90']:.2f}"
            )
    return lines


def _cell(figure: dict[str, float], factor: float = 1.0) -> str:
    return f"{figure['mean'] * factor:.2f}" + (f" ±{figure['ci95'] * factor:.2f}" if figure["ci95"] else "")


if __name__ == "__main__":
    main()
