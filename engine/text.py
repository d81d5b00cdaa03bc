"""Text on both sides of the engine: tokenizer, chat template, incremental detokenizer, stop strings.

The engine's core deals in token ids; only the offline API and the ingress use this module. It imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, ModelLoadError, RequestError
from engine.sampling_params import SamplingParams

__all__ = ["IncrementalDetokenizer", "StopStringFilter", "TextStream", "Tokenizer", "import_tokenizers"]

_PRIVATE_USE = range(0xF0000, 0x10FFFE)  # characters that mean nothing: they stand for masked special tokens
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # how SentencePiece writes a token that is a byte
_MAX_UNDECODABLE = 4  # a character has at most four bytes, so that what stays undecodable longer is no beginning of one
_CONTEXT = 12  # tokens of the prompt: the parts of a character at both ends, and enough for any spacing rules between


def import_tokenizers() -> None:
    """Import what a Tokenizer needs, which takes seconds: whoever waits for something else can do it meanwhile."""
    from transformers import AutoTokenizer  # noqa: F401


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    Raises:
        ModelLoadError: if the directory holds no tokenizer that loads without running its own code.
    """

    def __init__(self, path: str | Path) -> None:
        if not Path(path).is_dir():  # which transformers would take for a name on a hub
            raise ConfigError(f"model '{path}' is not a directory; give the path of a Hugging Face checkpoint")
        from transformers import AutoTokenizer  # slow to import, and not needed by whoever deals in ids

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(path), trust_remote_code=False, local_files_only=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise ModelLoadError(
                f"no tokenizer could be loaded from '{path}': {str(error).splitlines()[0]}; add the checkpoint's "
                "tokenizer files, or set skip_tokenizer_init to work with token ids"
            ) from error
        if not self.encode("a", add_special_tokens=False):  # what transformers makes up where the files are missing
            raise ModelLoadError(f"the tokenizer of '{path}' knows no text; add the checkpoint's tokenizer files")
        # The named ones, and those that only the table of added tokens marks as special (Llama 3's headers, say).
        special = set(self._tokenizer.all_special_tokens)
        special |= {token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special}
        self._special_tokens: list[str] = sorted(special, key=len, reverse=True)
        self._bytes: dict[int, bytes] = {}  # of the tokens asked for so far

    def __len__(self) -> int:
        return len(self._tokenizer)

    @cached_property
    def longest_token(self) -> int:
        """Characters, or bytes, of the longest token: no text has fewer tokens than its length divided by this."""
        return max(map(len, self._tokenizer.get_vocab()))

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint says how to write a conversation."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``; special tokens written out in it count as such.

        Raises:
            RequestError: about ``prompt``, if the text has half a character (a lone surrogate), which no tokenizer can
                encode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"has {text[error.start]!r}, which is half a character", param="prompt", remedy="send valid text"
            ) from None
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def bad_words_token_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return how ``words`` are spelled in tokens, each at the start of a text and, as in vLLM, behind a space.

        Raises:
            RequestError: as ``encode`` does.
        """
        spellings = (spelling for word in words for spelling in (word, f" {word.lstrip()}"))
        tokenised = (tuple(self.encode(spelling, add_special_tokens=False)) for spelling in spellings)
        return tuple(dict.fromkeys(token_ids for token_ids in tokenised if token_ids))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``token_ids``, exactly as tokenised (spaces are not tidied up)."""
        return str(
            self._tokenizer.decode(
                list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for, also where they are only a part of a character.

        A special token is its name; an id that the tokenizer does not know is nothing.
        """
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._bytes_of(token_id)
        return found

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id >= len(self):
            return b""
        token = str(self._tokenizer.convert_ids_to_tokens(token_id))
        text = self.decode([token_id], skip_special_tokens=False)
        if "\ufffd" in text:  # no whole characters
            if byte := _BYTE_TOKEN.fullmatch(token):
                return bytes([int(byte[1], 16)])
            alphabet = _byte_level_alphabet()
            if all(character in alphabet for character in token):
                return bytes(alphabet[character] for character in token)
        # SentencePiece drops the space in front of a text, and here each token is a text.
        return (" " + text if token.startswith("▁") and not text.startswith(" ") else text).encode()

    def is_special(self, token_id: int) -> bool:
        """Whether ``decode`` leaves the token out where it skips special tokens."""
        return token_id in self._special_ids

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self._tokenizer.convert_tokens_to_ids(self._special_tokens))

    def encode_chat(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Render ``messages`` with the checkpoint's chat template and return the token ids.

        A special token spelled out in a message's content stays plain text: only the template makes control tokens.

        Raises:
            RequestError: if there is no template, or the template refuses the messages.
        """
        if not self.has_chat_template:
            raise RequestError(
                "cannot be rendered: this model has no chat template", param="messages", remedy="use /v1/completions"
            )
        for message in messages:
            if not isinstance(message, Mapping):
                raise RequestError(
                    f"cannot be rendered: a message is {type(message).__name__}",
                    param="messages",
                    remedy="give mappings with role and content",
                )
        placeholders = self._placeholders(messages)
        masked = [_replace(message, placeholders) for message in messages]
        try:
            rendered = self._tokenizer.apply_chat_template(
                masked, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # templates raise whatever they like: jinja2 errors, TypeError, KeyError
            raise RequestError(
                f"cannot be rendered: the chat template refused them: {error}", param="messages"
            ) from error
        try:
            return self._encode_masked(rendered, {character: token for token, character in placeholders.items()})
        except RequestError as error:
            raise error.renamed("messages") from None

    def _placeholders(self, messages: Sequence[dict[str, Any]]) -> dict[str, str]:
        """Return a character for each special token that does not occur in the messages and survives the template."""
        used = {character for text in _strings(messages) for character in text}
        unused = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        return dict(zip(self._special_tokens, islice(unused, len(self._special_tokens)), strict=True))

    def _encode_masked(self, rendered: str, tokens: dict[str, str]) -> list[int]:
        """Tokenise rendered text; the keys of ``tokens`` become the plain spelling of their token."""
        token_ids: list[int] = []
        start = 0
        for position, character in enumerate(rendered):
            if character in tokens:
                token_ids += self.encode(rendered[start:position], add_special_tokens=False)
                token_ids += self._tokenizer.encode(
                    tokens[character], add_special_tokens=False, split_special_tokens=True
                )
                start = position + 1
        return token_ids + self.encode(rendered[start:], add_special_tokens=False)


@cache
def _byte_level_alphabet() -> dict[str, int]:
    """Return which byte each character of a byte-level BPE token stands for (GPT-2's ``bytes_to_unicode``)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _strings(value: Any) -> Iterator[str]:
    """Yield every text inside nested lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _strings(inner)


def _replace(value: Any, replacements: dict[str, str]) -> Any:
    """Return ``value`` with every text inside nested lists and mappings rewritten."""
    if isinstance(value, str):
        for old, new in replacements.items():
            value = value.replace(old, new)
        return value
    if isinstance(value, Mapping):
        return {key: _replace(inner, replacements) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_replace(inner, replacements) for inner in value]
    return value


class IncrementalDetokenizer:
    """Turns a stream of token ids into a stream of text.

    A token's text depends on its neighbours (leading spaces, characters split over several byte tokens), so each step
    decodes a short window twice, with and without the new tokens, and emits the difference. What ends in the middle of
    a character is held back. The method is Text Generation Inference's (prefix and read offsets).
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._token_ids = list(prompt_token_ids[-_CONTEXT:])
        self._prefix_offset = 0
        self._read_offset = len(self._token_ids)
        for held_back in range(_MAX_UNDECODABLE):
            if not self._decode(0, len(self._token_ids) - held_back).endswith("\ufffd"):
                # If it is not 0, the prompt ends inside a character, which the answer completes.
                self._read_offset = len(self._token_ids) - held_back
                break

    def push(self, token_ids: Sequence[int], *, final: bool = False) -> str:
        """Append ``token_ids`` and return the text that is now certain; all that is left if ``final``."""
        self._token_ids += token_ids
        before = self._decode(self._prefix_offset, self._read_offset)
        after = self._decode(self._prefix_offset, len(self._token_ids))
        undecodable = len(after) - len(after.rstrip("\ufffd"))
        if len(after) <= len(before) or (0 < undecodable < _MAX_UNDECODABLE and not final):
            return ""
        self._prefix_offset, self._read_offset = self._read_offset, len(self._token_ids)
        return after[len(before) :]

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._token_ids[start:end], skip_special_tokens=self._skip_special_tokens)


class StopStringFilter:
    """Passes text on until a stop string appears, holding back what may be the beginning of one."""

    def __init__(self, stop_strings: Sequence[str], *, include_stop: bool = False) -> None:
        self._stop_strings = tuple(stop_strings)
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, final: bool = False) -> str:
        """Append ``text`` and return what may be shown; after a match, nothing more is."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(text.find(stop), stop) for stop in self._stop_strings if stop in text]
        if found:
            position, self.matched = min(found, key=lambda hit: (hit[0], -len(hit[1])))
            self._held = ""
            return text[: position + len(self.matched)] if self._include_stop else text[:position]
        keep = 0 if final else self._length_of_partial_match(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _length_of_partial_match(self, text: str) -> int:
        """Return the length of the longest end of ``text`` with which a stop string begins."""
        longest = max((len(stop) - 1 for stop in self._stop_strings), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop_strings):
                return length
        return 0


class TextStream:
    """The text of one request as its tokens arrive: detokenised, and cut at the first stop string."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens
        )
        self._filter = StopStringFilter(params.stop_strings, include_stop=params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        # Token by token where there are stop strings, so that the text ends with the same token however many came.
        self._token_by_token = bool(params.stop_strings)
        self.num_tokens = 0  # taken into the text; those behind a stop string are not

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did: the caller ends the request."""
        return self._filter.matched

    def push(self, token_ids: Sequence[int], *, final: bool = False) -> str:
        """Return the text that ``token_ids`` add; with ``final``, also what was held back.

        As in vLLM, stop strings are looked for only behind the first ``min_tokens`` tokens.
        """
        pieces = [token_ids[i : i + 1] for i in range(len(token_ids))] if self._token_by_token else [token_ids]
        text = ""
        for piece in pieces:
            if self.stop_string is not None:
                return text
            self.num_tokens += len(piece)
            decoded = self._detokenizer.push(piece)
            text += decoded if self.num_tokens <= self._min_tokens else self._filter.push(decoded)
        return text + self._filter.push(self._detokenizer.push([], final=True), final=True) if final else text
