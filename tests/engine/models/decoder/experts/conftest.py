"""Tiny models with experts, saved as transformers would, and the two implementations that compute them."""

from __future__ import annotations

import pytest

from engine.models.decoder import loader
from kernels.cpu.library import library
from tests.engine.checkpoints import EXPERT_FAMILIES, build_model, save_checkpoint
from tests.engine.conftest import SavedModel


@pytest.fixture(scope="session", params=sorted(EXPERT_FAMILIES))
def sparse_family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    """Each family with experts in turn."""
    model = build_model(request.param)
    return SavedModel(request.param, model, save_checkpoint(model, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(params=["kernels", "torch"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The C kernels, or torch's operators."""
    if request.param == "torch":
        monkeypatch.setattr(loader, "cpu_kernels_can_run", lambda *_: False)
    elif library() is None:
        pytest.skip("no C compiler is installed")
    return str(request.param)
