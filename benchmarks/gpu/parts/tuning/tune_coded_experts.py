"""Times of experts on codes with other tiles."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.gpu.inputs.coded_layers import FORMATS
from benchmarks.gpu.parts.kernels.coded_experts import MODEL, Layer
from benchmarks.gpu.parts.tuning.tune import AS_THEY_ARE, Constants, Times
from benchmarks.gpu.run.part_run import PartRun

__all__ = ["run"]

TUNED = ("int4, groups of 128", "Q4_K", "MXFP4", "FP8, blocks of 128")
# Outputs of a tile, warps, stages; by its rows.
TILES = {
    16: [(64, 4, 4), (64, 4, 2), (32, 2, 3), (128, 8, 3), (64, 8, 3)],
    64: [(64, 4, 3), (64, 8, 4), (128, 8, 3), (128, 4, 3)],
    128: [(64, 8, 3), (128, 8, 3)],
}
# Tokens, and the rows of tiles for them.
NUM_TOKENS = {1: (16,), 16: (16,), 64: (16,), 256: (16, 64), 512: (16, 64), 2048: (64, 128)}


def run(part: PartRun) -> None:
    """Record the times of a layer for each number of tokens, in microseconds."""
    if not part.on_gpu:
        part.record("summary", ["no Triton kernels multiply on this device"])
        return
    times = Times(part, {})
    for name in TUNED:
        layer = Layer(part.sizes.models[MODEL], FORMATS[name], max(NUM_TOKENS), part.device)
        for num_tokens, sizes in NUM_TOKENS.items():
            tiles = {f"{rows}, {tile}": _tile(rows, *tile) for rows in sizes for tile in TILES[rows]}
            times.constants = {AS_THEY_ARE: Constants()} | tiles
            times.measure(f"{name}, {num_tokens} tokens", _computing(layer, num_tokens))


def _computing(layer: Layer, num_tokens: int) -> Callable[[], object]:
    def compute() -> None:
        with torch.inference_mode():
            layer.compute(num_tokens)

    return compute


def _tile(rows: int, outputs: int, warps: int, stages: int) -> Constants:
    from kernels.experts.triton import coded_experts  # the part starts where there is no Triton, too

    return Constants({(coded_experts, "_TILES"): {2: {rows: coded_experts._Tile(outputs, warps, stages)}}})
