"""Times of linear layers on codes with other tiles, and with sums divided into other numbers of parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.coded_layers import FORMATS, random_matrix, rotated
from benchmarks.gpu.part_run import PartRun
from benchmarks.gpu.parts.tune import AS_THEY_ARE, Constants, Times

__all__ = ["run"]

TUNED = ("int4, groups of 128", "Q4_K", "MXFP4", "FP8, blocks of 128", "int8 by output")
# Rows and outputs of a tile, warps, stages; programs that keep a GPU busy, if sums are divided.
FEW = [
    (16, 64, 4, 4, 256),
    (16, 64, 4, 4, 512),
    (16, 64, 4, 4, 1024),
    (16, 64, 4, 6, 512),
    (16, 64, 4, 3, 1024),
    (16, 128, 4, 4, 512),
    (16, 128, 8, 4, 512),
    (16, 64, 8, 4, 512),
]
SOME = [(64, 64, 4, 4, 256), (64, 64, 4, 3, 512), (64, 128, 8, 3, 256), (64, 128, 4, 3, 256), (64, 64, 8, 4, 256)]
MANY = [(128, 64, 4, 3, 0), (128, 64, 8, 3, 0), (128, 128, 8, 3, 0), (64, 128, 8, 3, 0), (64, 64, 4, 4, 0)]
TILES = {1: FEW, 16: FEW, 64: SOME, 256: MANY, 512: MANY}  # by the number of rows


def run(part: PartRun) -> None:
    """Record the time of a large model's feed-forward layers for each number of rows, in microseconds."""
    if not part.on_gpu:
        part.record("summary", ["no Triton kernels multiply on this device"])
        return
    shape = part.sizes.models["8b"]
    times = Times(part, {})
    sizes = [
        (2 * shape.intermediate_size, shape.hidden_size),
        (shape.hidden_size, shape.intermediate_size),
        (shape.hidden_size, shape.hidden_size),
    ]
    for name in TUNED:
        for num_outputs, num_inputs in sizes:
            layers = rotated(random_matrix(FORMATS[name], num_outputs, num_inputs, part.device), part.device)
            for num_rows, tiles in TILES.items():
                times.constants = {AS_THEY_ARE: Constants()} | {str(tile): _tile(*tile) for tile in tiles}
                rows = torch.randn(num_rows, num_inputs, device=part.device, dtype=torch.bfloat16)
                times.measure(f"{name}, {num_rows} x {num_inputs} -> {num_outputs}", _all(layers, rows))


def _all(layers: list[Any], rows: torch.Tensor) -> Callable[[], object]:
    """Return what computes as many layers as there are, with the same rows."""

    def compute() -> None:
        with torch.inference_mode():
            for layer in layers:
                layer(rows)

    return compute


def _tile(rows: int, outputs: int, warps: int, stages: int, programs: int) -> Constants:
    from kernels.linear import coded_triton  # the part starts where there is no Triton, too

    tile = coded_triton._Tile(rows, outputs, warps, stages, divides=programs > 0)
    return Constants({(coded_triton, "_TILES"): {2: (tile, tile, tile)}, (coded_triton, "_PROGRAMS"): programs})
