"""Real steps that overlap: every answer is the one of steps that do not, whatever the sampling parameters."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from engine.llm import LLM
from engine.options.structured_outputs import StructuredOutputsParams
from engine.sampling import choosers
from engine.sampling_params import SamplingParams
from engine.worker.step_plan import StepPlan
from tests.engine.checkpoints import build_model, save_checkpoint
from tests.engine.models.decoder.recurrent.recurrent_families import (
    RECURRENT_FAMILIES,
    build_recurrent_model,
    save_as_published,
)
from tests.engine.tiny_tokenizers import VOCAB_SIZE, save_tokenizer

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"seed": 1},
    {"seed": 2, "top_p": 0.9, "logprobs": 1},
    {"seed": 3, "top_k": 5, "min_p": 0.01},
    {"seed": 4, "temperature": 2.0, "top_p": 0.999},
    {"temperature": 0.0, "min_tokens": 6, "stop_token_ids": list(range(0, 90, 2))},
    {"seed": 5, "stop_token_ids": list(range(0, 90, 5))},
    {"seed": 6, "n": 3, "logprobs": 0},
    {"seed": 7, "n": 1, "best_of": 3},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"temperature": 0.0, "bad_words_token_ids": ((3,), (4, 5))},
    {"temperature": 0.0, "beam_width": 3, "n": 2},
    {"seed": 8, "logit_bias": {7: 2.0}, "prompt_logprobs": 2},
    {"seed": 9, "structured_outputs": StructuredOutputsParams(regex="[a-c]{3,9}")},
]
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "num_blocks": 96,
    "block_size": 4,
    "max_num_batched_tokens": 48,
    "swap_space_gib": 0.001,
    "use_tqdm_on_load": False,
}


MODELS: list[Any] = ["qwen3", *(pytest.param(name, marks=pytest.mark.long) for name in ("qwen3.5", "nemotron-3-nano"))]


@pytest.fixture(scope="module")
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    if request.param in RECURRENT_FAMILIES:
        save_as_published(build_recurrent_model(request.param, vocab_size=VOCAB_SIZE), directory)
    else:
        save_checkpoint(build_model(request.param), directory)
    save_tokenizer(directory)
    return str(directory)


def answers(path: str, **options: Any) -> tuple[list[Any], LLM]:
    """Return what an engine answers to two rounds of one request of each kind; the second finds cached prefixes."""
    llm = LLM(path, **OPTIONS | options)
    params = [SamplingParams(max_tokens=12 + index % 5, **kind) for index, kind in enumerate(KINDS)]
    prompts: list[Any] = [{"prompt_token_ids": [5 + index % 4, *range(10, 14 + index)]} for index in range(len(KINDS))]
    seen = []
    for _ in range(2):
        for output in llm.generate(prompts, params, use_tqdm=False):
            seen.append([asdict(completion) for completion in output.outputs] + [output.prompt_logprobs])
    return seen, llm


@pytest.mark.parametrize("path", MODELS, indirect=True)
@pytest.mark.parametrize("speculative_config", [None, {"method": "ngram", "num_speculative_tokens": 3}])
def test_answers_are_the_same_with_overlap(
    path: str, speculative_config: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = answers(path, speculative_config=speculative_config)
    num_taken = 0
    take = StepPlan.take_sampled

    def count(plan: StepPlan, *args: Any) -> None:
        nonlocal num_taken
        num_taken += plan.num_pending
        take(plan, *args)

    monkeypatch.setattr(StepPlan, "take_sampled", count)
    overlapped, llm = answers(path, speculative_config=speculative_config, async_scheduling=True)
    assert num_taken > 200, "no token went from step to step on the device"
    for kind, got, wanted in zip([*KINDS, *KINDS], overlapped, expected, strict=True):
        assert got == wanted, kind
    manager = llm.engine.block_manager
    assert manager.num_free_blocks == len(manager.pool.blocks)


@pytest.mark.parametrize("path", ["qwen3", "qwen3.5"], indirect=True)
def test_a_token_that_the_device_leaves_undecided_is_chosen_for_the_right_position(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step has moved on by a position when the host chooses, and has computed another token."""
    monkeypatch.setattr(choosers.cpu_sampling, "can_sample", lambda rows: False)  # torch leaves tokens undecided
    late = 0
    choose_sorted = choosers.TruncatedDraw.choose_sorted

    def count(chooser: choosers.TruncatedDraw, *args: Any) -> Any:
        nonlocal late
        late += 1
        return choose_sorted(chooser, *args)

    monkeypatch.setattr(choosers.TruncatedDraw, "choose_sorted", count)
    params = [SamplingParams(seed=seed, temperature=2.0, top_p=0.99, max_tokens=20) for seed in range(4)]
    prompts: list[Any] = [{"prompt_token_ids": [5, 6, 7 + seed]} for seed in range(4)]
    seen = []
    for num_candidates in (4, 512):
        for overlap in (False, True):
            llm = LLM(path, async_scheduling=overlap, **OPTIONS)
            llm.engine.runner.sampler._num_candidates = num_candidates  # type: ignore[attr-defined]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seen.append([output.outputs[0].token_ids for output in outputs])
    assert late > 20
    assert seen[0] == seen[1] == seen[2] == seen[3]
