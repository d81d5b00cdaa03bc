"""The bytes that the kernels of experts move, beside those that any kernel must move.

Necessary are: each operand and each result once, and of the weights those of experts that have a token. What is read
again is a token's row, by the programs of other columns, and an expert's weights by its next tile. Such programs are
neighbours, so the L2 cache has them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

NUM_EXPERTS, TOP_K = 8, 2
HIDDEN, INNER = 256, 64


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).half()


class Case:
    """The routes of some tokens, and what each kernel must move for them."""

    def __init__(self, num_tokens: int) -> None:
        from kernels.experts.triton.routing import route_triton

        self.logits = _random(num_tokens, NUM_EXPERTS)
        self.routes: Any = route_triton(self.logits, TOP_K, normalize=True)
        self.num_tokens, self.pairs = num_tokens, num_tokens * TOP_K

    def route(self) -> int:
        from kernels.experts.triton.routing import route_triton

        routes = route_triton(self.logits, TOP_K, normalize=True)
        tables = (routes.weights, routes.ids, routes.num_pairs, routes.tile_experts)
        num_tiles = int((routes.tile_experts >= 0).sum())
        return self.logits.nbytes + sum(table.nbytes for table in tables) + 4 * (num_tiles + self.pairs)

    def gate_up(self) -> int:
        return self._product(_random(self.num_tokens, HIDDEN), _random(NUM_EXPERTS, 2 * INNER, HIDDEN), gated=True)

    def down(self) -> int:
        return self._product(_random(self.pairs, INNER), _random(NUM_EXPERTS, HIDDEN, INNER), gated=False)

    def _product(self, rows: torch.Tensor, weights: torch.Tensor, *, gated: bool) -> int:
        from kernels.experts.triton.experts import _grouped_linear

        output = _grouped_linear(rows, weights, self.routes, gated=gated)
        num_used = int((self.routes.num_pairs > 0).sum())
        tables = self.routes.tile_experts.nbytes + 4 * (num_used + self.pairs)
        return rows.nbytes + num_used * weights[0].nbytes + output.nbytes + tables

    def combine(self) -> int:
        from kernels.experts.triton.experts import _combine

        outputs = _random(self.pairs, HIDDEN)
        return outputs.nbytes + self.routes.weights.nbytes + _combine(outputs, self.routes.weights).nbytes


@pytest.mark.parametrize(
    ("num_tokens", "kernel", "most_distinct", "most"),
    [
        (4, "route", 1.0, 2.9),  # a program for each expert reads all logits
        (4, "gate_up", 1.01, 1.02),
        (4, "down", 1.01, 1.02),
        (4, "combine", 1.0, 1.0),
        (256, "route", 1.3, 3.1),  # two kernels: what the first has chosen, each program of the second reads
        pytest.param(256, "gate_up", 1.01, 1.6, marks=pytest.mark.long),
        pytest.param(256, "down", 1.01, 1.6, marks=pytest.mark.long),
        pytest.param(256, "combine", 1.0, 1.0, marks=pytest.mark.long),
    ],
)
def test_bytes_moved(
    num_tokens: int,
    kernel: str,
    most_distinct: float,
    most: float,
    kernel_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kernel_device.type != "cpu":
        pytest.skip("only the interpreter shows addresses")
    from tests.kernels.interpreted_memory import Traffic

    case = Case(num_tokens)
    traffic = Traffic(monkeypatch)
    necessary = getattr(case, kernel)()
    assert necessary <= traffic.distinct <= most_distinct * necessary
    assert traffic.total <= most * necessary, f"{traffic.total / necessary:.3f} of the necessary bytes"
