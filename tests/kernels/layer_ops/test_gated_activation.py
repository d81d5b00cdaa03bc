"""SwiGLU's and GeGLU's products against the reference."""

from __future__ import annotations

import pytest
import torch

from kernels.layer_ops import reference
from kernels.layer_ops.base import Activation, LayerOps
from tests.kernels.layer_ops.tensors import TOLERANCES, Random, assert_close

ACTIVATIONS: list[Activation] = ["silu", "gelu_tanh"]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (3, 33), (2, 1024), (5, 2500)])
def test_every_shape_and_dtype(
    ops: LayerOps, activation: Activation, dtype: torch.dtype, shape: tuple[int, int], device: torch.device
) -> None:
    gate_up = 3 * Random(dtype, device)(shape[0], 2 * shape[1])
    assert_close(ops.gated_activation(gate_up, activation), reference.gated_activation(gate_up, activation))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_of_any_size(ops: LayerOps, activation: Activation, device: torch.device) -> None:
    gates = torch.tensor(
        [-1e12, -1e4, -104.0, -89.0, -20.0, -0.0, 0.0, 1e-30, 20.0, 89.0, 1e4, torch.nan], device=device
    )
    gate_up = torch.stack((gates, torch.ones_like(gates))).T.contiguous()  # rows of one gate
    assert_close(ops.gated_activation(gate_up, activation), reference.gated_activation(gate_up, activation))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_rows_may_be_slices(ops: LayerOps, activation: Activation, device: torch.device) -> None:
    gate_up = Random(torch.float32, device)(7, 90)[::2, 5:69]
    assert gate_up.stride() == (180, 1)
    assert_close(ops.gated_activation(gate_up, activation), reference.gated_activation(gate_up, activation))
