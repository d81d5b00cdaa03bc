"""Small batches for the tests of the sampler."""

from __future__ import annotations

from typing import Any

import torch

from engine.request import EngineRequest
from engine.sampling.sampler import NUM_CANDIDATES, Sampler
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence, SequenceGroup

VOCAB_SIZE = 50
CPU = torch.device("cpu")
STOP = 7


def make_sequence(seed: int = 0, num_tokens: int = 4, **params: Any) -> Sequence:
    return SequenceGroup(
        EngineRequest("request", [1] * num_tokens, SamplingParams(**params)),
        arrival=0,
        root=0,
        stop_token_ids=frozenset({STOP}),
        max_total_tokens=1000,
        seed=seed,
    ).sequences[0]


def sample(logits: torch.Tensor, sequences: list[Sequence], num_candidates: int = NUM_CANDIDATES) -> list[int]:
    """Sample without a past, and without altering ``logits``."""
    output = Sampler(logits.shape[1], CPU, num_candidates=num_candidates).sample(logits.clone(), sequences)
    assert not output.failed
    return output.token_ids


def random_logits(rows: int, seed: int, scale: float = 2.0, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def chi_square(counts: list[int], probabilities: list[float]) -> float:
    total = sum(counts)
    return sum((c - total * p) ** 2 / (total * p) for c, p in zip(counts, probabilities, strict=True) if p > 0)
