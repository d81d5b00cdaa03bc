"""IncrementalDetokenizer: streamed text is the whole text, without parts of characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.tokenizer import Tokenizer
from tests.engine.text.tokenizers import KINDS, PlainDetokenizer

CHARACTERS = "abthe é€🎉日\ufffd.,'"


@cache
def _tokenizer(kind: str) -> Tokenizer:
    with TemporaryDirectory() as path:
        KINDS[kind](Path(path))
        return Tokenizer(path)


@st.composite
def _token_ids(draw: Callable[..., object], kind: str, max_size: int) -> list[int]:
    """Ids of a text, which may begin inside a character, or any ids: also bytes that are no text."""
    tokenizer = _tokenizer(kind)
    any_ids = st.lists(st.integers(0, len(tokenizer) - 1), max_size=max_size)
    texts = st.text(CHARACTERS, max_size=max_size).map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    parts = draw(st.lists(st.one_of(texts.map(lambda ids: ids[1:]), texts, any_ids), max_size=3))
    assert isinstance(parts, list)
    return [token_id for part in parts for token_id in part]


def _cut(ids: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    pieces, position = [], 0
    for size in [*sizes, len(ids)]:
        pieces.append(ids[position : position + size])
        position += size
    return pieces


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans(), sizes=st.lists(st.integers(0, 5), max_size=8))
def test_the_text_is_that_of_the_plain_method_however_tokens_are_batched(
    kind: str, data: st.DataObject, skip: bool, sizes: list[int]
) -> None:
    tokenizer = _tokenizer(kind)
    prompt, ids = data.draw(_token_ids(kind, 12)), data.draw(_token_ids(kind, 20))
    plain = PlainDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    expected = [*(plain.push([token_id]) for token_id in ids), plain.push([], final=True)]
    single = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    assert [*(single.push([token_id]) for token_id in ids), single.push([], final=True)] == expected
    batched = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    text = "".join(batched.push(piece) for piece in _cut(ids, sizes)) + batched.push([], final=True)
    assert text == "".join(expected)


def test_a_tokenizer_that_is_not_written_in_rust_gives_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = _tokenizer("byte-level")
    ids = tokenizer.encode("the 🎉 keys")
    text = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=True).push(ids)
    monkeypatch.setattr(tokenizer, "_rust", None)
    assert tokenizer.encode("the 🎉 keys") == ids
    plain = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=True)
    assert plain._step is None
    assert plain.push(ids) == text == "the 🎉 keys"


def test_ordinary_tokens_are_decoded_by_the_stream_of_the_rust_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding windows for every token would take several times as long."""
    KINDS["byte-level"](tmp_path)
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode("the keys and the values of every token")
    detokenizer = IncrementalDetokenizer(tokenizer, ids[:3], skip_special_tokens=True)
    monkeypatch.setattr(tokenizer, "decode", lambda *_, **__: pytest.fail("a window was decoded"))
    assert "the" in "".join(detokenizer.push([token_id]) for token_id in ids[3:])


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40), cuts=st.lists(st.integers(1, 4), max_size=40))
def test_streamed_text_is_the_whole_text(tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    """However the tokens are batched, and characters split over them, the pieces add up."""
    prompt, ids = tokenizer.encode("the keys"), tokenizer.encode(text)
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=True)
    pieces = [*(detokenizer.push(piece) for piece in _cut(ids, cuts)), detokenizer.push([], final=True)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


def test_half_a_character_is_shown_only_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é")
    detokenizer = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=True)
    assert detokenizer.push(ids[:1]) == ""
    assert detokenizer.push([], final=True) == "\ufffd"


def test_an_answer_completes_the_character_that_the_prompt_began(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("aéb")
    detokenizer = IncrementalDetokenizer(tokenizer, ids[:2], skip_special_tokens=True)
    assert detokenizer.push(ids[2:]) == "éb"


@pytest.mark.parametrize("prompt", ["🎉🎉", "🎉" * 7, "日本語🎉", "é🎉"])
def test_a_prompt_that_ends_inside_a_character_adds_no_garbage(tokenizer: Tokenizer, prompt: str) -> None:
    """The window of context may begin inside a character too, and what is before the answer is never its text."""
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert len(ids) == len(prompt.encode())
    for cut in (1, 2, 3):
        detokenizer = IncrementalDetokenizer(tokenizer, ids[:-cut], skip_special_tokens=True)
        assert "".join(detokenizer.push([token_id]) for token_id in ids[-cut:]) == "🎉"


def test_a_prompt_that_is_no_text_is_not_repeated_in_the_answer(tokenizer: Tokenizer) -> None:
    broken = tokenizer.encode("é")[-1:] * 20  # continuations of nothing
    detokenizer = IncrementalDetokenizer(tokenizer, broken, skip_special_tokens=True)
    assert detokenizer.push(tokenizer.encode("the keys", add_special_tokens=False)) == "the keys"


def test_bytes_that_never_become_a_character_do_not_pile_up(tokenizer: Tokenizer) -> None:
    broken = tokenizer.encode("é")[:1]
    detokenizer = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=True)
    shown = [detokenizer.push(broken) for _ in range(20)]
    assert any(shown[:8])
    assert set("".join(shown)) == {"\ufffd"}


def test_a_character_of_four_byte_tokens_comes_whole(byte_fallback_tokenizer: Tokenizer) -> None:
    """Until its last byte, SentencePiece's byte tokens decode to one replacement character each."""
    tokenizer = byte_fallback_tokenizer
    ids = tokenizer.encode("a🎉b", add_special_tokens=False)
    assert [tokenizer.token_bytes(token_id) for token_id in ids[-5:]] == [b"\xf0", b"\x9f", b"\x8e", b"\x89", b"b"]
    detokenizer = IncrementalDetokenizer(tokenizer, ids[:-5], skip_special_tokens=True)
    assert [detokenizer.push([token_id]) for token_id in ids[-5:]] == ["", "", "", "🎉", "b"]
