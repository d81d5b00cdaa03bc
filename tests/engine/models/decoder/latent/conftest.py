"""Tiny models with latent attention, saved once, and what transformers computes with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine.models.decoder.latent.latent_families import save_latent_model
from tests.engine.models.decoder.saved_models import Saved, SavedLong, saved_models


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """Return a function from a family's name to its model."""
    return saved_models(save_latent_model, tmp_path_factory, SavedLong)
