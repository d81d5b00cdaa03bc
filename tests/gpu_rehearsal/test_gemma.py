"""Gemma 3n and 4 on a simulated GPU: several residual streams; heads of different sizes; shared keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.models.decoder.gemma.gemma_families import GEMMA_FAMILIES, save_gemma_model
from tests.gpu_rehearsal.family_models import EAGER, GRAPHS, TWO_RANKS, Models, check_steps, start
from tests.gpu_rehearsal.rehearsal import Rehearsal
from tests.gpu_rehearsal.scenarios import VOCAB_SIZE
from tests.gpu_rehearsal.test_graphs import A_STEP, Steps
from tests.gpu_rehearsal.test_launches_a_step import A_WINDOW, launches_of_a_decode

ALTUP = "gemma-3n-e4b"
A_LAYER = 14  # launches of a layer that caches nothing, its feed-forward included


def _save(name: str, path: Path, **changes: Any) -> str:
    sizes = {"vocab_size": VOCAB_SIZE, "vocab_size_per_layer_input": VOCAB_SIZE}
    return save_gemma_model(name, path, **(sizes | changes))[1]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(_save, tmp_path_factory)


@pytest.mark.parametrize("case", ["gemma-4-e4b"], indirect=True)
def test_answers_are_those_of_the_cpu(case: tuple[str, Any], gpu: Rehearsal) -> None:
    check_steps(gpu, *case, GRAPHS)
    for kernel in ("prefill_kernel", "split_decode_kernel"):
        assert gpu.launches.arguments[f"{kernel}.HEAD_DIM"] == {16, 32}


@pytest.mark.parametrize("case", [ALTUP], indirect=True)
def test_answers_of_several_residual_streams(case: tuple[str, Any], gpu: Rehearsal) -> None:
    check_steps(gpu, *case, GRAPHS)


@pytest.mark.exhaustive("what CI runs for two models, for all kinds of Gemma 3n and 4")
@pytest.mark.parametrize("options", [GRAPHS, EAGER, TWO_RANKS], ids=["graphs", "eager", "two ranks"])
@pytest.mark.parametrize("case", GEMMA_FAMILIES, indirect=True)
def test_answers_of_every_kind(
    case: tuple[str, Any], options: dict[str, Any], request: pytest.FixtureRequest, gpu: Rehearsal
) -> None:
    if ALTUP in request.node.callspec.id and options == TWO_RANKS:
        pytest.skip("ranks do not share it")
    check_steps(gpu, *case, options)


def test_launches_of_a_decode(models: Models, gpu: Rehearsal) -> None:
    """The layers after the second read what the first two cache."""
    counts = (2, 4)
    paths = [
        models.path(
            "gemma-4-e4b",
            num_hidden_layers=count,
            layer_types=["sliding_attention", "full_attention"] * (count // 2),
            num_kv_shared_layers=count - 2,
        )
        for count in counts
    ]
    captured = []
    for path in paths:
        steps = Steps(gpu, start(gpu, path, dtype="bfloat16", **GRAPHS))
        steps.generate(3)
        assert steps.replays[1, 1, 1] == 1
        captured.append(steps.launches[1, 1, 1])
    assert captured[0] == captured[1] <= A_STEP + A_WINDOW
    two, four = (launches_of_a_decode(gpu, start(gpu, path, dtype="bfloat16", **EAGER), 3) for path in paths)
    assert four - two <= 2 * A_LAYER, f"two layers make {four - two} launches"
    gpu.machine.check()
