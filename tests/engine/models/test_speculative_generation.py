"""Greedy tokens with drafts equal transformers' generate, whatever else goes on in the engine, and copies take fewer
steps."""

from __future__ import annotations

from typing import Any

import pytest

from engine.llm import LLM
from engine.sampling_params import SamplingParams
from engine.scheduling.drafting.drafter import Drafter
from engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput
from engine.sequence import Sequence
from tests.engine.conftest import SavedModel, families
from tests.engine.models.test_generation import (
    POOL_TOKENS,
    PreemptionCounter,
    Setting,
    make_prompts,
    max_tokens_for,
    oracle,
)
from tests.engine.oracle import Activity, answers, make_llm, run
from tests.engine.shadow import metrics_of
from tests.engine.worker.test_tensor_parallel import ThreadRanks

# Short n-grams, so that random models are guessed at all.
SPECULATION = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SETTINGS: list[Setting] = [(True, 16, 4, 0.0), (False, 2048, 1, 0.0)]
MORE_SETTINGS: list[Setting] = [(True, 2048, 16, 0.002), (False, 16, 64, 0.002)]


class DraftCounter:
    """Counts the accepted and rejected draft tokens of every engine that is created after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_drafted = self.num_accepted = self.num_cut = self.num_steps = 0
        accept = Drafter.accept

        def counting(drafter: Drafter, output: SchedulerOutput, sampled: SampledTokens) -> list[Sequence]:
            ended = accept(drafter, output, sampled)
            self.num_steps += 1
            self.num_drafted += output.num_draft_tokens
            self.num_accepted += sum(output.num_accepted.values())
            self.num_cut += sum(output.num_accepted[sequence] > 0 for sequence in ended)
            return ended

        monkeypatch.setattr(Drafter, "accept", counting)


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> DraftCounter:
    return DraftCounter(monkeypatch)


def greedy(max_tokens: int, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **params)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("settings", [SETTINGS, pytest.param(MORE_SETTINGS, marks=pytest.mark.long)], ids=["", "more"])
@pytest.mark.parametrize("family", families("qwen3"), indirect=True)
def test_greedy_equals_transformers_for_every_family(
    family: SavedModel, settings: list[Setting], drafts: DraftCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts of test_generation, and some that repeat themselves: in chunks, from the cache, and preempted."""
    prompts = [*make_prompts(384)[::2], [7, 8, 9, 10] * 8, [5] * 20, list(range(40, 60)) * 3]
    expected: list[list[int]] = []
    preemptions = PreemptionCounter(monkeypatch)
    for caching, budget, block_size, swap_space_gib in settings:
        preempted, drafted, accepted = preemptions.count, drafts.num_drafted, drafts.num_accepted
        llm = make_llm(
            family.path,
            speculative_config=SPECULATION,
            enable_prefix_caching=caching,
            block_size=block_size,
            max_num_batched_tokens=budget,
            num_blocks=-(-POOL_TOKENS // block_size),
            swap_space_gib=swap_space_gib,
        )
        Activity(llm)  # checks the invariants before each step
        outputs = run(llm, prompts, [greedy(max_tokens_for(prompt)) for prompt in prompts])
        name = f"caching={caching} budget={budget} block_size={block_size} swap_space_gib={swap_space_gib}"
        print(
            f"{family.name} {name}: {preemptions.count - preempted} preemptions, "
            f"{drafts.num_accepted - accepted} of {drafts.num_drafted - drafted} guesses right"
        )
        got = [answer for (answer,) in answers(outputs)]
        expected = expected or oracle(family.model, prompts, guesses=got)
        assert got == expected, name
        assert preemptions.count > preempted, name
        assert drafts.num_accepted > accepted, name


def test_a_copy_takes_fewer_steps(qwen3: SavedModel, drafts: DraftCounter) -> None:
    """This model repeats itself after this prompt, as a model that copies its prompt does."""
    prompt = [7, 8, 9, 10] * 8
    num_steps = []
    for options in ({}, {"speculative_config": SPECULATION}):
        llm = make_llm(qwen3.path, **options)
        metrics = metrics_of(llm.engine)
        counted = metrics.step_finished
        steps: list[int] = []
        metrics.step_finished = lambda *args, c=counted, s=steps: s.append(1) or c(*args)  # type: ignore[misc]
        outputs = run(llm, [prompt], greedy(100, ignore_eos=True))
        num_steps.append(len(steps))
        assert len(outputs[0].outputs[0].token_ids) == 100
    assert num_steps[0] == 100
    assert num_steps[1] == 100 - drafts.num_accepted < 75


def test_an_answer_ends_at_its_eos_within_a_right_draft(family: SavedModel, drafts: DraftCounter) -> None:
    """Prompts that hold the beginning of their answer, so that what ends it is guessed."""
    plain, drafting = make_llm(family.path), make_llm(family.path, speculative_config=SPECULATION)
    cases: list[tuple[list[int], int]] = []
    for start in ([7, 8, 9, 10] * 8, [5] * 20, [60, 61, 62]):
        whole = start + run(plain, [start], greedy(90, ignore_eos=True))[0].outputs[0].token_ids
        for length in range(len(start) + 10, len(whole) - 20, 10):
            known, rest = whole[:length], whole[length:]
            cases += [(known, token_id) for token_id in set(rest[2:]) & set(known) if rest.index(token_id) >= 2]
    prompts = [prompt for prompt, _ in cases]
    for more in ({}, {"min_tokens": 4}):
        params = [greedy(90, ignore_eos=True, stop_token_ids=[token_id], **more) for _, token_id in cases]
        assert answers(run(drafting, prompts, params)) == answers(run(plain, prompts, params))
    print(f"{family.name}: {drafts.num_cut} of {2 * len(cases)} answers end within a draft")
    assert drafts.num_cut > 0 or family.name == "mistral"  # the one whose random weights never repeat themselves


def test_drafts_go_beside_whatever_else_is_asked_for(qwen3: SavedModel, drafts: DraftCounter) -> None:
    """Draws, penalties, beams and log-probabilities are what they are without drafts in the same batches."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 3},
        {"repetition_penalty": 1.2},
        {"temperature": 0.9, "seed": 5, "n": 3},
        {"logprobs": 2},
        {"beam_width": 3, "n": 2},
        {"prompt_logprobs": 0},
        {"min_tokens": 12},
        {"frequency_penalty": 0.4},
        {"logit_bias": {244: -100.0}},
        {"temperature": 0.7, "top_p": 0.9, "seed": 1},
    ]
    params = [SamplingParams(**{"temperature": 0.0, "max_tokens": 40, "ignore_eos": True} | kind) for kind in kinds * 3]
    prompts = [[7, 8, 9, 10] * (4 + index % 3) for index in range(len(params))]
    options: dict[str, Any] = {"num_blocks": 150, "block_size": 4, "max_num_batched_tokens": 64}
    expected = run(make_llm(qwen3.path, **options), prompts, params)
    got = run(make_llm(qwen3.path, speculative_config=SPECULATION, **options), prompts, params)
    assert drafts.num_accepted > 20
    assert answers(got) == answers(expected)
    for answer, other in zip(got, expected, strict=True):
        assert answer.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob)
        assert (answer.prompt_logprobs is None) == (other.prompt_logprobs is None)


def test_ranks_compute_drafts_in_step(
    family: SavedModel, drafts: DraftCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.worker.worker_pool.RemoteRanks", ThreadRanks)
    prompts = [*make_prompts(384)[::6], [7, 8, 9, 10] * 8, [5] * 20]
    expected = answers(run(make_llm(family.path), prompts, greedy(40)))
    llm: LLM = make_llm(family.path, tensor_parallel_size=2, speculative_config=SPECULATION)
    try:
        assert answers(run(llm, prompts, greedy(40))) == expected
    finally:
        llm.engine.close()
    assert drafts.num_accepted > 0
