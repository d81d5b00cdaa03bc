"""A small tokenizer with a chat template."""

from __future__ import annotations

import pytest

from engine.text.tokenizer import Tokenizer
from tests.engine.checkpoints import save_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    return Tokenizer(path)
