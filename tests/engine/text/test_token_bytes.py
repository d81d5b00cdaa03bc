"""The bytes of tokens."""

from __future__ import annotations

import pytest

from engine.text.tokenizer import Tokenizer


def test_the_bytes_of_tokens_join_to_the_text(tokenizer: Tokenizer) -> None:
    text = "the cache, €uro 🙂 ñandú\n"
    token_ids = tokenizer.encode(text)
    assert b"\xe2" in map(tokenizer.token_bytes, token_ids)  # a part of a character
    assert b"".join(map(tokenizer.token_bytes, token_ids)).decode() == text
    assert tokenizer.token_bytes(3) == b"<|im_start|>"
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.is_special(3)
    assert not tokenizer.is_special(token_ids[0])


def test_the_bytes_of_a_token_are_looked_up_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities ask for those of twenty tokens at each position."""
    first = tokenizer.token_bytes(20)
    monkeypatch.setattr(
        tokenizer.token_bytes, "_bytes_of", lambda token_id: pytest.fail(f"{token_id} was looked up again")
    )
    assert tokenizer.token_bytes(20) == first
