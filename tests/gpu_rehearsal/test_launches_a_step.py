"""Launches and waits of an eager decode step, in which launching would take most of the time of a small model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.llm import LLM
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler_output import SchedulerOutput
from tests.engine.checkpoints import build_model, save_checkpoint
from tests.gpu_rehearsal.rehearsal import Rehearsal

A_LAYER, A_STEP = 10, 20  # most launches of a layer, and of the rest of a step
A_WINDOW = 3  # and of a sliding window with pages of its own: the copy of its slots, and its block tables
FAMILIES = ("llama", "qwen2", "qwen3")


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Models of one and of two layers."""
    paths = []
    for num_layers in (1, 2):
        model = build_model(request.param, num_hidden_layers=num_layers)
        paths.append(Path(save_checkpoint(model, tmp_path_factory.mktemp(request.param))))
    return paths


def launches_of_a_decode(gpu: Rehearsal, llm: LLM, num_seqs: int, **options: Any) -> int:
    """Return the launches, copies included, of a greedy step that decodes as many sequences as the step before."""
    counts: dict[tuple[int, ...], int] = {}
    run = llm.engine.runner.run

    def counted(output: SchedulerOutput, *args: object) -> object:
        before = gpu.machine.num_launches
        sampled = run(output, *args)
        counts[tuple(output.num_new_tokens)] = gpu.machine.num_launches - before  # the last of its kind is kept
        return sampled

    llm.engine.runner.run = counted  # type: ignore[method-assign,assignment]
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, **options)
    llm.generate([{"prompt_token_ids": [5, 6 + i, 7]} for i in range(num_seqs)], params, use_tqdm=False)
    llm.engine.runner.run = run  # type: ignore[method-assign]
    return counts[(1,) * num_seqs]


def test_a_greedy_decode(checkpoints: list[Path], gpu: Rehearsal) -> None:
    llms = [
        gpu.start(str(path), dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True) for path in checkpoints
    ]
    num_windows = len(llms[1].engine.info.windows)  # Qwen2's second layer has one
    for num_seqs in (1, 4):
        single, two = (launches_of_a_decode(gpu, llm, num_seqs) for llm in llms)
        assert two - single <= A_LAYER + num_windows * A_WINDOW, f"a layer makes {two - single} launches"
        assert single <= A_LAYER + A_STEP, f"a step of one layer makes {single} launches"
    gpu.machine.check()


@pytest.mark.parametrize("checkpoints", ["llama"], indirect=True)
def test_changes_of_logits(checkpoints: list[Path], gpu: Rehearsal) -> None:
    """Each is one launch. Two more note the new tokens: their copy to the device, and the histories' update."""
    llm = gpu.start(str(checkpoints[0]), dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True)
    greedy = launches_of_a_decode(gpu, llm, 4)
    kinds: list[tuple[dict[str, Any], int]] = [
        ({"logit_bias": {5: 1.0}}, 1),
        ({"allowed_token_ids": [5, 6]}, 1),
        ({"min_tokens": 5, "stop_token_ids": [5]}, 2),
        ({"bad_words_token_ids": ((5,), (6, 7))}, 4),
        ({"repetition_penalty": 1.1}, 4),
        ({"frequency_penalty": 1.1}, 5),
    ]
    for options, most in kinds:
        assert 0 < launches_of_a_decode(gpu, llm, 4, **options) - greedy <= most, options
    gpu.machine.check()
