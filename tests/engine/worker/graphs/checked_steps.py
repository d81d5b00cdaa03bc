"""Checks: compares each replayed step of an engine with an eager one, after poisoning what a replay must not read."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

from engine.llm import LLM
from engine.sampling_params import SamplingParams
from engine.worker.graphs.batch_graphs import BatchGraph, BatchGraphs
from engine.worker.graphs.batch_shape import BatchShape
from engine.worker.model_worker import ModelWorker
from engine.worker.step_plan import StepPlan
from tests.engine.worker.graphs.recorded_graphs import RecordingDevice, poison

__all__ = ["Checks", "generate"]

ROUNDING = {"atol": 1e-4, "rtol": 1e-4}  # products of other numbers of rows are added up in another order


class Checks:
    """Checks every step of an engine: before it, all is poisoned that a graph must not read.

    Attributes:
        shapes: of the graphs that were replayed, and how often.
        num_eager: steps without a graph.
        kinds: other things that happened before a replay, and how often.
    """

    def __init__(self, llm: LLM, device: RecordingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shapes: Counter[BatchShape] = Counter()
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
            assert device.num_replays == self.shapes.total()
            if logits is not None:
                self._compare(plan, logits)
            return logits

        copy_pages = ModelWorker._copy_pages

        def copy(worker: ModelWorker, plan: StepPlan) -> None:
            copy_pages(worker, plan)
            self._before = self._states()

        monkeypatch.setattr(ModelWorker, "execute", checked)
        monkeypatch.setattr(ModelWorker, "_copy_pages", copy)

    @property
    def graphs(self) -> BatchGraphs:
        graphs = self.worker.graphs._graphs
        assert graphs is not None
        return graphs

    def find(self, plan: StepPlan) -> BatchGraph | None:
        return self.graphs.find(plan) if len(plan.token_ids) else None

    def _note(self, graph: BatchGraph, plan: StepPlan) -> None:
        self.shapes[graph.inputs.shape] += 1
        happened = {
            "padding": len(plan.token_ids) < graph.inputs.shape.num_tokens,
            "changed tables": len(plan.table_changes.entries) > 0,
            "not sampling": len(plan.logit_indices) < len(plan.seq_lens),
            "swap_in": bool(plan.copies[0].swap_in),
            "swap_out": bool(plan.copies[0].swap_out),
            "block_copies": bool(plan.copies[0].on_device),
            "state_copies": bool(plan.copies[-1].on_device),
            "changed pages": any(len(window.changed_blocks) for window in plan.windows),
            "page copies": any(copies.on_device for copies in plan.copies[1:-1]),
        }
        self.kinds.update(name for name, is_so in happened.items() if is_so)

    def _poison(self, graph: BatchGraph) -> None:
        """Keep what a replay may read: weights, caches, block tables, page maps, and what is the same in each step."""
        worker, inputs = self.worker, graph.inputs
        caches = [part for layer in worker.kv_cache.layers for part in layer]
        kept = [*worker.shard.model.parameters(), *worker.shard.model.rope, *caches, worker.block_tables._array]
        kept += [page_map._pages for page_map in worker.page_maps]
        for other in self.graphs._graphs.values():
            kept.append(other.inputs._cu_seqlens_q)
            if (recurrent := other.inputs.recurrent) is not None:
                kept += [recurrent.starts, recurrent.save_tokens, recurrent.save_slots]
        self._device.poison_all_but(kept)
        poison(inputs._slab)  # which the step's copy must fill

    def _states(self) -> list[torch.Tensor]:
        return [part.clone() for part in self.worker.kv_cache.slots.parts]

    def _compare(self, plan: StepPlan, logits: torch.Tensor) -> None:
        """Compute the step eagerly, from the states before it; compare the logits and the states after it."""
        worker, after = self.worker, self._states()
        for part, state in zip(worker.kv_cache.slots.parts, self._before, strict=True):
            part.copy_(state)
        model_input = plan.to_device(worker.block_tables, worker.shard.block_size, worker.page_maps)
        hidden = worker.shard.forward(model_input, worker.kv_cache)
        expected = worker.shard.model.compute_logits(hidden, model_input.logit_indices)
        torch.testing.assert_close(logits, expected, **ROUNDING)
        torch.testing.assert_close(after, self._states(), **ROUNDING)


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
