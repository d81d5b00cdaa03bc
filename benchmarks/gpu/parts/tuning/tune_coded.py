"""Times of linear layers on codes with other tiles, and with sums divided into other numbers of parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.inputs.coded_layers import FORMATS, random_matrix, rotated
from benchmarks.gpu.parts.tuning.tune import AS_THEY_ARE, Constants, Times
from benchmarks.gpu.run.part_run import PartRun

__all__ = ["run"]

TUNED = ("int4, groups of 128", "Q4_K", "MXFP4", "FP8, blocks of 128", "int8 by output")
# Rows and outputs of a tile, warps, stages; programs that keep a GPU busy, or 0, where sums are not divided; registers
# of a thread, and whether weights are rounded.
FEW = [
    (16, 64, 4, 4, 1024),
    (16, 32, 2, 3, 1024),
    (16, 32, 2, 4, 1024),
    (16, 32, 2, 5, 1024),
    (16, 128, 8, 3, 1024),
]
SOME = [
    (64, 64, 4, 4, 256),
    (64, 128, 8, 3, 256),
    (64, 128, 8, 3, 0),
    (64, 128, 4, 3, 256),
    (64, 128, 8, 3, 256, None, True),
]
MANY = [
    (64, 128, 8, 3, 0),
    (128, 128, 8, 3, 0),
    (128, 128, 8, 3, 0, None, True),
    (256, 128, 8, 2, 0, None, True),
    (128, 256, 8, 2, 0, None, True),
]
TILES: dict[int, list[Any]] = {1: FEW, 16: FEW, 64: SOME, 128: MANY, 256: MANY, 512: MANY}  # by the number of rows
DECODED = 128  # rows from which on weights are also decoded into memory for cuBLAS


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
                if num_rows >= DECODED:
                    times.constants["decoded into memory"] = _decoded()
                rows = torch.randn(num_rows, num_inputs, device=part.device, dtype=torch.bfloat16)
                times.measure(f"{name}, {num_rows} x {num_inputs} -> {num_outputs}", _all(layers, rows))


def _all(layers: list[Any], rows: torch.Tensor) -> Callable[[], object]:
    """Return what computes as many layers as there are, with the same rows."""

    def compute() -> None:
        with torch.inference_mode():
            for layer in layers:
                layer(rows)

    return compute


def _tile(*sizes: Any) -> Constants:
    from kernels.linear import coded_triton  # the part starts where there is no Triton, too

    return _tiles([(2**30, coded_triton._Tile(*sizes))])


def _decoded() -> Constants:
    from kernels.linear import coded_triton

    return _tiles([(0, coded_triton._FEW_ROWS)])


def _tiles(tiles: list[tuple[int, Any]]) -> Constants:
    """Return the constants with which layers of any format have these tiles, each up to a number of rows."""
    from kernels.linear import coded_triton

    return Constants({(coded_triton, "_tiles"): lambda section, dtype: tiles})
