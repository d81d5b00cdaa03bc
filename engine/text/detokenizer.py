"""IncrementalDetokenizer: a stream of token ids to a stream of text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import partial
from itertools import dropwhile, islice

from engine.text.token_bytes import TokenBytes
from engine.text.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer"]

_CONTEXT = 12  # tokens of the prompt: the parts of a character at both ends, and enough for any spacing rule between


class IncrementalDetokenizer:
    """Turns a stream of token ids into a stream of text, which does not depend on how the ids are batched.

    The pieces of text add up to the text of all tokens, without that of the prompt. Characters are shown once all
    their bytes are there: the UTF-8 state of the tokens' bytes decides. With nearly every tokenizer, the text is
    simply those bytes (``TokenBytes.joins``). With the others, windows of tokens are decoded.

    In one case the text is not that of ``Tokenizer.decode``: if a run of byte tokens (``<0xF0>``) is not UTF-8, that
    decodes the whole run to U+FFFD. Here its whole characters stay, since a stream has shown them.

    Args:
        tokenizer: of the model.
        prompt_token_ids: the tokens before the text.
        skip_special_tokens: whether the text leaves out special tokens.
        shown_special_tokens: special tokens that it shows nevertheless.
        keeps_first_space: whether a text without a prompt keeps the space of its first word, which is dropped
            otherwise: a grammar may have asked for it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        shown_special_tokens: frozenset[int] = frozenset(),
        keeps_first_space: bool = False,
    ) -> None:
        self._skipped = tokenizer.special_ids - shown_special_tokens if skip_special_tokens else frozenset()
        self._token_bytes = tokenizer.token_bytes
        self._whole_text = tokenizer.token_bytes.whole_text
        context = self._last_shown(prompt_token_ids)
        self._decoder = _new_decoder(tokenizer)
        self._decoder.decode(b"".join(map(self._token_bytes, context)))  # the answer may complete its last character
        self.at_start = not (context or keeps_first_space)
        self._windows = None
        if not self._token_bytes.joins:
            self._windows = _Windows(tokenizer, _from_whole_character(context, self._token_bytes), self._num_pending)
        self._is_plain = not (self.at_start or self._windows or self._num_pending)

    def push(self, token_ids: Sequence[int], *, final: bool = False) -> str:
        """Append ``token_ids`` and return the text that no later token can change; all remaining text if ``final``."""
        text = self._push(token_ids[0]) if len(token_ids) == 1 else "".join(map(self._push, token_ids))
        return text + self._rest() if final else text

    def _push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        if self._is_plain:
            text = self._whole_text(token_id)
            if text is not None:
                return text
        return self._push_bytes(token_id)

    def _push_bytes(self, token_id: int) -> str:
        if not self._token_bytes.is_token(token_id):
            return ""
        text = self._decoder.decode(
            self._token_bytes.at_start(token_id) if self.at_start else self._token_bytes(token_id)
        )
        self.at_start, is_complete = False, not self._num_pending
        if self._windows is not None:
            return self._windows.push(token_id, is_complete=is_complete)
        self._is_plain = is_complete
        return text

    def _rest(self) -> str:
        text = self._decoder.decode(b"", final=True)
        return text if self._windows is None else self._windows.text_so_far()

    @property
    def _num_pending(self) -> int:
        """Number of bytes of a character that is not complete."""
        return len(self._decoder.getstate()[0])

    def _last_shown(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """Return the last tokens of the prompt's text."""
        is_token, skipped = self._token_bytes.is_token, self._skipped
        shown = (token_id for token_id in reversed(prompt_token_ids) if token_id not in skipped and is_token(token_id))
        return list(islice(shown, _CONTEXT))[::-1]


def _from_whole_character(token_ids: list[int], token_bytes: TokenBytes) -> list[int]:
    """Return the tokens without the first ones that continue a character, as whose bytes the next would decode."""
    return list(dropwhile(lambda token_id: b"\x80" <= token_bytes(token_id)[:1] < b"\xc0", token_ids))


def _new_decoder(tokenizer: Tokenizer) -> codecs.IncrementalDecoder:
    errors = _EACH_BYTE if tokenizer.token_bytes.replaces_each_byte else "replace"
    return codecs.getincrementaldecoder("utf-8")(errors=errors)


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


_EACH_BYTE = "pagoda-replace-each-byte"
codecs.register_error(_EACH_BYTE, _replace_each_byte)


class _Windows:
    """Text of tokens whose texts depend on their neighbours.

    Each token is decoded together with a short window of tokens before it, which does not begin with a space. What this
    adds to the window's text is new.
    The method is Text Generation Inference's (prefix and read offsets).
    """

    def __init__(self, tokenizer: Tokenizer, context: list[int], num_pending: int) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=False)
        self._token_bytes = tokenizer.token_bytes
        self._token_ids = context
        self._prefix_offset = 0
        self._read_offset = len(context)
        while num_pending > 0:  # the prompt ends inside a character, which the answer completes
            self._read_offset -= 1
            num_pending -= len(tokenizer.token_bytes(context[self._read_offset]))
        self._before = self._decode(context[: self._read_offset])  # the window's text

    def push(self, token_id: int, *, is_complete: bool) -> str:
        """Append a token and return the new text; nothing if the token ends inside a character."""
        self._token_ids.append(token_id)
        return self.text_so_far() if is_complete else ""

    def text_so_far(self) -> str:
        """Return the text after the window, whose tokens become the next window."""
        before, after = self._before, self._decode(self._token_ids[self._prefix_offset :])
        if len(after) <= len(before):
            return ""
        # A decoder may strip spaces, and fewer of a window than of one that goes on with more of them.
        if not self._token_bytes(self._token_ids[self._read_offset]).startswith(b" "):
            self._prefix_offset = self._read_offset
        self._read_offset = len(self._token_ids)
        self._before = self._decode(self._token_ids[self._prefix_offset : self._read_offset])
        return after[len(before) :]
