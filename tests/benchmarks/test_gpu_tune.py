"""The tuning part of the GPU check: constants that it sets are those of the launches, and no longer than it says."""

from __future__ import annotations

import torch

from benchmarks.gpu.inputs.paged_batch import HeadShape, make_inputs
from benchmarks.gpu.parts.tuning import tune
from kernels.attention.triton import backend


def test_a_shape_that_was_used_before_has_the_constants_that_are_set() -> None:
    inputs = make_inputs([(1, 40)], HeadShape(16, 8, 128, 16), torch.device("cpu"))

    def constants() -> tuple[int, int, int]:
        shape = backend._layer_shape(inputs)
        return shape.keys_per_tile, shape.decode_programs, shape.prefill_stages

    before = constants()
    with tune._decode(tile=64, programs=3).set():
        assert constants() == (64, 3, before[2])
    with tune._prefill(64, 4, 3, 128).set():
        assert constants()[0::2] == (128, 3)
    assert constants() == before == (32, 4, 5)
