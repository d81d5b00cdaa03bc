"""The bytes of tokens, on every kind of tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.tokenizer import Tokenizer
from tests.engine.text.tokenizers import KINDS, LETTERS, NEIGHBOURS, load_kind, saved_kind

CODE = "def the():\n    if the:\n        keys  =  'é🙂'\n"
TEXTS = st.text([*LETTERS, " ", " ", "\n", "€", "🎉", "日"], max_size=20)
JOINING = [kind for kind in KINDS if kind not in NEIGHBOURS]


def _joined(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    spelled = [tokenizer.token_bytes.at_start(token_id) for token_id in ids[:1]]
    return b"".join([*spelled, *map(tokenizer.token_bytes, ids[1:])]).decode()


@pytest.mark.parametrize("kind", JOINING)
@settings(max_examples=40, deadline=None)
@given(text=st.one_of(TEXTS, st.just(CODE)), special=st.booleans())
def test_the_joined_bytes_of_tokens_are_their_text(kind: str, text: str, special: bool) -> None:
    tokenizer = load_kind(kind)
    assert tokenizer.token_bytes.joins
    ids = tokenizer.encode(f"<s>{text}</s>" if special else text)
    assert _joined(tokenizer, ids) == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_has_the_bytes_of_each_id(kind: str) -> None:
    """With as many ids as the model has logits, which may be fewer or more than the tokenizer has."""
    tokenizer = load_kind(kind)
    assert tokenizer.token_bytes.joins == (kind in JOINING)
    for size in (len(tokenizer), len(tokenizer) + 60, len(tokenizer) - 1):
        table = tokenizer.token_bytes.table(size)
        assert table == [tokenizer.token_bytes(token_id) for token_id in range(size)]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "holes" in kind])
def test_ids_after_a_hole_have_their_bytes(kind: str) -> None:
    """The number of tokens is less than the largest id."""
    tokenizer = load_kind(kind)
    last = max(tokenizer._tokenizer.get_vocab().values())
    assert len(tokenizer) == last + 1 > len(tokenizer._tokenizer)
    assert tokenizer.token_bytes(last) == tokenizer.decode([last]).encode() != b""
    (hole,) = set(range(last - 3, last)) - set(tokenizer._tokenizer.get_vocab().values())
    assert (tokenizer.token_bytes(hole), tokenizer.token_bytes.name(hole), tokenizer.decode([hole])) == (b"", "", "")
    assert tokenizer.token_names([hole, last]) == ["", tokenizer._tokenizer.convert_ids_to_tokens(last)]


def test_the_spaces_of_sentencepiece_are_all_there() -> None:
    tokenizer = load_kind("byte-fallback, legacy")
    spaces, word, letter = tokenizer._tokenizer.convert_tokens_to_ids(["▁▁", "▁the", "k"])
    assert [tokenizer.token_bytes(token_id) for token_id in (spaces, word, letter)] == [b"  ", b" the", b"k"]
    assert [tokenizer.token_bytes.at_start(token_id) for token_id in (spaces, word, letter)] == [b" ", b"the", b"k"]
    assert tokenizer.token_bytes.name(word) == " the"  # as in vLLM
    assert tokenizer.token_bytes.name(word, at_start=True) == "the"


def test_the_bytes_of_tokens_join_to_the_text(tokenizer: Tokenizer) -> None:
    text = "the cache, €uro 🙂 ñandú\n"
    token_ids = tokenizer.encode(text)
    assert b"\xe2" in map(tokenizer.token_bytes, token_ids)  # a part of a character
    assert b"".join(map(tokenizer.token_bytes, token_ids)).decode() == text
    assert tokenizer.token_bytes(3) == b"<|im_start|>"
    assert tokenizer.token_bytes(10**6) == tokenizer.token_bytes(-1) == b""
    assert tokenizer.is_special(3)
    assert not tokenizer.is_special(token_ids[0])


def test_the_bytes_of_a_token_are_looked_up_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities ask for those of twenty tokens at each position."""
    first = tokenizer.token_bytes(20)
    monkeypatch.setattr(
        tokenizer.token_bytes, "_bytes_of", lambda token_id: pytest.fail(f"{token_id} was looked up again")
    )
    assert tokenizer.token_bytes(20) == first


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback, legacy", "suffixes"])
def test_after_the_warm_up_no_token_waits_for_the_vocabulary(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(saved_kind(kind))
    tokenizer.warm_up()
    monkeypatch.setattr(tokenizer._tokenizer, "get_vocab", lambda: pytest.fail("the vocabulary was read"))
    stream = IncrementalDetokenizer(tokenizer, [5], skip_special_tokens=True)
    assert stream.push(range(5, 50)) + stream.push([], final=True)
    assert any(map(tokenizer.token_bytes.at_start, range(5, 50)))
