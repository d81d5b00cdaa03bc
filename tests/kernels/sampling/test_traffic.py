"""The bytes that choosing a token moves, beside those that it must move: the logits once, the parameters, the token.

What is read again is named in the table of benchmarks/README.md: the tokens that are left after the first pass. What
changes logits moves those that change, and what says which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from kernels.sampling.base import Limits, SamplingOps
from tests.kernels.sampling.rows import random_keys

if TYPE_CHECKING:
    from tests.kernels.interpreted_memory import Traffic

VOCAB_SIZE = 151_936
MOST = 1.1
OFF = torch.inf


def _logits(random: torch.Generator) -> torch.Tensor:
    """Return one row whose probabilities fall with the rank to the power of 1.5, in random order."""
    logits = -1.5 * torch.arange(1, VOCAB_SIZE + 1).log()
    return logits[torch.randperm(VOCAB_SIZE, generator=random)][None]


def test_the_most_likely_token(ops: SamplingOps, traffic: Traffic, random: torch.Generator) -> None:
    logits, tokens = _logits(random), torch.zeros(1, dtype=torch.int64)
    ops.argmax(tokens, logits, None)
    assert logits.nbytes < traffic.total <= MOST * logits.nbytes


def test_a_draw(ops: SamplingOps, traffic: Traffic, random: torch.Generator) -> None:
    logits, tokens = _logits(random), torch.zeros(1, dtype=torch.int64)
    ops.draw(tokens, logits, None, torch.ones(1, 1), random_keys(1, random))
    assert logits.nbytes < traffic.total <= MOST * logits.nbytes


@pytest.mark.parametrize(
    ("top_k", "top_p", "floor"),
    [
        pytest.param(50, OFF, -OFF, id="top_k"),
        pytest.param(20, 0.95, -OFF, id="top_k and top_p"),
        pytest.param(VOCAB_SIZE, OFF, -3.0, id="min_p"),
        pytest.param(VOCAB_SIZE, 0.9, -OFF, id="top_p"),
    ],
)
def test_a_truncated_draw(
    top_k: int, top_p: float, floor: float, ops: SamplingOps, traffic: Traffic, random: torch.Generator
) -> None:
    logits, tokens = _logits(random), torch.zeros(1, dtype=torch.int64)
    limits = Limits(torch.tensor([[top_k]]), torch.tensor([[top_p]]), torch.tensor([[floor]]))
    ops.truncated_draw(tokens, logits, None, torch.ones(1, 1), random_keys(1, random), limits)
    assert logits.nbytes < traffic.distinct <= MOST * logits.nbytes, f"{traffic.distinct / logits.nbytes:.3f}"
    assert traffic.total <= MOST * logits.nbytes, f"{traffic.total / logits.nbytes:.3f}"


def test_changes_of_logits(ops: SamplingOps, traffic: Traffic, random: torch.Generator) -> None:
    """Penalties read which tokens a sequence has, 1 or 4 bytes for each of the vocabulary; a bitmask, one bit."""
    logits, row = _logits(random), torch.zeros(1, dtype=torch.int64)
    counts = torch.zeros(1, VOCAB_SIZE, dtype=torch.int32)
    counts[0, :: VOCAB_SIZE // 2000] = 1
    num_seen, factor = int(counts.sum()), torch.full((1, 1), 1.5)

    def moved(name: str, *arguments: torch.Tensor) -> int:
        before = traffic.total
        getattr(ops, name)(logits, row, *arguments)
        return traffic.total - before

    allowed = torch.full((1, VOCAB_SIZE // 32), -1, dtype=torch.int32)
    allowed[0, :10] = 0
    necessary = {  # what says which logits change, and of these the old value, unless it has no effect, and the new one
        "penalise_repetition": (VOCAB_SIZE + 8 * num_seen, (counts.bool(), factor)),
        "penalise_counts": (4 * VOCAB_SIZE + 8 * num_seen, (counts, factor, factor)),
        "apply_bitmask": (allowed.nbytes + 4 * 320, (allowed,)),
        "add_biases": (8 + 8 + 4 + 8, (row, factor[0])),
        "forbid_tokens": (8 + 8 + 8 + 8, (row, row + 1)),
    }
    for name, (least, arguments) in necessary.items():
        assert least <= moved(name, *arguments) <= MOST * least, name
