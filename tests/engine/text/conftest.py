"""Small tokenizers: byte-level BPE with a chat template, and SentencePiece's BPE with byte fallback."""

from __future__ import annotations

import pytest

from engine.text.tokenizer import Tokenizer
from tests.engine.tiny_tokenizers import save_byte_fallback_tokenizer, save_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    return Tokenizer(path)


@pytest.fixture(scope="module")
def byte_fallback_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("byte_fallback_tokenizer")
    save_byte_fallback_tokenizer(path)
    return Tokenizer(path)
