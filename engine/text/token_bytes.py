"""TokenBytes: the bytes of each token, from which texts, names of tokens, log-probabilities and grammars come.

With nearly every tokenizer, a text is the joined bytes of its tokens, decoded as UTF-8. Only the first token of a text
may have other bytes than in the middle: SentencePiece drops its space. decoding_rules.py knows which decoders of
the library ``tokenizers`` work so. For the others, ``joins`` is false, and the bytes of a token are an approximation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property
from typing import Any

from engine.text.decoding_rules import DecodingRules

__all__ = ["TokenBytes"]

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")  # how SentencePiece writes a token that is a byte
_ANCHOR = re.compile("[A-Za-z0-9]+")  # a token that stands before another one, without an effect on its text
_BATCH = 4096  # tokens that are decoded in one call


class TokenBytes:
    """A function from a token's id to its bytes, which remembers them.

    Args:
        tokenizer: of transformers.
        is_plain: whether its methods only call the library ``tokenizers``.
        decode: ``Tokenizer.decode``.

    Attributes:
        joins: whether the joined bytes of tokens are their text.
        is_exact: whether they would be, if the tokenizer of transformers did not change the text.
        replaces_each_byte: whether bytes that are not UTF-8 become one U+FFFD each, instead of one for each sequence
            of bytes that begins like a character.
    """

    def __init__(self, tokenizer: Any, is_plain: bool, decode: Callable[..., str]) -> None:
        rust = getattr(tokenizer, "backend_tokenizer", None)
        self._tokenizer = tokenizer
        self._decode = decode if rust is None else rust.decode
        self._batch_decode = None if rust is None else rust.decode_batch
        self._rules = DecodingRules.of(rust)
        self.is_exact = self._rules.joins
        self.joins = is_plain and self.is_exact
        self.replaces_each_byte = self._rules.has_byte_tokens
        self._known: dict[int, bytes] = {}
        self._known_at_start: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}

    def warm_up(self) -> None:
        """Read the vocabulary, for which the first token would have to wait: half a second for 262,144 tokens."""
        assert self.size
        assert self._anchor_text is not None

    @cached_property
    def size(self) -> int:
        """The largest id + 1. Ids below it may be unused."""
        return max(self._tokenizer.get_vocab().values(), default=-1) + 1

    def __call__(self, token_id: int) -> bytes:
        """Return the bytes of a token within a text, also if they are only a part of a character.

        The bytes of a special token are its name. An id that the tokenizer does not have gives no bytes.
        """
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._bytes_of(token_id)
        return known

    def at_start(self, token_id: int) -> bytes:
        """Return the bytes of a token that begins a text: SentencePiece drops the space before the first word."""
        if not self._rules.drops_first_space:
            return self(token_id)
        known = self._known_at_start.get(token_id)
        if known is None:
            known = self._known_at_start[token_id] = self._bytes_at_start(token_id)
        return known

    def is_token(self, token_id: int) -> bool:
        """Whether the tokenizer has a token of this id; decode leaves out the others."""
        return self._name_of(token_id) is not None

    def whole_text(self, token_id: int) -> str | None:
        """Return the text of a token within a text, or None if it has parts of characters."""
        try:
            return self._texts[token_id]
        except KeyError:
            try:
                text = self(token_id).decode()
            except UnicodeDecodeError:
                text = None
            self._texts[token_id] = text
            return text

    def name(self, token_id: int, *, at_start: bool = False) -> str:
        """Return a token as log-probabilities show it: its text, with U+FFFD for parts of characters."""
        return (self.at_start(token_id) if at_start else self(token_id)).decode(errors="replace")

    def table(self, size: int) -> list[bytes]:
        """Return the bytes of the tokens 0..size - 1."""
        names: list[str | None] = [None] * max(size, self.size)
        for name, token_id in self._tokenizer.get_vocab().items():
            names[token_id] = name
        table: list[bytes] = []
        for first in range(0, size, _BATCH):
            token_ids = range(first, min(first + _BATCH, size))
            table += map(self._bytes_from, names[first : token_ids.stop], self._texts_of(token_ids))
        return table

    def _texts_of(self, token_ids: Sequence[int]) -> Iterable[str]:
        """Return the texts of many tokens after the anchor, which the library decodes in one call."""
        if self._rules.is_byte_level:
            return [""] * len(token_ids)  # the names say it all
        sequences = [[*self._anchor, token_id] for token_id in token_ids]
        if self._batch_decode is None:
            return [self._decode(sequence, skip_special_tokens=False) for sequence in sequences]
        texts: list[str] = self._batch_decode(sequences, skip_special_tokens=False)
        return texts

    def _bytes_of(self, token_id: int) -> bytes:
        return self._bytes_from(self._name_of(token_id), next(iter(self._texts_of([token_id]))))

    def _bytes_from(self, name: str | None, text: str) -> bytes:
        """Return the bytes of the token ``name``, which is ``text`` after the anchor."""
        if name is None:
            return b""
        if self._rules.is_byte_level:
            return _byte_level_bytes(name)
        if byte := self._byte_of(name):
            return byte
        spelled = text.removeprefix(self._anchor_text)
        if "\ufffd" in spelled and not self.is_exact:  # no whole characters
            return _byte_level_bytes(name)
        return spelled.encode()

    def _bytes_at_start(self, token_id: int) -> bytes:
        name = self._name_of(token_id)
        if name is None:
            return b""
        byte = self._byte_of(name)
        return byte if byte >= b"\x80" else self._decode([token_id], skip_special_tokens=False).encode()

    def _byte_of(self, name: str) -> bytes:
        """Return the byte that a token stands for; empty if it is not a byte token."""
        byte = _BYTE_TOKEN.fullmatch(name) if self._rules.has_byte_tokens else None
        return bytes([int(byte[1], 16)]) if byte else b""

    def _name_of(self, token_id: int) -> str | None:
        """Return a token as the vocabulary spells it; None if there is none of this id."""
        if not 0 <= token_id < self.size:
            return None
        name = self._tokenizer.convert_ids_to_tokens(token_id)
        return None if name is None else str(name)

    @cached_property
    def _anchor(self) -> list[int]:
        """A token of letters, if there is one. Others are decoded after it: the first one may be decoded otherwise."""
        for name, token_id in self._tokenizer.get_vocab().items():
            if _ANCHOR.fullmatch(name) and _ANCHOR.fullmatch(self._decode([token_id], skip_special_tokens=False)):
                return [token_id]
        return []

    @cached_property
    def _anchor_text(self) -> str:
        return self._decode(self._anchor, skip_special_tokens=False)


def _byte_level_bytes(name: str) -> bytes:
    """Return the bytes that a byte-level token stands for; its name's if it has other characters, as added tokens."""
    alphabet = _byte_level_alphabet()
    try:
        return bytes([alphabet[character] for character in name])
    except KeyError:
        return name.encode()


@cache
def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character of byte-level BPE tokens (the inverse of GPT-2's ``bytes_to_unicode``)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
