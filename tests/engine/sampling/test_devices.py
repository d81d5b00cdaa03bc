"""Sampling elsewhere, tested without a GPU: tensors stay on one device, and torch chooses as the C kernels do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.options.thinking_budget import ThinkingBudget
from engine.sampling import batch as batch_module
from engine.sampling import choosers, filters, ranking, token_rows
from engine.sampling.batch import SamplingBatch
from engine.sampling.ranking import gather_listed, gather_logprobs
from engine.sampling.sampler import NUM_CANDIDATES, Sampler
from engine.sampling.token_rows import TokenRows
from engine.scheduling.scheduler_output import SampledTokens
from engine.sequence import Sequence
from tests.engine.sampling.batches import CPU, VOCAB_SIZE, make_sequence, random_logits
from tests.engine.sampling.test_sampling_batch import KINDS

GPU = torch.device("meta")  # stands for one where none is needed
MORE_KINDS: list[dict[str, Any]] = [
    *KINDS,
    {"thinking_budget": ThinkingBudget(3, 4, 5)},
    {"logprobs": 2, "logprob_token_ids": [7, 8]},
]


def _one_of_each() -> list[Sequence]:
    return [make_sequence(seed=row, num_tokens=row % 5 + 1, **kind) for row, kind in enumerate(MORE_KINDS)]


def _tensors_of(holder: object) -> list[torch.Tensor]:
    """Return the tensors among the attributes of an object, and those in tuples and TokenRows there."""
    slots = getattr(type(holder), "__slots__", ())
    values = [getattr(holder, name) for name in slots] if slots else list(vars(holder).values())
    flat = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
    flat += [tensor for rows in flat if isinstance(rows, TokenRows) for tensor in _tensors_of(rows)]
    return [item for item in flat if isinstance(item, torch.Tensor)]


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU whose tensors have no data. An operation on tensors of two devices fails, as it does on a real one."""

    def to_device(values: object, dtype: torch.dtype | None, device: torch.device) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype).to(device)

    for module in (batch_module, choosers, filters, token_rows):
        monkeypatch.setattr(module, "to_device", to_device)
    monkeypatch.setattr(ranking, "start_to_host", lambda tensor: tensor)
    with FakeTensorMode():
        yield


@pytest.mark.usefixtures("fake_gpu")
def test_a_batch_keeps_all_its_tensors_on_the_device_of_the_logits() -> None:
    sequences = _one_of_each()
    batch = SamplingBatch(sequences, VOCAB_SIZE, GPU, num_candidates=4)
    for _ in range(2):
        logits = torch.zeros(len(sequences), VOCAB_SIZE, device=GPU)
        tokens = torch.zeros(len(sequences), dtype=torch.int64, device=GPU)
        for logit_filter in batch.filters:
            logit_filter.apply(logits)
        for chooser in batch.choosers:
            chooser.choose(logits, tokens)
        undecided = [index for index, kind in enumerate(MORE_KINDS) if kind.get("top_p", 1.0) < 1.0]
        chooser = batch.truncated_draw()
        assert chooser is not None
        chosen = chooser.choose_sorted(logits, undecided)
        assert (chosen.device, chosen.shape, chosen.dtype) == (GPU, (len(undecided),), torch.int64)
        for sequence in sequences:
            sequence.token_ids.append(1)
        assert batch.advance(sequences)
    assert len(batch.filters) == 7
    assert {type(chooser).__name__ for chooser in batch.choosers} == {"Greedy", "Draw", "TruncatedDraw"}
    assert batch.listed is not None
    assert batch.beam_min_tokens is not None
    for holder in (batch, batch.listed, batch.beam_min_tokens, *batch.filters, *batch.choosers):
        assert _tensors_of(holder), holder
        assert {tensor.device for tensor in _tensors_of(holder)} == {GPU}, holder


@pytest.mark.usefixtures("fake_gpu")
def test_log_probabilities_are_found_on_the_device_of_the_logits() -> None:
    logprobs, token_ids = torch.zeros(3, VOCAB_SIZE, device=GPU), torch.zeros(3, dtype=torch.int64, device=GPU)
    gathered = gather_logprobs(logprobs, token_ids, [2, 0, 5])
    assert [tensor.shape for tensor in _tensors_of(gathered)] == [(3, 1 + 5)] * 3
    listed = gather_listed(logprobs, torch.zeros(3, 4, dtype=torch.int64, device=GPU), [4, 1, 2])
    assert [tensor.shape for tensor in _tensors_of(listed)] == [(3, 4)] * 3
    assert {tensor.device for tensor in (*_tensors_of(gathered), *_tensors_of(listed))} == {GPU}


@pytest.mark.parametrize("num_candidates", [4, NUM_CANDIDATES])
def test_torch_chooses_what_the_c_kernels_choose(monkeypatch: pytest.MonkeyPatch, num_candidates: int) -> None:
    """Over several steps, so that kept columns are used too."""
    with_kernels = _steps(num_candidates)
    monkeypatch.setattr(choosers.cpu_sampling, "can_sample", lambda rows: False)
    monkeypatch.setattr("kernels.cpu.argmax.library", lambda: None)
    monkeypatch.setattr("kernels.cpu.sampling.library", lambda: None)
    by_torch = _steps(num_candidates)
    for ours, theirs in zip(by_torch, with_kernels, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert [position and list(position) for position in ours.logprobs or ()] == [
            position and list(position) for position in theirs.logprobs or ()
        ]
        assert ours.beams.keys() == theirs.beams.keys()
        assert all(ids == theirs.beams[row][0] for row, (ids, _) in ours.beams.items())
        assert not ours.failed


def test_a_failure_is_found_by_torch_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosers.cpu_sampling, "can_sample", lambda rows: False)
    monkeypatch.setattr("kernels.cpu.argmax.library", lambda: None)
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}]
    sequences = [make_sequence(seed=row, **kind) for row, kind in enumerate([*kinds, *kinds])]
    logits = random_logits(len(sequences), 1)
    logits[:5, 20] = torch.nan
    output = Sampler(VOCAB_SIZE, CPU).sample(logits, sequences)
    assert sorted(output.failed) == [0, 1, 2, 3, 4]


def _steps(num_candidates: int) -> list[SampledTokens]:
    sequences, sampler = _one_of_each(), Sampler(VOCAB_SIZE, CPU, num_candidates=num_candidates)
    seen = []
    for step in range(6):
        seen.append(sampler.sample(random_logits(len(sequences), step), sequences))
        for sequence, token_id in zip(sequences, seen[-1].token_ids, strict=True):
            sequence.token_ids.append(max(token_id, 0))
    return seen
