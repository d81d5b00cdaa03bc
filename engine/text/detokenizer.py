"""IncrementalDetokenizer: a stream of token ids to a stream of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.text.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer"]

_MAX_UNDECODABLE = 4  # tokens: a character has at most four bytes
_CONTEXT = 12  # tokens of the prompt: the parts of a character at both ends, and enough for any spacing rule between


class IncrementalDetokenizer:
    """Turns a stream of token ids into a stream of text, which does not depend on how the ids are batched.

    A token's text depends on its neighbours (leading spaces, characters split over several byte tokens). So each token
    is decoded together with a short window of tokens before it. What this adds to the window's text is new. Tokens that
    end in the middle of a character are held back. The method is Text Generation Inference's (prefix and read offsets).

    ``tokenizers.decoders.DecodeStream`` does the same in Rust, but it has no limit on what is held back and no final
    flush. It decodes ordinary tokens. This class decodes the tokens where the two differ.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._token_ids = list(prompt_token_ids[-_CONTEXT:])
        self._prefix_offset = 0
        self._read_offset = len(self._token_ids)
        self._before: str | None = None  # the window's text, once it is needed
        self._step: Callable[[int], str | None] | None = None  # of a DecodeStream with this window
        for held_back in range(_MAX_UNDECODABLE):
            before = self._decode(0, len(self._token_ids) - held_back)
            if not before.endswith("\ufffd"):
                # If held_back is not 0, the prompt ends inside a character, which the answer completes.
                self._before, self._read_offset = before, len(self._token_ids) - held_back
                break
        self._open_stream()

    def push(self, token_ids: Sequence[int], *, final: bool = False) -> str:
        """Append ``token_ids`` and return the text that no later token can change; all remaining text if ``final``."""
        text = self._push(token_ids[0]) if len(token_ids) == 1 else "".join(map(self._push, token_ids))
        return text + self._decode_window(final=True) if final else text

    def _push(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        if self._step is not None:
            try:
                text = self._step(token_id)
            except Exception:  # the new token changes the text of the window; tokenizers raises no type of its own
                self._step = None
            else:
                if text is not None:
                    self._advance()
                    return text
        return self._decode_window()

    def _decode_window(self, *, final: bool = False) -> str:
        """Return the text after the window; nothing while it may be a part of a character, unless ``final``."""
        if self._read_offset == len(self._token_ids):
            return ""
        before, after = self._window_text(), self._decode(self._prefix_offset, len(self._token_ids))
        undecodable = len(after) - len(after.rstrip("\ufffd"))
        if len(after) <= len(before) or (0 < undecodable < _MAX_UNDECODABLE and not final):
            return ""
        self._advance()
        self._open_stream()
        return after[len(before) :]

    def _advance(self) -> None:
        """Make the tokens with new text the window of the next tokens."""
        self._prefix_offset, self._read_offset = self._read_offset, len(self._token_ids)
        self._before = None

    def _open_stream(self) -> None:
        """Leave the next tokens to a DecodeStream, unless the window or what is held back has a part of a character."""
        self._step = None
        if self._read_offset == len(self._token_ids) and not self._window_text().endswith("\ufffd"):
            window = self._token_ids[self._prefix_offset :]
            self._step = self._tokenizer.decode_stream(window, skip_special_tokens=self._skip_special_tokens)

    def _window_text(self) -> str:
        if self._before is None:
            self._before = self._decode(self._prefix_offset, self._read_offset)
        return self._before

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._token_ids[start:end], skip_special_tokens=self._skip_special_tokens)
