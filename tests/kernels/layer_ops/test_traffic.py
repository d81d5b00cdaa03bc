"""The bytes that each operation's kernel moves, beside those that any kernel must move.

Necessary are: every operand read once and every result written once. In a step of few tokens each program of add_norm
serves one, and requests the weights of the norms for it alone: these kilobytes come from the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch

from kernels.layer_ops.base import Addend, LayerCache, Rotation
from tests.kernels.layer_ops.tensors import Random

if TYPE_CHECKING:
    from tests.kernels.interpreted_memory import Traffic

NUM_TOKENS = 128
MANY_TOKENS, FEW_TOKENS = 16, 1024  # programs of add_norm: 8 tokens each, as in a step of 8192; one, as in all decodes
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 256, 768, 8, 2, 32  # the proportions of an 8B model
MOST = 1.1


def _norms(random: Random, placement: str) -> int:
    from kernels.layer_ops.triton.ops import TritonOps

    residual, values = random(NUM_TOKENS, HIDDEN), random(NUM_TOKENS, HIDDEN)
    addend_norm = random.norm(HIDDEN) if placement in ("after", "around") else None
    norm = random.norm(HIDDEN) if placement in ("before", "around") else None
    outputs = TritonOps().add_norm(residual, Addend(values, addend_norm), norm)
    weights = [norm_of.weight for norm_of in (addend_norm, norm) if norm_of is not None]
    results = outputs if norm is not None else outputs[:1]
    return sum(tensor.nbytes for tensor in (residual, values, *weights, *results))


def _rotate_and_store(random: Random) -> int:
    from kernels.layer_ops.triton.ops import TritonOps

    qkv = random(NUM_TOKENS, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    norms = random.norm(HEAD_DIM), random.norm(HEAD_DIM)
    rotation = Rotation(torch.ones(NUM_TOKENS, 2, HEAD_DIM // 2), torch.arange(NUM_TOKENS), random.dtype)
    keys, values = torch.zeros(2, NUM_TOKENS, 1, KV_HEADS, HEAD_DIM, dtype=random.dtype)
    cache = LayerCache(keys, values, torch.arange(NUM_TOKENS))
    query = TritonOps().rotate_and_store(qkv, *norms, rotation, cache)
    operands = (qkv, norms[0].weight, norms[1].weight, rotation.table, rotation.positions, cache.slot_mapping)
    return sum(tensor.nbytes for tensor in (*operands, query, keys, values))


def _gated_activation(random: Random) -> int:
    from kernels.layer_ops.triton.ops import TritonOps

    gate_up = random(NUM_TOKENS, 2 * INNER)
    return gate_up.nbytes + TritonOps().gated_activation(gate_up, "silu").nbytes


OPERATIONS: dict[str, Callable[[Random], int]] = {
    "add_norm, norms before": lambda random: _norms(random, "before"),
    "add_norm, norms after": lambda random: _norms(random, "after"),
    "add_norm, norms around": lambda random: _norms(random, "around"),
    "rotate_and_store": _rotate_and_store,
    "gated_activation": _gated_activation,
}


def _weights_of(name: str, random: Random) -> int:
    """Return the bytes of the norms' weights that an operation of OPERATIONS reads for each token."""
    weight_bytes = random.norm(HIDDEN).weight.nbytes
    return {
        "add_norm, norms before": weight_bytes,
        "add_norm, norms after": weight_bytes,
        "add_norm, norms around": 2 * weight_bytes,
    }.get(name, 0)


@pytest.mark.parametrize("num_programs", [FEW_TOKENS, MANY_TOKENS])
@pytest.mark.parametrize("name", OPERATIONS)
def test_bytes_moved(name: str, num_programs: int, traffic: Traffic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.layer_ops.triton.ops._MAX_PROGRAMS", num_programs)
    random = Random(torch.float16, torch.device("cpu"))
    necessary = OPERATIONS[name](random)
    again = (min(NUM_TOKENS, num_programs) - 1) * _weights_of(name, random)  # from the cache
    assert necessary <= traffic.distinct <= MOST * necessary
    assert traffic.total <= MOST * necessary + (again if num_programs == FEW_TOKENS else 0)
    assert traffic.total >= traffic.distinct + again
