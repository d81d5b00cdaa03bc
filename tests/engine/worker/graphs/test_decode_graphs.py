"""Replayed decodes compute what eager ones compute, and read nothing but their static inputs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from engine.worker.graphs.decode_graphs import DecodeGraph, DecodeGraphs, graph_sizes
from engine.worker.graphs.static_inputs import StaticInputs
from engine.worker.model_worker import ModelWorker
from engine.worker.step_graphs import StepGraphs
from engine.worker.step_plan import StepPlan
from tests.engine.checkpoints import FAMILIES
from tests.engine.worker.graphs.recorded_graphs import RecordingDevice, poison


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
    assert graph_sizes(max_num_seqs) == sizes


class Checks:
    """Checks every step of an engine: before it, all is poisoned that a graph must not read.

    Attributes:
        sizes: of the graphs that were replayed, and how often.
        num_eager: steps without a graph.
        kinds: other things that happened before a replay, and how often.
    """

    def __init__(self, llm: LLM, device: RecordingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: Counter[int] = Counter()
        self.kinds: Counter[str] = Counter()
        self.num_eager = 0
        self._device = device
        self.worker = llm.engine.runner.workers.local  # type: ignore[attr-defined]
        execute = ModelWorker.execute

        def checked(worker: ModelWorker, plan: StepPlan, *args: Any) -> torch.Tensor | None:
            graph = self.find(plan)
            if graph is None:
                self.num_eager += bool(len(plan.token_ids))
                return execute(worker, plan, *args)
            self._note(graph, plan)
            self._poison(graph)
            logits = execute(worker, plan, *args)
            assert device.num_replays == self.sizes.total()
            if logits is not None:
                torch.testing.assert_close(logits, self._eager_logits(plan))
            return logits

        monkeypatch.setattr(ModelWorker, "execute", checked)

    @property
    def graphs(self) -> DecodeGraphs:
        graphs = self.worker.graphs._graphs
        assert graphs is not None
        return graphs

    def find(self, plan: StepPlan) -> DecodeGraph | None:
        return self.graphs.find(plan) if len(plan.token_ids) else None

    def _note(self, graph: DecodeGraph, plan: StepPlan) -> None:
        self.sizes[graph.inputs.size] += 1
        happened = {
            "padding": len(plan.seq_lens) < graph.inputs.size,
            "changed tables": len(plan.table_changes.entries) > 0,
            "not sampling": len(plan.logit_indices) < len(plan.seq_lens),
            "swap_in": bool(plan.swap_in),
            "swap_out": bool(plan.swap_out),
            "block_copies": bool(plan.block_copies),
        }
        self.kinds.update(name for name, is_so in happened.items() if is_so)

    def _poison(self, graph: DecodeGraph) -> None:
        """Keep what a replay may read: weights, KV cache, block tables, and the constant bounds of its sequences."""
        worker, inputs = self.worker, graph.inputs
        caches = [part for layer in worker.kv_cache.layers for part in layer]
        kept = [*worker.shard.model.parameters(), worker.shard.model.rope, *caches, worker.block_tables._array]
        kept += [graph.inputs._cu_seqlens_q for graph in self.graphs._graphs]
        self._device.poison_all_but(kept)
        poison(inputs._slab)  # which the step's copy must fill

    def _eager_logits(self, plan: StepPlan) -> torch.Tensor:
        worker = self.worker
        model_input = plan.to_device(worker.block_tables, worker.shard.block_size)
        hidden = worker.shard.forward(model_input, worker.kv_cache)
        logits: torch.Tensor = worker.shard.model.compute_logits(hidden, model_input.logit_indices)
        return logits


def generate(llm: LLM, seed: int, num_requests: int = 24) -> list[list[list[int]]]:
    """Answer random requests; return each one's tokens."""
    rng = random.Random(seed)
    prompts: Any = [
        {"prompt_token_ids": [rng.randrange(3, 300) for _ in range(rng.choice([1, 4, 9, 20]))]}
        for _ in range(num_requests)
    ]
    params = [
        SamplingParams(
            temperature=temperature,
            seed=rng.randrange(99),
            n=1 if temperature == 0.0 else rng.choice([1, 3]),
            max_tokens=rng.randrange(1, 30),
            ignore_eos=True,
            prompt_logprobs=rng.choice([None, None, None, 1]),
        )
        for temperature in rng.choices([0.0, 1.0], k=num_requests)
    ]
    return [
        [completion.token_ids for completion in output.outputs]
        for output in llm.generate(prompts, params, use_tqdm=False)
    ]


FEW_FAMILIES = ["mistral"]  # in `make test`: with a window
MORE_FAMILIES = [pytest.param(name, marks=pytest.mark.long) for name in FAMILIES if name not in FEW_FAMILIES]


@pytest.mark.parametrize("family", [*FEW_FAMILIES, *MORE_FAMILIES], indirect=True)
def test_poisoned_replays(start: Callable[..., LLM], device: RecordingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = start(swap_space_gib=0.001)
    checks = Checks(llm, device, monkeypatch)
    for seed in range(2):
        generate(llm, seed)
    for num_seqs in (1, 2, 3, 8):
        generate(llm, num_seqs, num_requests=num_seqs)
    assert set(checks.sizes) == {1, 2, 4, 8, 11}
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
            r"CUDA graphs of 3 batch sizes, up to 4, cannot be captured \(.* a value .*enforce_eager",
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

    def capture(graphs: DecodeGraphs, inputs: StaticInputs, hidden: torch.Tensor) -> DecodeGraph:
        def run() -> None:
            hidden.copy_(graphs._forward(spoil(inputs.token_ids), inputs.positions, inputs.metadata()))

        return DecodeGraph(inputs, hidden, graphs._device.capture(run))

    monkeypatch.setattr(DecodeGraphs, "_capture_one", capture)
    with nullcontext() if error is None else pytest.raises((AssertionError, ConfigError, IndexError), match=error):
        llm = start(max_num_seqs=4)
        Checks(llm, device, monkeypatch)
        generate(llm, seed=0, num_requests=3)
