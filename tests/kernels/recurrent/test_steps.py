"""What a token gets does not depend on the step that computes it: every implementation, every operation."""

from __future__ import annotations

import pytest
import torch

from kernels.recurrent.base import RecurrentOps
from kernels.recurrent.reference import ReferenceOps
from kernels.recurrent_metadata import RecurrentMetadata
from tests.kernels.recurrent.operations import Chunk, Conv, DeltaRule, Operation, Scan, Tokens, new_states, run_step

OPERATIONS = [
    Conv(),
    Conv(width=3, silu=False, has_bias=True),
    Conv(channels=16, width=2),
    DeltaRule(),
    DeltaRule(num_key_heads=3, num_heads=3, key_dim=8, value_dim=40),
    DeltaRule(num_heads=2, key_dim=24, value_dim=12, decays_rows=True),
    DeltaRule(key_dim=16, value_dim=256),  # decodes in C go over whole rows of the state, where it is
    DeltaRule(num_heads=2, key_dim=24, value_dim=128, decays_rows=True),
    Scan(),
    Scan(num_groups=1, num_heads=3, head_dim=5, state_size=24),
]
LENGTH = 11

every_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=repr)


def part(tokens: Tokens, first: int, end: int) -> Tokens:
    return tuple(values[first:end] for values in tokens)


def one_by_one(ops: RecurrentOps, operation: Operation, tokens: Tokens) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the outputs of a sequence alone, a token a step, and its state after each."""
    states, outputs, after = new_states(operation, 1), [], []
    for index in range(len(tokens[0])):
        outputs += run_step(ops, operation, states, [Chunk(part(tokens, index, index + 1), 0, starts=index == 0)])
        after.append(states[0].clone())
    return torch.cat(outputs), after


def assert_same(ops: RecurrentOps, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare bits, except those of torch's operators."""
    if isinstance(ops, ReferenceOps):
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)
    else:
        assert torch.equal(actual, expected)


@every_operation
def test_chunks_of_any_size_continue_each_other(ops: RecurrentOps, operation: Operation) -> None:
    tokens = operation.tokens(LENGTH, seed=10)
    expected, after = one_by_one(ops, operation, tokens)
    for sizes in ([LENGTH], [1, 2, 3, 5], [2, 9], [8, 1, 1, 1]):
        states, outputs, first = new_states(operation, 2), [], 0
        untouched = states[0].clone()
        for size in sizes:
            chunk = Chunk(part(tokens, first, first + size), slot=1, starts=first == 0)
            outputs += run_step(ops, operation, states, [chunk])
            first += size
            assert_same(ops, states[1], after[first - 1])
        assert_same(ops, torch.cat(outputs), expected)
        assert torch.equal(states[0], untouched)


@every_operation
def test_sequences_of_a_step_do_not_meet(ops: RecurrentOps, operation: Operation) -> None:
    sequences = [operation.tokens(LENGTH, seed=10 + 10 * i) for i in range(4)]
    alone = [one_by_one(ops, operation, tokens) for tokens in sequences]
    states, slots, computed = new_states(operation, 6), [4, 0, 5, 2], [0] * 4
    outputs: list[list[torch.Tensor]] = [[] for _ in sequences]
    for sizes in ({1: 1, 0: 4}, {1: 1, 3: 1, 2: 6, 0: 3}, {0: 1, 1: 1, 2: 5, 3: 10}, {1: 8, 0: 3}):
        chunks = [
            Chunk(part(sequences[i], computed[i], computed[i] + size), slots[i], starts=computed[i] == 0)
            for i, size in sizes.items()
        ]
        for i, output in zip(sizes, run_step(ops, operation, states, chunks), strict=True):
            outputs[i].append(output)
            computed[i] += sizes[i]
            assert_same(ops, states[slots[i]], alone[i][1][computed[i] - 1])
    for i, (expected, _) in enumerate(alone):
        assert_same(ops, torch.cat(outputs[i]), expected)


@every_operation
def test_a_snapshot_is_the_state_after_its_token(ops: RecurrentOps, operation: Operation) -> None:
    first, second = (operation.tokens(LENGTH, seed=seed) for seed in (10, 20))
    expected, after = one_by_one(ops, operation, second)
    states = new_states(operation, 8)
    untouched = states[7].clone()
    run_step(ops, operation, states, [Chunk(first, 3, starts=True, saves={0: 6}), Chunk(part(second, 0, 2), 0, True)])
    saves = {0: 5, 4: 4, LENGTH - 3: 1}
    run_step(
        ops,
        operation,
        states,
        [
            Chunk(part(first, 0, 1), 3),
            Chunk(part(second, 2, LENGTH), 0, saves=saves),
            Chunk(part(first, 0, 2), 2, starts=True),
        ],
    )
    for index, slot in saves.items():
        assert_same(ops, states[slot], after[2 + index])
    assert_same(ops, states[6], one_by_one(ops, operation, first)[1][0])
    assert torch.equal(states[7], untouched)
    (resumed,) = run_step(ops, operation, states, [Chunk(part(second, 7, LENGTH), 4)])
    assert_same(ops, resumed, expected[7:])


@every_operation
def test_padding_touches_no_state(ops: RecurrentOps, operation: Operation) -> None:
    tokens = operation.tokens(2, seed=10)
    states = new_states(operation, 2)
    expected = states.clone()
    (output,) = run_step(ops, operation, expected, [Chunk(part(tokens, 0, 1), 1)])
    metadata = RecurrentMetadata(
        cu_seqlens=torch.tensor([0, 1, 2, 2], dtype=torch.int32),
        slots=torch.tensor([1, -1, -1], dtype=torch.int32),
        starts=torch.zeros(3, dtype=torch.int32),
        save_tokens=torch.tensor([2, 2], dtype=torch.int32),
        save_slots=torch.tensor([-1, -1], dtype=torch.int32),
        num_decodes=3,
    )
    assert_same(ops, operation(ops, tokens, states, metadata)[:1], output)
    assert_same(ops, states, expected)


@every_operation
def test_outputs_have_the_dtype_of_the_inputs(ops: RecurrentOps, operation: Operation) -> None:
    tokens = operation.tokens(3, seed=10, dtype=torch.bfloat16)
    exact = tuple(values.float() for values in tokens)
    (expected,) = run_step(ops, operation, new_states(operation, 1), [Chunk(exact, 0)])
    (output,) = run_step(ops, operation, new_states(operation, 1), [Chunk(tokens, 0)])
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, atol=0.01, rtol=0.01)
