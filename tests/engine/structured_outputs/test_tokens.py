"""GrammarTokens: on every kind of tokenizer, a client gets the text that its grammar accepts."""

from __future__ import annotations

import json
import pickle
import random
import re
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from engine.options.structured_outputs import StructuredOutputsParams
from engine.sampling_params import SamplingParams
from engine.structured_outputs.grammar import Grammar, new_matcher
from engine.structured_outputs.tokens import GrammarTokens, _Wrapper
from engine.text.text_stream import TextStream
from engine.text.tokenizer import Tokenizer
from tests.engine.structured_outputs.random_texts import MODEL, allowed_tokens
from tests.engine.text.tokenizers import KINDS, NEIGHBOURS, load_kind, saved_kind

EOS = 2
# Without a decoder, a space separates all tokens, so a word that is begun with a letter cannot be completed.
JOINING = [kind for kind in KINDS if kind not in (*NEIGHBOURS, "no decoder")]
WITH_ALL_BYTES = [kind for kind in JOINING if kind.startswith("byte")]


@cache
def _tokens(kind: str, more_logits: int = 0) -> GrammarTokens:
    return GrammarTokens.load(saved_kind(kind), len(load_kind(kind)) + more_logits, [EOS])


def _grammar(tokens: GrammarTokens, **form: Any) -> Grammar:
    vocabulary = tokens.vocabulary()
    return Grammar(new_matcher(tokens.new_tokenizer(), vocabulary, StructuredOutputsParams(**form)), vocabulary)


def _random_tokens(grammar: Grammar, seed: int) -> list[int]:
    rng, token_ids = random.Random(seed), list[int]()
    while token_ids[-1:] != [EOS]:
        allowed = allowed_tokens(grammar)
        assert allowed, token_ids
        token_ids.append(rng.choice(allowed))
        assert grammar.accept(token_ids[-1]), grammar.error
    assert grammar.error is None
    return token_ids


def _shown(tokenizer: Tokenizer, prompt: Sequence[int], token_ids: Sequence[int], **form: Any) -> list[str]:
    """Return the text that clients get, at once and streamed, with and without special tokens."""
    texts = []
    for skip in (True, False):
        params = SamplingParams(structured_outputs=StructuredOutputsParams(**form), skip_special_tokens=skip)
        streams = [TextStream(tokenizer, prompt, params, end_token_ids=[EOS]) for _ in range(2)]
        texts.append(streams[0].push(token_ids, final=True))
        pieces = [streams[1].push([token_id]) for token_id in token_ids[:-1]]
        texts.append("".join(pieces) + streams[1].push(token_ids[-1:], final=True))
    return texts


@pytest.mark.parametrize("more_logits", [0, 60, -1], ids=["as many", "more logits", "more tokens"])
@pytest.mark.parametrize("kind", JOINING)
def test_a_choice_is_what_the_client_gets(kind: str, more_logits: int) -> None:
    """With and without a text before it, also if the tokenizer has a token that the model has no logit for."""
    tokenizer, tokens = load_kind(kind), _tokens(kind, more_logits)
    written = (b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) for text in ("the keys", "and  the", "é "))
    form = {"choice": [text.decode() for text in written]}
    for seed in range(6):
        token_ids = _random_tokens(_grammar(tokens, **form), seed)
        for prompt in ([], [1], tokenizer.encode("the"), [1, *tokenizer.encode("token.")]):
            (text,) = set(_shown(tokenizer, prompt, token_ids, **form))
            assert text in form["choice"]


@pytest.mark.parametrize("kind", WITH_ALL_BYTES)
def test_json_with_characters_of_several_tokens_parses(kind: str) -> None:
    tokenizer, tokens, value = load_kind(kind), _tokens(kind), {"é": "🙂🙂", "the keys": ["日本", "    <s>\n"]}
    form = {"json": {"enum": [value]}}
    for seed in range(3):
        token_ids = _random_tokens(_grammar(tokens, **form), seed)
        (text,) = set(_shown(tokenizer, tokenizer.encode("the"), token_ids, **form))
        assert json.loads(text) == value
    form = {"regex": "[🙂🎉é]{3}"}
    for seed in range(10):
        (text,) = set(_shown(tokenizer, [1], _random_tokens(_grammar(tokens, **form), seed), **form))
        assert len(text) == 3
        assert set(text) <= set("🙂🎉é")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "holes" in kind])
def test_a_grammar_may_need_the_ids_after_a_hole(kind: str) -> None:
    tokenizer, tokens = load_kind(kind), _tokens(kind)
    last = len(tokenizer) - 1
    assert _random_tokens(_grammar(tokens, regex=re.escape(tokenizer.token_bytes(last).decode())), 0) == [last, EOS]
    allowed = set(allowed_tokens(_grammar(tokens, regex="(?s:.*)")))
    assert last in allowed
    assert allowed <= set(tokenizer._tokenizer.get_vocab().values())


@pytest.mark.parametrize("kind", ["byte-level", "byte-level, prefix space", "byte-fallback, legacy"])
def test_text_that_must_come_next_is_written_with_the_tokenizers_own_tokens(kind: str) -> None:
    tokenizer, tokens = load_kind(kind), _tokens(kind)
    own = tokenizer.encode(" the keys", add_special_tokens=False)
    form = {"choice": [b"".join(map(tokenizer.token_bytes, own)).decode()]}
    assert _random_tokens(_grammar(tokens, **form), 0) == [*own, EOS]


def test_text_that_the_tokenizer_would_change_is_written_with_other_tokens() -> None:
    """Special tokens that the text spells, and tokens without a logit."""
    kind = "byte-level, added tokens"
    tokenizer, tokens = load_kind(kind), _tokens(kind)
    for text in ("<s>", "x<| a b |>y", "<tool_call>two words"):
        token_ids = _random_tokens(_grammar(tokens, choice=[text]), 0)
        assert tokenizer.decode(token_ids[:-1], skip_special_tokens=True) == text
    marker = tokenizer.encode("<tool_call>")[0]
    assert marker in _random_tokens(_grammar(tokens, choice=["<tool_call>two words"]), 0)
    fewer = _tokens(kind, marker - len(tokenizer))
    spelled = _random_tokens(_grammar(fewer, choice=["<tool_call>two words"]), 0)
    assert tokenizer.decode(spelled[:-1]) == "<tool_call>two words"


LONG = [
    "the keys " * 200,
    "the keys " * 100 + "<s>" + " and the values" * 60,
    " " * 500 + "<s>" * 40 + "\n" * 500,
    "<tool_call>" * 20 + "\u65e5\u672c" * 100 + "<right>   x" * 20 + "two words" * 30 + "<| a b |>",
]


@pytest.mark.parametrize("text", LONG, ids=lambda text: repr(text[:10]))
@pytest.mark.parametrize("kind", WITH_ALL_BYTES)
def test_a_long_text_that_must_come_next_is_written_to_its_end(kind: str, text: str) -> None:
    tokenizer, tokens = load_kind(kind), _tokens(kind)
    token_ids = _random_tokens(_grammar(tokens, choice=[text]), 0)
    assert b"".join(map(tokenizer.token_bytes, token_ids[:-1])).decode() == text
    own = tokenizer.encode(text, add_special_tokens=False)
    if kind == "byte-level" and tokenizer.special_ids.isdisjoint(own):
        assert token_ids == [*own, EOS]


class _Counted(dict[bytes, int]):
    """Tokens by their bytes; ``bytes_read`` counts the bytes of those that were looked up."""

    bytes_read = 0

    def get(self, spelled: bytes, default: Any = None) -> Any:
        self.bytes_read += len(spelled)
        return super().get(spelled, default)

    def __contains__(self, spelled: object) -> bool:
        assert isinstance(spelled, bytes)
        self.bytes_read += len(spelled)
        return super().__contains__(spelled)


def _work(tokens: GrammarTokens, text: str) -> tuple[int, int]:
    """Return the characters that are tokenised, and the bytes of looked-up tokens, when ``text`` must come next."""
    wrapper, tokenised = _Wrapper(tokens), list[str]()
    rust, counted = wrapper._rust, _Counted(wrapper._ids)

    def encode(text: str, **options: Any) -> Any:
        tokenised.append(text)
        return rust.encode(text, **options)

    wrapper._rust = SimpleNamespace(encode=encode)
    wrapper.__dict__["_ids"] = counted
    written = b"".join(tokens.spelled[token_id] for token_id in wrapper(text))
    assert text.encode().startswith(written)
    assert written
    return len("".join(tokenised)), counted.bytes_read


@pytest.mark.parametrize("unit", ["the keys ", "the keys <s>", "<s>", "e\u0301", "\U0001f642<s>"])
@pytest.mark.parametrize("kind", ["byte-level, added tokens", "byte-level with a chat template"])
def test_the_work_of_a_mask_does_not_grow_with_the_text(kind: str, unit: str) -> None:
    tokens = _tokens(kind)
    assert _work(tokens, unit * 300) == _work(tokens, unit * 1000) == _work(tokens, unit * 1000 + "<s>")


def test_tokens_of_another_model_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens, and the model only 100 logits"):
        GrammarTokens.load(MODEL, 100, [EOS])
    with pytest.raises(ValueError, match=r"EOS ids \[5000\] are outside the model's 4040 logits"):
        GrammarTokens.load(MODEL, 4040, [5000])


@pytest.mark.parametrize("kind", NEIGHBOURS)
def test_a_tokenizer_whose_texts_are_not_joined_tokens_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="its decoder is not one whose texts are joined tokens"):
        _tokens(kind)


def test_they_reach_the_child_process() -> None:
    tokens = _tokens("byte-fallback, holes")
    assert pickle.loads(pickle.dumps(tokens)) == tokens
