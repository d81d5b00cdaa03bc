"""A compiler for the demo model, and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.structured_outputs.compiler import GrammarCompiler
from engine.text.tokenizer import Tokenizer
from tests.engine.structured_outputs.random_texts import (
    EOS_TOKEN_IDS,
    MODEL,
    VOCAB_SIZE,
)
from tests.waiting import HANG_S


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(MODEL, VOCAB_SIZE, EOS_TOKEN_IDS, timeout_s=HANG_S)
    compiler.load()
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(MODEL)
