"""What this machine's memory and arithmetic allow at most, measured, and from it the least time of a workload.

    python -m benchmarks.roofline --model DIR --out roofline.json

The rates are those of torch's own packed bf16 linear (benchmarks/linear_rates.py): bytes of weights a second at one
row, and FLOP/s at more.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.runner import MAX_NUM_BATCHED_TOKENS
from benchmarks.workloads import SHAPES, Workload, make

__all__ = ["Limit", "ModelShape", "Rates", "Roofline"]

WEIGHT_BYTES = 2  # bfloat16


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only model that say how much there is to read and to compute."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @classmethod
    def from_checkpoint(cls, directory: str | Path) -> ModelShape:
        """Read config.json."""
        config = json.loads((Path(directory) / "config.json").read_text())
        heads = config["num_attention_heads"]
        return cls(
            config["hidden_size"],
            config["intermediate_size"],
            config["num_hidden_layers"],
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or config["hidden_size"] // heads,
            config["vocab_size"],
        )

    @property
    def layer_linears(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of one layer's four linears: QKV, attention output, gate and up, down."""
        attention = self.num_heads * self.head_dim
        return [
            (attention + 2 * self.num_kv_heads * self.head_dim, self.hidden_size),
            (self.hidden_size, attention),
            (2 * self.intermediate_size, self.hidden_size),
            (self.hidden_size, self.intermediate_size),
        ]

    @property
    def head_parameters(self) -> int:
        """Weights between the last hidden state and the logits; only rows that are sampled from need them."""
        return self.vocab_size * self.hidden_size

    @property
    def layer_parameters(self) -> int:
        """Weights of all layers' linears."""
        return self.num_layers * sum(outputs * inputs for outputs, inputs in self.layer_linears)

    @property
    def kv_bytes_per_token(self) -> int:
        """What the keys and values of one token take in all layers, in bfloat16."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * WEIGHT_BYTES


@dataclass(frozen=True)
class Rates:
    """What a machine does with packed bf16 linears.

    Attributes:
        weights_gb_s: bytes of weights that one row reads in a second.
        gflop_s: by number of rows; between two of them the rate is taken to be linear, beyond them constant.
    """

    weights_gb_s: float
    gflop_s: dict[int, float]

    @classmethod
    def from_json(cls, rates: dict[str, Any]) -> Rates:
        """Return what ``dataclasses.asdict`` made JSON of, whose keys are text."""
        return cls(rates["weights_gb_s"], {int(rows): rate for rows, rate in rates["gflop_s"].items()})

    def gflop_s_at(self, rows: int) -> float:
        """Return the rate at this number of rows."""
        known = sorted(self.gflop_s)
        if rows <= known[0] or rows >= known[-1]:
            return self.gflop_s[known[0] if rows <= known[0] else known[-1]]
        upper = next(place for place, one in enumerate(known) if one >= rows)
        low, high = known[upper - 1], known[upper]
        share = (rows - low) / (high - low)
        return self.gflop_s[low] + share * (self.gflop_s[high] - self.gflop_s[low])

    def linear_seconds(self, parameters: int, rows: int) -> float:
        """Return the least time of linears with so many weights: of reading them, or of computing with them."""
        reading = parameters * WEIGHT_BYTES / (self.weights_gb_s * 1e9)
        computing = 2 * parameters * rows / (self.gflop_s_at(rows) * 1e9)
        return max(reading, computing)


@dataclass(frozen=True)
class Limit:
    """The least time of a workload, in seconds."""

    prefill_s: float  # linears of the prompts and the logits of every prompt's last token
    decode_s: float  # linears of all further tokens
    kv_s: float  # reading keys and values once in each decode step
    output_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second at most."""
        return self.output_tokens / (self.prefill_s + self.decode_s + self.kv_s)

    @property
    def linear_tokens_per_s(self) -> float:
        """The same if attention took no time at all."""
        return self.output_tokens / (self.prefill_s + self.decode_s)

    def to_json(self) -> dict[str, float]:
        """Return the times and both rates."""
        return asdict(self) | {"tokens_per_s": self.tokens_per_s, "linear_tokens_per_s": self.linear_tokens_per_s}


class Roofline:
    """The limit of a model on a machine.

    In it: every weight of the linears read, or multiplied with, once a step; keys and values of the context read once
    a decode step; a prefix that all prompts share is computed once, and read once for all of them. Prompts are computed
    first, together, in steps of ``max_num_batched_tokens``; then each step makes a token for whoever is unfinished.
    Not in it: the arithmetic of attention, norms, rotary embedding, activations, sampling and scheduling.

    Args:
        shape: the model's.
        rates: the machine's.
        max_num_batched_tokens: tokens of prompts that one step computes, at most.
    """

    def __init__(self, shape: ModelShape, rates: Rates, max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS) -> None:
        self.shape = shape
        self.rates = rates
        self._chunk = max_num_batched_tokens

    def limit(self, workload: Workload) -> Limit:
        """Return the least time of a workload."""
        decodes = list(_decode_steps(workload))
        parameters = self.shape.layer_parameters + self.shape.head_parameters
        kv_bytes = self.shape.kv_bytes_per_token * sum(context for _, context in decodes)
        return Limit(
            self._prefill_seconds(workload),
            sum(self.rates.linear_seconds(parameters, rows) for rows, _ in decodes),
            kv_bytes / (self.rates.weights_gb_s * 1e9),
            workload.output_tokens,
        )

    def share(self, workload: Workload, output_tokens_per_s: float) -> float:
        """Return which part of the limit a result is."""
        return output_tokens_per_s / self.limit(workload).tokens_per_s

    def _prefill_seconds(self, workload: Workload) -> float:
        num_requests, shared = len(workload.requests), workload.shared_prefix
        tokens = workload.input_tokens - shared * (num_requests - 1)
        whole, rest = divmod(tokens, self._chunk)
        chunks = [self._chunk] * whole + [rest] * (rest > 0)
        layers = sum(self.rates.linear_seconds(self.shape.layer_parameters, rows) for rows in chunks)
        return layers + self.rates.linear_seconds(self.shape.head_parameters, num_requests)


def _decode_steps(workload: Workload) -> Iterator[tuple[int, int]]:
    """Yield each step's rows and the tokens whose keys and values it reads; the prompt's step made the first token."""
    shared = workload.shared_prefix
    for made in range(1, max(request.out for request in workload.requests)):
        running = [len(request.prompt) - shared + made for request in workload.requests if request.out > made]
        yield len(running), shared + sum(running)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table of rates and one of limits, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description="What this machine's memory and arithmetic allow at most.")
    parser.add_argument("--model", required=True, help="directory of a checkpoint; only config.json is read")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    _print_limits(Path(options.model), options.out)


def _print_limits(model: Path, out: Path | None) -> None:
    import torch  # late: whoever only computes with rates needs none of it

    from benchmarks.linear_rates import TORCH, linears, measure_rates, measure_read_gb_s
    from benchmarks.machine import describe

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
            "rates_by_linear": {name: asdict(one) for name, one in rates.items()},
            "limits": {name: limit.to_json() for name, limit in limits.items()},
        }
        out.write_text(json.dumps(document, indent=1) + "\n")


def _print_rates(rates: dict[str, Rates]) -> None:
    print(f"{'':>14}" + "".join(f"{name:>13}" for name in rates))
    print(f"{'weights, GB/s':>14}" + "".join(f"{one.weights_gb_s:13.1f}" for one in rates.values()))
    for rows in next(iter(rates.values())).gflop_s:
        print(f"{f'GFLOP/s at {rows}':>14}" + "".join(f"{one.gflop_s[rows]:13.0f}" for one in rates.values()))


if __name__ == "__main__":
    main()
