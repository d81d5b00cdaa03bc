"""Every implementation computes what the reference computes in float64; the C kernels on any number of threads."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.library import library, set_num_threads
from kernels.recurrent.base import RecurrentOps
from kernels.recurrent.reference import ReferenceOps
from kernels.recurrent.select import select_recurrent_ops
from tests.kernels.recurrent.operations import Chunk, Conv, DeltaRule, Operation, Scan, new_states, run_step

LENGTHS = [1, 1, 5, 9]
SIZES = [
    Conv(channels=300),
    DeltaRule(num_key_heads=1, num_heads=2, key_dim=128, value_dim=128),
    DeltaRule(num_heads=2, key_dim=128, value_dim=128, decays_rows=True),
    Scan(num_groups=1, num_heads=2, head_dim=64, state_size=128),
]


def mixed_step(ops: RecurrentOps, operation: Operation, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs and states of a step with decodes, a chunk, a beginning and saves."""
    states = new_states(operation, 7).to(dtype)
    chunks = [
        Chunk(
            tuple(part.to(dtype) for part in operation.tokens(length, seed=10 * index)),
            slot=6 - index,
            starts=index == 3,
            saves={0: index} if index > 1 else {},
        )
        for index, length in enumerate(LENGTHS)
    ]
    return torch.cat(run_step(ops, operation, states, chunks)), states


@pytest.mark.parametrize("operation", SIZES, ids=repr)
def test_a_mixed_step_is_that_of_the_reference(ops: RecurrentOps, operation: Operation) -> None:
    outputs, states = mixed_step(ops, operation, torch.float32)
    expected, expected_states = mixed_step(ReferenceOps(), operation, torch.float64)
    torch.testing.assert_close(outputs, expected.float(), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(states, expected_states.float(), atol=2e-5, rtol=1e-5)


@pytest.mark.skipif(library() is None, reason="there is no C compiler")
@pytest.mark.parametrize("operation", SIZES, ids=repr)
def test_threads_change_no_bit(operation: Operation) -> None:
    ops = select_recurrent_ops(torch.device("cpu"))
    try:
        set_num_threads(1)
        outputs, states = mixed_step(ops, operation, torch.float32)
        set_num_threads(3)
        outputs_of_three, states_of_three = mixed_step(ops, operation, torch.float32)
    finally:
        set_num_threads(torch.get_num_threads())
    assert torch.equal(outputs, outputs_of_three)
    assert torch.equal(states, states_of_three)
