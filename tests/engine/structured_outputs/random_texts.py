"""Helpers for tests of grammars: random texts that a grammar allows, over the demo model's tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from engine.options.structured_outputs import StructuredOutputsParams
from engine.structured_outputs.bitmask import fill_bitmask
from engine.structured_outputs.compiler import GrammarCompiler
from engine.structured_outputs.grammar import Grammar
from engine.text.tokenizer import Tokenizer

MODEL = Path(__file__).parents[3] / "demo" / "model"
EOS_TOKEN_IDS = (2, 0)
TOKENS: int = json.loads((MODEL / "config.json").read_text())["vocab_size"]  # of the tokenizer
VOCAB_SIZE = TOKENS + 5  # more than the tokenizer's, and no multiple of 32


def allowed_tokens(grammar: Grammar) -> list[int]:
    """Return the ids that may come next, read from the bitmask bit by bit."""
    words = fill_bitmask([grammar])[0].tolist()
    return [token_id for token_id in range(len(words) * 32) if words[token_id // 32] >> (token_id % 32) & 1]


CLOSING = [Tokenizer(MODEL).encode(text)[0] for text in ('"', "}", "]")]


def random_tokens(grammar: Grammar, rng: random.Random, longest: int = 3000) -> list[int]:
    """Draw allowed tokens at random until the text ends; after 100 tokens, close the open brackets of JSON."""
    token_ids: list[int] = []
    while len(token_ids) < longest:
        allowed = allowed_tokens(grammar)
        assert allowed, "a mask allows nothing"
        text = [token_id for token_id in allowed if token_id not in EOS_TOKEN_IDS]
        if len(text) < len(allowed) and (not text or rng.random() < 0.3):
            assert set(EOS_TOKEN_IDS) <= set(allowed), "only some of the EOS ids are allowed"
            assert grammar.accept(rng.choice(EOS_TOKEN_IDS))
            assert grammar.is_terminated
            assert grammar.error is None
            return token_ids
        closing = [token_id for token_id in CLOSING if token_id in text] if len(token_ids) > 100 else []
        token_ids.append(closing[0] if closing else rng.choice(text))
        assert grammar.accept(token_ids[-1]), grammar.error
    pytest.fail(f"no end after {longest} tokens")


def closing_text(compiler: GrammarCompiler, tokenizer: Tokenizer, params: StructuredOutputsParams, seed: int) -> str:
    """Return a random text that the grammar allows, to its end."""
    return tokenizer.decode(random_tokens(compiler.compile(params), random.Random(seed)), skip_special_tokens=False)


def consumes(grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    """Step a grammar along a text; whether it allows every token."""
    return all(grammar.accept(token_id) for token_id in tokenizer.encode(text, add_special_tokens=False))
