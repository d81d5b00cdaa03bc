"""Replayed decodes compute what eager ones compute, and read nothing but their static inputs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.llm import LLM
from engine.worker.graphs.batch_graphs import BatchGraph, BatchGraphs
from engine.worker.graphs.batch_shape import BatchShape, chunk_sizes, decode_sizes, mixed_decode_sizes
from engine.worker.graphs.static_inputs import StaticInputs
from engine.worker.step_graphs import StepGraphs
from engine.worker.step_plan import StepPlan
from tests.engine.checkpoints import FAMILIES
from tests.engine.worker.graphs.checked_steps import Checks, generate
from tests.engine.worker.graphs.recorded_graphs import RecordingDevice


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (30, [1, 2, 4, 8, 16, 24, 30]),
        (256, [1, 2, 4, *range(8, 257, 8)]),
        (600, [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), 512, 544, 576, 600]),
    ],
)
def test_the_sizes_end_with_max_num_seqs(max_num_seqs: int, sizes: list[int]) -> None:
    assert decode_sizes(max_num_seqs) == sizes


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"), [(1, [0, 1]), (8, [0, 8]), (9, [0, 8, 9]), (256, [0, 8, 32, 128, 256])]
)
def test_few_numbers_of_decodes_have_graphs_with_chunks(max_num_seqs: int, sizes: list[int]) -> None:
    assert mixed_decode_sizes(max_num_seqs) == sizes


@pytest.mark.parametrize(
    ("max_chunk_tokens", "sizes"),
    [
        (1, [1]),
        (32, [32]),
        (100, [32, 64, 100]),
        (8192, [32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]),
    ],
)
def test_steps_of_many_tokens_have_no_graph(max_chunk_tokens: int, sizes: list[int]) -> None:
    assert chunk_sizes(max_chunk_tokens) == sizes


@pytest.mark.parametrize(
    ("gigabytes", "tokens_per_step", "tokens"),
    [(1.2, 8192, 6826), (8, 8192, 1024), (16, 8192, 512), (140, 8192, 512), (1.2, 300, 300)],
)
def test_a_large_model_computes_long_chunks_without_graphs(gigabytes: float, tokens_per_step: int, tokens: int) -> None:
    config = SimpleNamespace(tokens_per_step=tokens_per_step)
    shard: Any = SimpleNamespace(weight_bytes=int(gigabytes * 1e9), config=config)
    assert StepGraphs(shard)._max_chunk_tokens == tokens


FURTHER = pytest.mark.exhaustive("layers that differ only outside of attention and the cache")
WINDOWS = "mistral"


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.long if name == WINDOWS else FURTHER) for name in sorted(FAMILIES)],
    indirect=True,
)
def test_poisoned_replays(start: Callable[..., LLM], device: RecordingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = start(swap_space_gib=0.001, num_blocks=40)
    checks = Checks(llm, device, monkeypatch)
    for seed in range(2):
        generate(llm, seed)
    for seed, num_seqs in ((1, 1), (2, 2), (12, 2), (3, 3), (8, 8)):
        generate(llm, seed, num_requests=num_seqs)
    assert {shape.num_decodes for shape in checks.shapes if not shape.num_chunks} == {1, 2, 4, 8, 11}
    mixed = {shape for shape in checks.shapes if shape.num_chunks}
    assert mixed >= {BatchShape.mixed(decodes, tokens) for decodes in (0, 8) for tokens in (32, 64)}
    assert {"padding", "changed tables", "swap_in", "block_copies"} <= set(checks.kinds)
    assert checks.num_eager > 10


def test_answers_are_those_of_eager_steps(start: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    num_pending: list[int] = []
    load = StaticInputs.load

    def record(inputs: StaticInputs, plan: StepPlan) -> torch.Tensor:
        num_pending.append(plan.num_pending)
        return load(inputs, plan)

    monkeypatch.setattr(StaticInputs, "load", record)
    answers = generate(start(), seed=5)
    assert num_pending
    assert not any(num_pending)
    assert generate(start(async_scheduling=True), seed=5) == answers
    assert sum(num_pending) > 100, "no graph took tokens that only the device knew"
    monkeypatch.setattr(StepGraphs, "are_used", False)
    assert generate(start(), seed=5) == answers


class Faults:
    """What a capture must not do to its token ids."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}
        self._num_calls = 0

    def none(self, token_ids: torch.Tensor) -> torch.Tensor:
        return token_ids

    def tensor_of_one_step(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._kept.setdefault(len(token_ids), token_ids.clone())

    def number_of_one_step(self, token_ids: torch.Tensor) -> torch.Tensor:
        self._num_calls += 1
        return token_ids + self._num_calls

    def value_on_the_host(self, token_ids: torch.Tensor) -> torch.Tensor:
        return token_ids + int(token_ids.sum())


@pytest.mark.parametrize("family", ["qwen3"], indirect=True)
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("none", None),
        ("tensor_of_one_step", "index out of range"),  # a poisoned token id
        ("number_of_one_step", "Tensor-likes are not close"),
        (
            "value_on_the_host",
            r"CUDA graphs of 7 batches, up to 68 tokens, cannot be captured \(.* a value .*enforce_eager",
        ),
    ],
)
def test_a_planted_fault(
    fault: str,
    error: str | None,
    start: Callable[..., LLM],
    device: RecordingDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A capture that holds what belongs to one step is found by the checks above."""
    spoil = getattr(Faults(), fault)

    def capture(graphs: BatchGraphs, inputs: StaticInputs, hidden: torch.Tensor) -> BatchGraph:
        def run() -> None:
            model_input = inputs.model_input()
            hidden.copy_(graphs._forward(replace(model_input, token_ids=spoil(model_input.token_ids))))

        return BatchGraph(inputs, hidden, graphs._device.capture(run))

    monkeypatch.setattr(BatchGraphs, "_capture_one", capture)
    with nullcontext() if error is None else pytest.raises((AssertionError, ConfigError, IndexError), match=error):
        llm = start(max_num_seqs=4)
        Checks(llm, device, monkeypatch)
        generate(llm, seed=0, num_requests=3)
