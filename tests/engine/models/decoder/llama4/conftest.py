"""Tiny models of Llama 4's kinds, saved once, and what transformers computes with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine.models.decoder.llama4.llama4_models import save_llama4_model
from tests.engine.models.decoder.saved_models import Saved, saved_models


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """Return a function from a kind's name to its model."""
    return saved_models(save_llama4_model, tmp_path_factory)
