"""A swapped sequence comes back bit-identical, and continues with the tokens that it would have had."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kv.layer_cache import State
from engine.kv.page_copies import PageCopies
from engine.llm import LLM
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput, StepTimes
from engine.sequence import Sequence, SequenceStatus
from engine.worker.step_plan import StepPlan
from tests.engine.conftest import SavedModel
from tests.engine.models.decoder.recurrent.recurrent_families import save_recurrent_model
from tests.engine.oracle import Activity, answers, make_llm, random_tokens, run

PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.0, "seed": 2, "n": 3},
    {"temperature": 0.0, "beam_width": 4, "n": 2},
    {"temperature": 1.0, "seed": 5, "n": 2, "best_of": 3},
    {"temperature": 0.0, "beam_width": 2, "length_penalty": 0.0, "early_stopping": True},
]


class SwapWitness:
    """Compares what a sequence has in the caches before it is swapped out and after it came back."""

    def __init__(self, llm: LLM) -> None:
        self.num_compared: dict[str, int] = {"alone": 0, "n": 0, "beams": 0}
        self._kept: dict[Sequence, list[torch.Tensor]] = {}
        runner: Any = llm.engine.runner
        self._worker = runner.workers.local
        self._engine = llm.engine
        schedule, computed = llm.engine.scheduler.schedule, runner.run
        execute = runner.workers.local.execute

        def watching_schedule() -> SchedulerOutput:
            running = {
                sequence: (self._bytes(sequence), sequence.num_computed_tokens)
                for sequence in self._engine.scheduler.running
                if sequence.num_computed_tokens
            }
            output = schedule()
            for sequence, (held, count) in running.items():
                if sequence.status is SequenceStatus.SWAPPED:
                    assert sequence.num_computed_tokens == count
                    self._kept[sequence] = held
            self._back = [s for group in output.admitted for s in group.unfinished if s in self._kept]
            return output

        def watching_execute(plan: StepPlan, *args: Any) -> Any:
            if self._back:  # what a step computes comes after its copies
                for pool, copies in zip(self._worker.kv_cache.pools, plan.copies, strict=True):
                    pool.make(copies)
                self._compare()
                plan = replace(plan, copies=[PageCopies()] * len(plan.copies))
            return execute(plan, *args)

        def watching_run(output: SchedulerOutput, times: StepTimes) -> SampledTokens:
            result: SampledTokens = computed(output, times)
            assert not self._back
            return result

        llm.engine.scheduler.schedule = watching_schedule  # type: ignore[method-assign]
        runner.workers.local.execute = watching_execute
        runner.run = watching_run
        self._back: list[Sequence] = []

    def _compare(self) -> None:
        for sequence in self._back:
            before, after = self._kept.pop(sequence), self._bytes(sequence)
            assert len(before) == len(after)
            # The step may have released pages of windows before it swapped the others.
            same = all(torch.equal(old[-len(new) :], new) for old, new in zip(before, after, strict=True))
            assert same, f"{sequence.request_id} came back with other bytes"
            group = sequence.group
            kind = "beams" if group.beams else "n" if group.params.num_sequences > 1 else "alone"
            self.num_compared[kind] += 1
        self._back = []

    def _bytes(self, sequence: Sequence) -> list[torch.Tensor]:
        """Of each layer the keys and values of the computed tokens within reach, or the state, as integers."""
        manager, cache, count = self._engine.block_manager, self._worker.kv_cache, sequence.num_computed_tokens
        pages = {
            window.window: [window.attached.by_block[block_id].block_id for block_id in window.held_blocks(sequence)]
            for window in manager.windows
        }
        parts = []
        for layer, tensors in zip(self._worker.shard.model.layer_caches, cache.layers, strict=True):
            for part in tensors:
                if isinstance(layer, State):
                    slot = sequence.state_slot
                    held = part[manager.states.snapshots.copies.get(slot, slot)]  # a fork's is not copied yet
                else:
                    rows = sequence.block_table if layer.window is None else pages[layer.window]
                    end = count - (len(sequence.block_table) - len(rows)) * manager.block_size
                    held = part[rows].flatten(0, 1)[:end]
                parts.append(held.clone().view(torch.int32))
        return parts


@pytest.mark.parametrize(
    ("block_size", "caching"), [pytest.param(1, True, marks=pytest.mark.long), (4, False), (16, True)]
)
def test_a_swapped_sequence_resumes_bit_identically(family: SavedModel, block_size: int, caching: bool) -> None:
    check_swapped(family.path, block_size, caching)


@pytest.mark.parametrize("name", ["qwen3.5", pytest.param("nemotron-h", marks=pytest.mark.long)])
def test_a_swapped_state_comes_back_bit_identically(name: str, tmp_path: Path) -> None:
    _, path = save_recurrent_model(name, tmp_path)
    check_swapped(path, 4, caching=True)


def check_swapped(path: str, block_size: int, caching: bool) -> None:
    """Compare what swapped sequences have before and after, and all answers with those of an undisturbed engine."""
    rng = random.Random(block_size)
    prompts = [random_tokens(rng, rng.randint(1, 24)) for _ in range(24)]
    params = [SamplingParams(**PARAMS[i % len(PARAMS)], max_tokens=32, ignore_eos=True) for i in range(24)]
    undisturbed = answers(run(make_llm(path, block_size=block_size), prompts, params))
    llm = make_llm(
        path,
        block_size=block_size,
        num_blocks=272 // block_size,
        enable_prefix_caching=caching,
        swap_space_gib=0.002,
        max_num_batched_tokens=48,
    )
    did = Activity(llm)
    witness = SwapWitness(llm)
    assert answers(run(llm, prompts, params)) == undisturbed
    print(did, witness.num_compared)
    assert did.num_recomputed == 0
    assert min(witness.num_compared.values()) > 0, witness.num_compared


def test_a_swapped_request_can_be_aborted(qwen3: SavedModel) -> None:
    rng = random.Random(8)
    llm = make_llm(qwen3.path, block_size=4, num_blocks=40, swap_space_gib=0.001)
    prompts = [random_tokens(rng, 30) for _ in range(6)]
    params = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=40, ignore_eos=True)
    expected = answers(run(llm, prompts[:1], params))[0]
    for i, prompt in enumerate(prompts):
        llm.engine.add_request(EngineRequest(str(i), prompt, params))
    got: list[list[int]] = [[], []]
    aborted = 0
    while llm.engine.has_unfinished:
        for output in llm.engine.step():
            if output.request_id == "0":
                got[output.index] += output.token_ids
        for group in list(llm.engine.scheduler.waiting):
            if group.status is SequenceStatus.SWAPPED and group.request_id != "0":
                aborted += 1
                if aborted % 2:
                    assert llm.engine.abort(group.request_id)
                else:  # one answer only: the other comes back alone
                    assert llm.engine.end_sequence(group.request_id, 0)
    assert aborted > 1
    assert got == expected
    run(llm, prompts, params)


@pytest.mark.long
def test_two_ranks_swap_and_copy_blocks_as_one_does(qwen3: SavedModel) -> None:
    """Every rank keeps its own heads of the swapped and copied blocks; the step plan must carry the copies to them."""
    rng = random.Random(9)
    prompts = [random_tokens(rng, rng.randint(1, 24)) for _ in range(18)]
    params = [SamplingParams(**PARAMS[i % len(PARAMS)], max_tokens=32, ignore_eos=True) for i in range(18)]
    undisturbed = answers(run(make_llm(qwen3.path, block_size=4), prompts, params))
    llm = make_llm(
        qwen3.path,
        block_size=4,
        num_blocks=68,
        swap_space_gib=0.002,
        max_num_batched_tokens=48,
        tensor_parallel_size=2,
    )
    try:
        did = Activity(llm)
        assert answers(run(llm, prompts, params)) == undisturbed
    finally:
        llm.engine.close()
    assert did.num_copies > 0
    assert did.swapped_beams > 0
    assert did.num_swapped_in > 0
