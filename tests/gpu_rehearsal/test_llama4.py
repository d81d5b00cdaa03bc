"""Llama 4 on a simulated GPU: layers that attend within chunks, whose pages are freed, beside layers that see all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kernels.attention.window import Chunk
from tests.engine.models.decoder.llama4.llama4_models import CHUNK, LLAMA4_MODELS, save_llama4_model
from tests.gpu_rehearsal.family_models import EAGER, GRAPHS, SCENARIO, TWO_RANKS, Models, check_steps, start
from tests.gpu_rehearsal.kernel_contracts import ContractError
from tests.gpu_rehearsal.rehearsal import Rehearsal
from tests.gpu_rehearsal.scenarios import VOCAB_SIZE, answers, generate


def _save(name: str, path: Path, **changes: Any) -> str:
    return save_llama4_model(name, path, **({"vocab_size": VOCAB_SIZE} | changes))[1]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(_save, tmp_path_factory)


@pytest.mark.parametrize("case", ["llama-4-scout"], indirect=True)
def test_answers_are_those_of_the_cpu(case: tuple[str, Any], gpu: Rehearsal) -> None:
    check_steps(gpu, *case, GRAPHS)
    for kernel in ("prefill_kernel", "split_decode_kernel", "plan_splits_kernel"):
        assert gpu.launches.arguments[f"{kernel}.CHUNK"] == {0, CHUNK}


@pytest.mark.exhaustive("what CI runs for one model, for all kinds of Llama 4")
@pytest.mark.parametrize("options", [GRAPHS, EAGER, TWO_RANKS], ids=["graphs", "eager", "two ranks"])
@pytest.mark.parametrize("case", LLAMA4_MODELS, indirect=True)
def test_answers_of_every_kind(case: tuple[str, Any], options: dict[str, Any], gpu: Rehearsal) -> None:
    check_steps(gpu, *case, options)


@pytest.mark.parametrize("case", ["llama-4-scout"], indirect=True)
def test_kernels_that_know_no_chunks_are_found(
    case: tuple[str, Any], gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no room for the splits of all keys."""
    monkeypatch.setattr("kernels.attention.triton.backend.sliding_and_chunk", lambda window: (0, 0))
    with pytest.raises(ContractError, match="splits do not fit into"):
        generate(start(gpu, case[0], **GRAPHS), SCENARIO)


@pytest.mark.parametrize("case", ["llama-4-scout"], indirect=True)
def test_a_chunk_that_is_one_token_longer_answers_otherwise(
    case: tuple[str, Any], gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = {None: (0, 0), Chunk(CHUNK): (0, CHUNK + 1)}
    monkeypatch.setattr("kernels.attention.triton.backend.sliding_and_chunk", longer.__getitem__)
    assert answers(generate(start(gpu, case[0], **GRAPHS), SCENARIO)) != case[1]
