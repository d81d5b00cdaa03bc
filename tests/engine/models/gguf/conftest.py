"""The GGUF files of tiny models, written once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.engine.models.gguf.converted import build_model, write_gguf

Converted = Callable[[str], tuple[Any, Path]]


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """Return a function from the name of a model to transformers' model and the GGUF file with its weights."""

    def write(name: str) -> tuple[Any, Path]:
        model, path = build_model(name), tmp_path_factory.mktemp("gguf") / f"{name}.gguf"
        write_gguf(model, name, path)
        return model, path

    return cache(write)
