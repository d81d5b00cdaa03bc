"""The sampler with the kernels of a GPU chooses what it chooses on a CPU, step after step, and waits once a step."""

from __future__ import annotations

from typing import Any
from weakref import ref

import pytest
import torch

from engine.options.thinking_budget import ThinkingBudget
from engine.sampling.sampler import Sampler
from engine.scheduling.scheduler_output import SampledTokens
from engine.sequence import Sequence
from kernels.device_copy import wait_for_device
from kernels.sampling.base import SamplingOps
from tests.engine.sampling.batches import STOP, make_sequence, random_logits

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
VOCAB_SIZE = 2100  # more than the CPU's candidates
CPU = torch.device("cpu")
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "logprobs": 2},
    {"top_p": 0.9},
    {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    {"top_k": 1500, "top_p": 0.9},
    {"min_p": 0.05},
    {"top_p": 0.9999, "temperature": 2.0, "logprobs": 0},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"top_k": 5, "min_p": 0.2, "allowed_token_ids": [3, 4, 5]},
    {"temperature": 0.0, "frequency_penalty": -1.5, "presence_penalty": 0.7},
    {"top_p": 0.9, "repetition_penalty": 0.8, "frequency_penalty": 0.9, "logit_bias": {7: 4.0, 9: -100.0, 2099: 3.0}},
    {"temperature": 0.0, "min_tokens": 2, "logit_bias": {STOP: 50.0}},
    {"temperature": 0.0, "bad_words_token_ids": ((6,), (5, 6), (1, 1, 8), (8, 8)), "logit_bias": {6: 30.0, 8: 29.0}},
    {"temperature": 0.0, "thinking_budget": ThinkingBudget(1, start_token_id=None, end_token_id=11)},
]
WITH_GRAMMAR = [1, 8, 20]
SELECT = (
    "engine.sampling.choosers",
    "engine.sampling.filters",
    "engine.sampling.sampler",
    "engine.structured_outputs.bitmask",
)


def _steps(device: torch.device) -> list[SampledTokens]:
    sequences: list[Sequence] = [make_sequence(seed=row, **KINDS[row % len(KINDS)]) for row in range(28)]
    random = torch.Generator().manual_seed(0)
    sampler, seen = Sampler(VOCAB_SIZE, device), []
    for step in range(4):
        logits = random_logits(len(sequences), step, vocab_size=VOCAB_SIZE).to(device)
        logits[9 + step] = torch.nan
        words = torch.randint(-(2**31), 2**31, (len(WITH_GRAMMAR), -(-VOCAB_SIZE // 32)), generator=random).int()
        seen.append(sampler.sample(logits, sequences, (WITH_GRAMMAR, words)))
        for sequence, token_id in zip(sequences, seen[-1].token_ids, strict=True):
            sequence.token_ids.append(token_id)
    return seen


@pytest.mark.long
def test_tokens_are_those_of_the_cpu(
    ops: SamplingOps, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _steps(CPU)
    for module in SELECT:
        monkeypatch.setattr(f"{module}.select_sampling_ops", lambda device_type: ops)
    monkeypatch.setattr("engine.sampling.pending.PendingTokens._decide", None)  # no token is left undecided
    for ours, theirs in zip(_steps(kernel_device), expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.failed == theirs.failed
        assert len(ours.failed) == 1


@pytest.mark.parametrize("on_gpu", [True, False])
def test_logits_are_kept_only_where_a_token_may_be_undecided(
    ops: SamplingOps, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch, on_gpu: bool
) -> None:
    """A GPU starts the next step before it finishes this one, whose logits take hundreds of megabytes."""
    if on_gpu:
        for module in SELECT:
            monkeypatch.setattr(f"{module}.select_sampling_ops", lambda device_type: ops)
    device = kernel_device if on_gpu else CPU
    for kind, is_kept in ({"temperature": 0.0, "logprobs": 2}, False), ({"top_p": 0.9, "logprobs": 2}, not on_gpu):
        logits = random_logits(3, 0, vocab_size=VOCAB_SIZE).to(device)
        alive = ref(logits)
        pending = Sampler(VOCAB_SIZE, device).start(logits, [make_sequence(seed=row, **kind) for row in range(3)])
        del logits
        assert (alive() is not None) == is_kept
        wait_for_device(device)
        assert len(pending.finish(lambda: None).token_ids) == 3
