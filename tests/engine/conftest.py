"""Fixtures of the engine's tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.engine.checkpoints import FAMILIES, build_model, save_checkpoint

torch.set_num_threads(1)  # the models are tiny: more threads only wait for each other


@dataclass(frozen=True)
class SavedModel:
    """A transformers model and the directory that it was saved to."""

    name: str
    model: PreTrainedModel
    path: str


IN_MAKE_TEST = ("mistral", "qwen3")  # with a window, and with norms of the heads
MARKS = {
    "qwen2": pytest.mark.long,
    "llama": pytest.mark.exhaustive("Mistral's layers without the window; qwen2 and qwen3 have none either"),
}


def families(*in_make_test: str) -> list[Any]:
    """Return the families as parameters; those that are not named here are left to longer runs."""
    marks = {name: pytest.mark.long for name in FAMILIES if name not in in_make_test} | MARKS
    return [pytest.param(name, marks=marks.get(name, ())) for name in sorted(FAMILIES)]


@pytest.fixture(scope="session", params=families(*IN_MAKE_TEST))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    """Each of the four families in turn; `make test` runs two of them."""
    model = build_model(request.param)
    return SavedModel(request.param, model, save_checkpoint(model, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    """One tiny Qwen3, for tests to which the family does not matter."""
    model = build_model("qwen3")
    return SavedModel("qwen3", model, save_checkpoint(model, tmp_path_factory.mktemp("qwen3")))
