"""IncrementalDetokenizer: streamed text is the whole text, without parts of characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.tokenizer import Tokenizer
from tests.engine.text.tokenizers import KINDS, LETTERS, NEIGHBOURS, decoded, load_kind

CHARACTERS = [*LETTERS, " ", " ", "\n", "€", "🎉", "🙂", "日", "\ufffd", "\x7f"]
SPECIAL = ["<s>", "</s>", "<tool_call>", "two words", "<| a b |>", "<|im_end|>"]


@st.composite
def _token_ids(draw: Callable[..., object], kind: str, max_size: int) -> list[int]:
    """Ids of a text with special tokens, which may begin inside a character, or any ids: bytes that are no text."""
    tokenizer = load_kind(kind)
    any_ids = st.lists(st.integers(0, len(tokenizer) - 1), max_size=max_size)
    texts = st.lists(st.sampled_from([*CHARACTERS, *SPECIAL]), max_size=max_size).map(
        lambda parts: tokenizer.encode("".join(parts), add_special_tokens=False)
    )
    parts = draw(st.lists(st.one_of(texts, texts.map(lambda ids: ids[1:]), any_ids), max_size=3))
    assert isinstance(parts, list)
    return [token_id for part in parts for token_id in part]


def _cut(ids: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    pieces, position = [], 0
    for size in [*sizes, len(ids)]:
        pieces.append(ids[position : position + size])
        position += size
    return pieces


def _streamed(
    tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], skip: bool, sizes: Sequence[int] = (1,) * 200
) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return "".join(detokenizer.push(piece) for piece in _cut(ids, sizes)) + detokenizer.push([], final=True)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50, deadline=None)
@given(data=st.data(), skip=st.booleans(), sizes=st.lists(st.integers(0, 5), max_size=8))
def test_streamed_text_is_what_decode_makes_of_all_tokens(
    kind: str, data: st.DataObject, skip: bool, sizes: list[int]
) -> None:
    """However the tokens are batched, and divided between prompt and answer."""
    tokenizer, ids = load_kind(kind), data.draw(_token_ids(kind, 16))
    whole = decoded(tokenizer, ids, skip=skip)
    assume(kind not in NEIGHBOURS or whole == tokenizer.decode(ids, skip_special_tokens=skip))  # no broken run
    assert _streamed(tokenizer, [], ids, skip) == whole
    assert _streamed(tokenizer, [], ids, skip, sizes) == whole
    if kind in NEIGHBOURS:  # the last token of the prompt has another text when an answer follows
        return
    for cut in range(len(ids) + 1):
        prompt = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=skip).push(ids[:cut])
        assert prompt + _streamed(tokenizer, ids[:cut], ids[cut:], skip) == whole, cut


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "byte" in kind or kind == "runs of spaces"])
@pytest.mark.parametrize(
    "text", ["🙂🙂", "the 🙂🙂 keys", "line\n🙂 next", '{"a":"🙂"}', "日本語🎉", "é🎉", "🎉" * 7, "\ufffd🙂\ufffd"]
)
def test_characters_of_several_tokens_come_whole(kind: str, text: str) -> None:
    """A character is shown with its last token, and no token adds U+FFFD, wherever the prompt ends."""
    tokenizer = load_kind(kind)
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    assert whole.strip() == text
    for cut in range(len(ids)):
        detokenizer = IncrementalDetokenizer(tokenizer, ids[:cut], skip_special_tokens=False)
        pieces = [detokenizer.push([token_id]) for token_id in ids[cut:]]
        assert whole.endswith("".join(pieces))
        assert "".join(pieces).count("\ufffd") <= text.count("\ufffd")
        assert detokenizer.push([], final=True) == ""


def test_ordinary_tokens_are_decoded_without_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding windows for every token would take ten times as long."""
    tokenizer = load_kind("byte-fallback, legacy")
    ids = tokenizer.encode("the keys and the values of every token 🙂")
    text = _streamed(tokenizer, ids[:3], ids[3:], skip=True)
    monkeypatch.setattr(tokenizer, "decode", lambda *_, **__: pytest.fail("a window was decoded"))
    assert _streamed(tokenizer, ids[:3], ids[3:], skip=True) == text


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback, legacy"])
def test_a_tokenizer_that_is_not_written_in_rust_gives_the_same_text(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.text.tokenizer._rust_tokenizer", lambda tokenizer: None)
    tokenizer = load_kind.__wrapped__(kind)
    assert not tokenizer.token_bytes.joins
    text = "the 🎉🙂 keys\n🙂 next"
    ids = tokenizer.encode(text)
    assert ids == load_kind(kind).encode(text)
    for cut in range(len(ids)):
        assert text.endswith(_streamed(tokenizer, ids[:cut], ids[cut:], skip=True))
    assert _streamed(tokenizer, [], ids, skip=True) == text


def test_half_a_character_is_shown_only_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é")
    detokenizer = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=True)
    assert detokenizer.push(ids[:1]) == ""
    assert detokenizer.push([], final=True) == "\ufffd"


def test_half_a_character_of_byte_tokens_is_as_many_replacement_characters(byte_fallback_tokenizer: Tokenizer) -> None:
    """As decode has it. The whole characters before it have been shown, which decode would replace too."""
    tokenizer = byte_fallback_tokenizer
    ids = tokenizer.encode("a🎉")[:-1]
    assert tokenizer.decode(ids) == _streamed(tokenizer, [], ids, skip=True) == "a\ufffd\ufffd\ufffd"
    assert _streamed(tokenizer, [], tokenizer.encode("a🎉🎉")[:-2], skip=True) == "a🎉\ufffd\ufffd"


def test_an_answer_completes_the_character_that_the_prompt_began(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("aéb")
    detokenizer = IncrementalDetokenizer(tokenizer, ids[:2], skip_special_tokens=True)
    assert detokenizer.push(ids[2:]) == "éb"


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


@pytest.mark.parametrize("kind", ["byte-fallback, legacy", "byte-fallback, holes", "metaspace always", "word-piece"])
def test_an_id_without_a_token_does_not_begin_a_text(kind: str) -> None:
    """A model may have more logits than its tokenizer has tokens."""
    tokenizer = load_kind(kind)
    ids, unused = tokenizer.encode("the keys", add_special_tokens=False), len(tokenizer) + 2
    text = tokenizer.decode([unused, *ids])
    assert text == tokenizer.decode(ids) == _streamed(tokenizer, [], [unused, *ids], skip=True)
    assert text == _streamed(tokenizer, [unused], ids, skip=True)


def test_the_first_space_may_be_kept(byte_fallback_tokenizer: Tokenizer) -> None:
    """A prompt of special tokens is not a text; a grammar may have asked for the space of the first word."""
    ids = byte_fallback_tokenizer.encode("ab")
    for prompt, keeps, text in (([], False, "ab"), ([1], False, "ab"), ([1], True, " ab"), (ids, False, " ab")):
        detokenizer = IncrementalDetokenizer(
            byte_fallback_tokenizer, prompt, skip_special_tokens=True, keeps_first_space=keeps
        )
        assert detokenizer.push(ids) == text
