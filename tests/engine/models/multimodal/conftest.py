"""Tiny multimodal checkpoints, each written when a test first asks for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.engine.models.multimodal.tiny_checkpoints import Saved, save

Published = Callable[[str], Saved]


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """Return a function from a name to its checkpoint, as published."""
    return cache(lambda name: save(name, tmp_path_factory.mktemp(name)))
