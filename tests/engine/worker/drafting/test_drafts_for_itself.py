"""A model that drafts for itself is always right: any token of its own cache that is stale, missing or in the wrong
slot would show, whatever the engine has done with the blocks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from engine.kv.page_memory import PageMemory
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from engine.scheduling.drafting.drafter import Drafter
from engine.scheduling.drafting.model_drafting import ModelDrafting
from engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput
from engine.sequence import Sequence
from engine.worker.drafting.cpu_draft_model import CpuDraftModel
from engine.worker.drafting.prefix_marks import PrefixMarks
from kernels.cpu.library import library
from tests.engine.conftest import SavedModel
from tests.engine.models.test_speculative_generation import DraftCounter
from tests.engine.oracle import Activity, answers, make_llm, random_tokens, run

# Without the C kernels a row's bits depend on the other rows of its step, so a token may be drawn otherwise.
pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

SMALL_POOL = {"block_size": 4, "num_blocks": 70, "max_num_seqs": 16}
SETTINGS: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "chunks": {"max_num_batched_tokens": 13, "max_num_seqs": 8},
    "blocks of 1": {"block_size": 1},
    "preempted": SMALL_POOL,
    "swapped": SMALL_POOL | {"swap_space_gib": 0.05, "enable_prefix_caching": False},
    "evicted to the host": SMALL_POOL | {"max_num_seqs": 4, "swap_space_gib": 0.05},
    "overlapping": {"async_scheduling": True},
}


def itself(path: str, num_tokens: int = 4) -> dict[str, Any]:
    return {"method": "draft_model", "model": path, "num_speculative_tokens": num_tokens}


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of which some begin alike, greedy and drawn answers, some of them three to one prompt."""
    rng = random.Random(5)
    shared = random_tokens(rng, 21)
    prompts = [shared * (index % 2) + random_tokens(rng, rng.randint(1, 30)) for index in range(14)]
    params = [
        SamplingParams(
            temperature=0.9 * (index % 3 > 0),
            n=3 if index % 6 == 1 else 1,
            seed=index,
            max_tokens=14 + index,
            frequency_penalty=0.4 * (index % 5 == 2),
            logprobs=1 if index % 4 == 0 else None,
            ignore_eos=True,
        )
        for index in range(14)
    ]
    return prompts, params


def wrong_drafts(llm: LLM, drafts: DraftCounter, expected: list[list[list[int]]]) -> int:
    """Answer the requests twice; return the rejected draft tokens."""
    before = drafts.num_drafted - drafts.num_accepted
    for _ in range(2):  # the second time from the prefix cache, and from the host
        assert answers(run(llm, *requests())) == expected
    return drafts.num_drafted - drafts.num_accepted - before


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_draft_is_rejected(family: SavedModel, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a family with windows too, whose pages the large model frees before the draft model reads them."""
    drafts = DraftCounter(monkeypatch)
    expected = answers(run(make_llm(family.path), *requests()))
    llm = make_llm(family.path, speculative_config=itself(family.path), **SETTINGS[setting])
    activity = Activity(llm)
    assert wrong_drafts(llm, drafts, expected) == 0
    print(f"{setting}: {drafts.num_accepted} tokens accepted, {activity}")
    assert drafts.num_accepted > 200
    if setting == "preempted":
        assert activity.num_recomputed
    if setting in ("swapped", "evicted to the host"):
        assert activity.num_swapped_in
    assert activity.num_copies or setting == "blocks of 1"


def test_a_pass_has_no_more_tokens_than_a_step(qwen3: SavedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the draft model has computed nothing of the prompts of several sequences."""
    drafts = DraftCounter(monkeypatch)
    sizes: list[int] = []
    compute = CpuDraftModel._compute

    def recording(model: CpuDraftModel, chunks: list[Any], sampling: Any) -> Any:
        sizes.append(sum(chunk.num_tokens for chunk in chunks))
        return compute(model, chunks, sampling)

    monkeypatch.setattr(CpuDraftModel, "_compute", recording)
    monkeypatch.setattr(ModelDrafting, "fill", lambda *args: None)
    expected = answers(run(make_llm(qwen3.path), *requests()))
    llm = make_llm(qwen3.path, speculative_config=itself(qwen3.path), **SETTINGS["chunks"])
    assert wrong_drafts(llm, drafts, expected) == 0
    assert drafts.num_accepted > 200
    assert max(sizes) == SETTINGS["chunks"]["max_num_batched_tokens"]


class Disturbance:
    """Replaces a third of the tokens that a draft model samples, and counts those that are wrong for another reason."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_others = self.num_accepted = 0
        self._replaced: set[tuple[str, int, int]] = set()  # request, answer, position
        self._rng = random.Random(0)
        sample, accept = CpuDraftModel._sample, Drafter.accept

        def replacing(model: CpuDraftModel, logits: torch.Tensor, sequences: list[Sequence]) -> list[int | None]:
            return list(map(self._replace, sequences, sample(model, logits, sequences)))

        def counting(drafter: Drafter, output: SchedulerOutput, sampled: SampledTokens) -> list[Sequence]:
            right = {sequence: self._num_right(sequence, draft) for sequence, draft in output.drafts.items()}
            ended = accept(drafter, output, sampled)
            self.num_accepted += sum(output.num_accepted.values())
            self.num_others += sum(right[sequence] != count for sequence, count in output.num_accepted.items())
            self._replaced.clear()
            return ended

        monkeypatch.setattr(CpuDraftModel, "_sample", replacing)
        monkeypatch.setattr(Drafter, "accept", counting)

    def _replace(self, sequence: Sequence, token_id: int | None) -> int | None:
        if token_id is None or self._rng.random() > 1 / 3:
            return token_id
        self._replaced.add((sequence.request_id, sequence.index, len(sequence.token_ids)))
        return self._rng.choice([other for other in range(3, 9) if other != token_id])

    def _num_right(self, sequence: Sequence, draft: list[int]) -> int:
        first = len(sequence.token_ids) - 1  # which the step has appended
        keys = [(sequence.request_id, sequence.index, first + index) for index in range(len(draft))]
        return next((index for index, key in enumerate(keys) if key in self._replaced), len(draft))


@pytest.mark.parametrize("setting", ["whole prompts", "chunks", "blocks of 1", "swapped"])
def test_what_wrong_drafts_leave_makes_no_later_one_wrong(
    qwen3: SavedModel, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturbance = Disturbance(monkeypatch)
    expected = answers(run(make_llm(qwen3.path), *requests()))
    llm = make_llm(qwen3.path, speculative_config=itself(qwen3.path), **SETTINGS[setting])
    for _ in range(2):
        assert answers(run(llm, *requests())) == expected
    assert disturbance.num_others == 0
    assert disturbance.num_accepted > 100


Plant = Callable[[pytest.MonkeyPatch], None]


def _noise_of_the_wrong_position(patch: pytest.MonkeyPatch) -> None:
    sample = CpuDraftModel._sample

    def one_later(model: CpuDraftModel, logits: Any, sequences: list[Sequence]) -> Any:
        for sequence in sequences:
            sequence.num_pending = 1
        try:
            return sample(model, logits, sequences)
        finally:
            for sequence in sequences:
                sequence.num_pending = 0

    patch.setattr(CpuDraftModel, "_sample", one_later)


def _tokens_that_are_not_filled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CpuDraftModel, "num_computed", lambda model, sequence: sequence.num_tokens - 1)
    patch.setattr(PrefixMarks, "num_computed", lambda marks, sequence: sequence.num_tokens - 1)


def _slots_of_the_next_token(patch: pytest.MonkeyPatch) -> None:
    chunk = CpuDraftModel._chunk

    def one_later(model: CpuDraftModel, sequence: Sequence, draft: list[int], first: int, end: int) -> Any:
        shifted = chunk(model, sequence, draft, first, end)
        shifted.slots[:] = np.roll(shifted.slots, 1)
        return shifted

    patch.setattr(CpuDraftModel, "_chunk", one_later)


def _copies_without_marks(patch: pytest.MonkeyPatch) -> None:
    """Blocks come back from the host with other keys and values than their marks say."""
    swap_in = PageMemory.swap_in

    def without_last_layer(memory: PageMemory, pairs: list[tuple[int, int]]) -> None:
        swap_in(memory, pairs)
        for _, page in pairs:
            memory.parts[-2][page] = 0.5

    patch.setattr(PageMemory, "swap_in", without_last_layer)


@pytest.mark.parametrize(
    ("plant", "setting"),
    [
        (_noise_of_the_wrong_position, "whole prompts"),
        (_tokens_that_are_not_filled, "whole prompts"),
        (_slots_of_the_next_token, "chunks"),
        (_copies_without_marks, "swapped"),
    ],
)
def test_planted_faults_are_found_and_change_no_answer(
    qwen3: SavedModel, plant: Plant, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = DraftCounter(monkeypatch)
    expected = answers(run(make_llm(qwen3.path), *requests()))
    plant(monkeypatch)
    llm = make_llm(qwen3.path, speculative_config=itself(qwen3.path), **SETTINGS[setting])
    assert wrong_drafts(llm, drafts, expected) > 0
