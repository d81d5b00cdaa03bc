"""Tokenizer: text to token ids and back, with the checkpoint's own tokenizer and chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine.errors import ConfigError, ModelLoadError, RequestError
from engine.text.special_tokens import SpecialTokenMask, texts_in

__all__ = ["Tokenizer", "import_tokenizers"]

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # how SentencePiece writes a token that is a byte


def import_tokenizers() -> None:
    """Import the libraries of Tokenizer, which takes seconds, so that a thread can do it early."""
    from transformers import AutoTokenizer  # noqa: F401


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    Raises:
        ModelLoadError: if the directory holds no tokenizer that loads without running its own code.
    """

    def __init__(self, path: str | Path) -> None:
        if not Path(path).is_dir():  # transformers would take it for a name on a hub
            raise ConfigError(f"model '{path}' is not a directory; give the path of a Hugging Face checkpoint")
        from transformers import AutoTokenizer  # slow to import, and not needed for token ids

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(path), trust_remote_code=False, local_files_only=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise ModelLoadError(
                f"no tokenizer could be loaded from '{path}': {str(error).splitlines()[0]}; add the checkpoint's "
                "tokenizer files, or set skip_tokenizer_init to work with token ids"
            ) from error
        self._rust = _rust_tokenizer(self._tokenizer)
        if not self.encode("a", add_special_tokens=False):  # transformers makes it up if the files are missing
            raise ModelLoadError(f"the tokenizer of '{path}' encodes no text; add the checkpoint's tokenizer files")
        # The named ones, and those that only the table of added tokens marks as special (such as Llama 3's headers).
        special = set(self._tokenizer.all_special_tokens)
        special |= {token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special}
        self._special_tokens: list[str] = sorted(special, key=len, reverse=True)
        self._bytes: dict[int, bytes] = {}  # a cache

    def __len__(self) -> int:
        return len(self._tokenizer)

    @cached_property
    def longest_token(self) -> int:
        """Characters, or bytes, of the longest token. A text has at least its length divided by this tokens."""
        return max(map(len, self._tokenizer.get_vocab()))

    def warm_up(self) -> None:
        """Read the vocabulary and compile the templates, for which the first request would have to wait."""
        assert self.longest_token
        if self.response_template is not None:
            import transformers.utils.chat_parsing  # noqa: F401  (slow to import, and needed for few models)
        if self.has_chat_template:
            with suppress(RequestError):  # a template may refuse these messages
                self.encode_chat([{"role": "user", "content": "a"}])

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return bool(self._tokenizer.chat_template)

    @property
    def chat_template(self) -> str:
        """The source of the chat template, of all of them if there are several; empty if there is none."""
        template = self._tokenizer.chat_template or ""
        return "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template)

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        """The checkpoint's description of its answers' format, as transformers reads it; None if it has none."""
        template = getattr(self._tokenizer, "response_template", None)
        return template if isinstance(template, Mapping) else None

    @cached_property
    def renders_arguments_as_text(self) -> bool:
        """Whether the chat template takes the arguments of a tool call as JSON text, not as a mapping.

        A template that takes text either fails with a mapping, or writes it as Python does.
        """
        call = {"type": "function", "id": "call_000", "function": {"name": "f", "arguments": {"key": "value"}}}
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            rendered = str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception:  # templates raise anything
            return self._renders_text_arguments(messages, call)
        return "'key'" in rendered

    def _renders_text_arguments(self, messages: list[Any], call: dict[str, Any]) -> bool:
        call["function"]["arguments"] = '{"key": "value"}'
        try:
            return "key" in str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception:  # it refuses tool calls of any kind
            return False

    def special_token_ids(self, tokens: Iterable[str]) -> frozenset[int]:
        """Return the ids of those of ``tokens`` that are special tokens."""
        return frozenset(self._tokenizer.convert_tokens_to_ids([one for one in tokens if one in self._special_tokens]))

    def single_token_id(self, text: str) -> int | None:
        """Return the id of the one token that ``text`` is; None if it is several."""
        token_ids = self.encode(text, add_special_tokens=False)
        return token_ids[0] if len(token_ids) == 1 else None

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of all special tokens."""
        return self._special_ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``. Special tokens spelled out in it become special tokens.

        Raises:
            RequestError: about ``prompt``, if the text has an unpaired surrogate, which no tokenizer can encode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"has {text[error.start]!r}, an unpaired surrogate, which is not valid Unicode",
                param="prompt",
                remedy="send valid text",
            ) from None
        return self._encode(text, add_special_tokens=add_special_tokens)

    def _encode(self, text: str, *, add_special_tokens: bool, split_special_tokens: bool = False) -> list[int]:
        if self._rust is None:
            options = {"split_special_tokens": True} if split_special_tokens else {}
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens, **options))
        self._rust.encode_special_tokens = split_special_tokens
        # Unlike ``encode``, it releases the interpreter's lock, which a long text would hold for seconds.
        (encoding,) = self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def bad_words_token_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of each word, at the start of a text and, as in vLLM, after a space.

        Raises:
            RequestError: as ``encode``.
        """
        spellings = (spelling for word in words for spelling in (word, f" {word.lstrip()}"))
        tokenised = (tuple(self.encode(spelling, add_special_tokens=False)) for spelling in spellings)
        return tuple(dict.fromkeys(token_ids for token_ids in tokenised if token_ids))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``token_ids``, with its spaces unchanged."""
        if self._rust is not None:
            return str(self._rust.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
        return str(
            self._tokenizer.decode(
                list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def decode_stream(
        self, context: Sequence[int], *, skip_special_tokens: bool = True
    ) -> Callable[[int], str | None] | None:
        """Return a function that adds one token to ``context`` and returns the text that is new, None if none is yet.

        It is ``tokenizers.decoders.DecodeStream``, written in Rust; None if this tokenizer is not.
        """
        if self._rust is None:
            return None
        from tokenizers.decoders import DecodeStream

        return partial(DecodeStream(list(context), skip_special_tokens).step, self._rust)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, also if they are only a part of a character.

        The bytes of a special token are its name. An id that the tokenizer does not have gives no bytes.
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
        # SentencePiece drops the space at the start of a text, and here each token is a text.
        return (" " + text if token.startswith("▁") and not text.startswith(" ") else text).encode()

    def token_names(self, token_ids: Sequence[int]) -> list[str]:
        """Return tokens as the vocabulary spells them."""
        return list(self._tokenizer.convert_ids_to_tokens(list(token_ids)))

    def is_special(self, token_id: int) -> bool:
        """Whether ``decode`` omits the token when it skips special tokens."""
        return token_id in self._special_ids

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self._tokenizer.convert_tokens_to_ids(self._special_tokens))

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        template_options: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """Render ``messages`` with the checkpoint's chat template and return the token ids.

        A special token spelled out in a message or an option stays plain text; only the template writes control tokens.

        Args:
            messages: of the conversation.
            add_generation_prompt: whether the prompt ends with the start of the answer.
            continue_final_message: whether the prompt ends within the final message, which the answer continues.
            add_special_tokens: whether the tokenizer adds its own special tokens to those of the template.
            template_options: further variables of the template, such as ``tools`` and ``documents``.

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
        everything = [*messages, template_options] if template_options else messages
        mask = SpecialTokenMask(self._spelled_out(everything), everything)
        try:
            rendered = self._tokenizer.apply_chat_template(
                mask.masked_messages[: len(messages)],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(mask.masked_messages[-1] if template_options else {}),
            )
        except Exception as error:  # templates raise anything: jinja2 errors, TypeError, KeyError
            problem = f"cannot be rendered: the chat template refused them: {error}"
            raise RequestError(problem, param="messages") from error
        try:
            token_ids = self._encode_masked(rendered, mask.token_of)
        except RequestError as error:
            raise error.renamed("messages") from None
        before, after = self._added_tokens if add_special_tokens else ((), ())
        return [*before, *token_ids, *after] if before or after else token_ids

    @cached_property
    def _added_tokens(self) -> tuple[Sequence[int], Sequence[int]]:
        """The special tokens that the tokenizer adds before and after a text."""
        plain, full = self.encode("a", add_special_tokens=False), self.encode("a")
        starts = range(len(full) - len(plain) + 1)
        start = next((index for index in starts if full[index : index + len(plain)] == plain), 0)
        return full[:start], full[start + len(plain) :]

    def _spelled_out(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[str]:
        """Return all special tokens if a text of the messages has one, else none: nearly no message needs a mask."""
        has_one = self._special_tokens and any(map(self._special_pattern.search, texts_in(messages)))
        return self._special_tokens if has_one else ()

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._special_tokens)))

    def _encode_masked(self, rendered: str, token_of: Mapping[str, str]) -> list[int]:
        """Tokenise rendered text, and the special token that each placeholder stands for as plain text."""
        token_ids: list[int] = []
        start = 0
        for position, character in enumerate(rendered) if token_of else ():
            if character in token_of:
                token_ids += self.encode(rendered[start:position], add_special_tokens=False)
                token_ids += self._encode(token_of[character], add_special_tokens=False, split_special_tokens=True)
                start = position + 1
        return token_ids + self.encode(rendered[start:], add_special_tokens=False)


def _rust_tokenizer(tokenizer: Any) -> Any | None:
    """Return the tokenizer of the library ``tokenizers`` if transformers' encode and decode only call it, else None.

    Its own methods take a tenth of the time of transformers' methods around them.
    """
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.split_special_tokens:
        return None
    for name in ("encode", "_encode_plus", "decode", "_decode"):
        ours, plain = getattr(type(tokenizer), name, None), getattr(PreTrainedTokenizerFast, name, None)
        if ours is None or ours is not plain:
            return None
    rust = tokenizer.backend_tokenizer
    rust.no_truncation()
    rust.no_padding()
    return rust


@cache
def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character of byte-level BPE tokens (the inverse of GPT-2's ``bytes_to_unicode``)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
