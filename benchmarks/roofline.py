"""What this machine's memory and arithmetic allow at most, measured, and from it the least time of each workload.

    python -m benchmarks.roofline --model DIR --out roofline.json

Prints the rates of every kind of packed linear (benchmarks/limits/linear_rates.py): bytes of weights a second at one
row, and FLOP/s at more. The limits are computed from those of torch's bf16 linear.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.limits.linear_rates import TORCH, linears, measure_rates, measure_read_gb_s
from benchmarks.limits.model_shape import ModelShape
from benchmarks.limits.rates import Rates
from benchmarks.limits.roofline import Roofline
from benchmarks.machine import describe
from benchmarks.result_file import write_result
from benchmarks.workloads import SHAPES, make

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table of rates and one of limits, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description="What this machine's memory and arithmetic allow at most.")
    parser.add_argument("--model", required=True, help="directory of a checkpoint; only config.json is read")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    _print_limits(Path(options.model), options.out)


def _print_limits(model: Path, out: Path | None) -> None:
    shape = ModelShape.from_checkpoint(model)
    read_gb_s = measure_read_gb_s()
    rates = {name: measure_rates(shape, *packing) for name, packing in linears().items()}
    print(f"reading a large buffer: {read_gb_s:.1f} GB/s")
    _print_rates(rates)
    roofline = Roofline(shape, rates[TORCH])
    limits = {name: roofline.limit(make(name)) for name in SHAPES}
    print(f"\n{'workload':10} {'tokens/s':>9} {'linears only':>13}    prefill + decode + KV, s")
    for name, limit in limits.items():
        times = f"{limit.prefill_s:.2f} + {limit.decode_s:.2f} + {limit.kv_s:.2f}"
        print(f"{name:10} {limit.tokens_per_s:9.1f} {limit.linear_tokens_per_s:13.1f}    {times}")
    if out:
        document: dict[str, Any] = {
            "machine": describe(torch.device("cpu")),
            "model": model.name,
            "read_gb_s": read_gb_s,
            "rates": asdict(rates[TORCH]),
            "rates_by_linear": {name: asdict(rate) for name, rate in rates.items()},
            "limits": {name: limit.to_json() for name, limit in limits.items()},
        }
        write_result(out, document)


def _print_rates(rates: dict[str, Rates]) -> None:
    print(f"{'':>14}" + "".join(f"{name:>13}" for name in rates))
    print(f"{'weights, GB/s':>14}" + "".join(f"{rate.weights_gb_s:13.1f}" for rate in rates.values()))
    for rows in next(iter(rates.values())).gflop_s:
        print(f"{f'GFLOP/s at {rows}':>14}" + "".join(f"{rate.gflop_s[rows]:13.0f}" for rate in rates.values()))


if __name__ == "__main__":
    main()
