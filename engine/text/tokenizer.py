"""Tokenizer: text to token ids and back, with the checkpoint's own tokenizer."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from engine.errors import ConfigError, ModelLoadError, RequestError
from engine.models.gguf.file import is_gguf
from engine.text.chat_template import ChatTemplate
from engine.text.gguf_tokenizer import gguf_tokenizer
from engine.text.tekken_tokenizer import is_tekken_tokenizer, tekken_tokenizer
from engine.text.template_files import find_chat_template, suggested_template, with_default
from engine.text.template_forms import LateSystemMessages
from engine.text.tiktoken_tokenizer import is_kimi_tokenizer, kimi_tokenizer
from engine.text.token_bytes import TokenBytes

__all__ = ["Tokenizer", "TruncationSide", "import_tokenizers"]

logger = logging.getLogger(__name__)

TruncationSide = Literal["left", "right"]


def import_tokenizers() -> None:
    """Import the libraries of Tokenizer. It takes seconds, so a thread can do it early."""
    from transformers import AutoTokenizer  # noqa: F401


class Tokenizer:
    """The tokenizer of a checkpoint's directory or of a GGUF file.

    Args:
        path: the checkpoint's directory.
        chat_template: a jinja file that replaces the checkpoint's chat template, or one of PACKAGED_TEMPLATES.
        late_system_messages: as for TemplateForms.

    Attributes:
        chat_template: renders conversations; the checkpoint may have none.
        token_bytes: returns the bytes of a token; texts, names of tokens and grammars come from them.

    Raises:
        ModelLoadError: if the directory holds no tokenizer that loads without running its own code, or the GGUF file
            none.
    """

    def __init__(
        self,
        path: str | Path,
        chat_template: str | None = None,
        late_system_messages: LateSystemMessages = "refuse",
    ) -> None:
        self._tokenizer: Any = gguf_tokenizer(path) if is_gguf(path) else _tokenizer_of_directory(path)
        if chat_template is not None or not self._tokenizer.chat_template:
            self._tokenizer.chat_template = find_chat_template(Path(path), chat_template)
        self._tokenizer.chat_template = with_default(self._tokenizer.chat_template)
        self._rust = _rust_tokenizer(self._tokenizer)
        if not self.encode("a", add_special_tokens=False):  # transformers makes up a tokenizer if the files are missing
            raise ModelLoadError(f"the tokenizer of '{path}' encodes no text; add the checkpoint's tokenizer files")
        # The named ones, and those that only the table of added tokens marks as special (such as Llama 3's headers).
        special = set(self._tokenizer.all_special_tokens)
        special |= {token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special}
        self._special_tokens: list[str] = sorted(special, key=len, reverse=True)
        suggestion = suggested_template(Path(path))
        self.chat_template = ChatTemplate(
            self._tokenizer, self.encode, self._special_tokens, late_system_messages, suggestion
        )
        self.token_bytes = TokenBytes(self._tokenizer, self._rust is not None, self.decode)

    def __len__(self) -> int:
        """Return the largest id + 1. Ids below it may be unused."""
        return self.token_bytes.size

    @cached_property
    def longest_token(self) -> int:
        """Characters, or bytes, of the longest token. A text has at least (its length / this) tokens."""
        return max(map(len, self._tokenizer.get_vocab()))

    def warm_up(self) -> None:
        """Read the vocabulary and compile the templates, so that the first request does not wait for that."""
        assert self.longest_token
        self.token_bytes.warm_up()
        if self.chat_template.response_template is not None:
            import transformers.utils.chat_parsing  # noqa: F401  (slow to import, and needed for few models)
        if self.chat_template.exists:
            with suppress(RequestError):  # a template may refuse these messages
                self.chat_template.encode([{"role": "user", "content": "a"}])

    def special_token_ids(self, tokens: Iterable[str]) -> frozenset[int]:
        """Return the ids of those of ``tokens`` that are special tokens."""
        return frozenset(
            self._tokenizer.convert_tokens_to_ids([token for token in tokens if token in self._special_tokens])
        )

    def single_token_id(self, text: str) -> int | None:
        """Return the id of the token that is exactly ``text``; None if ``text`` is several tokens."""
        token_ids = self.encode(text, add_special_tokens=False)
        return token_ids[0] if len(token_ids) == 1 else None

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of all special tokens."""
        return frozenset(self._tokenizer.convert_tokens_to_ids(self._special_tokens))

    def encode(self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False) -> list[int]:
        """Return the token ids of ``text``.

        Args:
            text: what is tokenised.
            add_special_tokens: whether the tokenizer adds its own special tokens.
            split_special_tokens: whether special tokens spelled out in the text stay plain text.

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
        if self._rust is None:
            options = {"split_special_tokens": True} if split_special_tokens else {}
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens, **options))
        self._rust.encode_special_tokens = split_special_tokens
        # Unlike ``encode``, it releases the interpreter's lock, which a long text would hold for seconds.
        (encoding,) = self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def encode_text(self, text: str, *, max_tokens: int | None = None, side: TruncationSide | None = None) -> list[int]:
        """Return the token ids of a text for an embedding, with the tokenizer's own special tokens.

        Args:
            text: what is tokenised; special tokens spelled out in it count, as in sentence-transformers.
            max_tokens: tokens to which it is cut, special ones included; None: it is not cut.
            side: on which the text is cut; None: as the tokenizer's files say.

        Raises:
            RequestError: about ``input``, if the text has an unpaired surrogate.
        """
        return self._encode_cut((text,), max_tokens, side)[0]

    def encode_pair(
        self, first: str, second: str, *, max_tokens: int | None = None, side: TruncationSide | None = None
    ) -> tuple[list[int], int]:
        """Return the token ids of two texts joined for a reranker, and how many of them are of token type 0.

        Args:
            first: the query.
            second: the document.
            max_tokens: as for ``encode_text``; the longer text is cut first.
            side: as for ``encode_text``.

        Raises:
            RequestError: about ``input``, if a text has an unpaired surrogate.
        """
        token_ids, token_types = self._encode_cut((first, second), max_tokens, side)
        if "token_type_ids" not in self._tokenizer.model_input_names:  # as in sentence-transformers
            return token_ids, len(token_ids)
        return token_ids, len(token_types) - sum(token_types)

    def _encode_cut(
        self, texts: tuple[str, ...], max_tokens: int | None, side: TruncationSide | None
    ) -> tuple[list[int], list[int]]:
        """Return the token ids and token types of one text or a pair."""
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                problem = f"has {text[error.start]!r}, an unpaired surrogate, which is not valid Unicode"
                raise RequestError(problem, param="input", remedy="send valid text") from None
        side = side or self._tokenizer.truncation_side
        if self._rust is None:
            options = {} if max_tokens is None else {"truncation": True, "max_length": max_tokens}
            self._tokenizer.truncation_side = side
            encoded = self._tokenizer(*texts, return_token_type_ids=True, **options)
            return list(encoded["input_ids"]), list(encoded["token_type_ids"])
        self._rust.encode_special_tokens = False
        if max_tokens is not None:
            self._rust.enable_truncation(max_tokens, direction=side)
        try:
            (encoding,) = self._rust.encode_batch_fast([texts if len(texts) > 1 else texts[0]], add_special_tokens=True)
        finally:
            if max_tokens is not None:
                self._rust.no_truncation()
        return list(encoding.ids), list(encoding.type_ids)

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
        if not token_ids:
            return ""  # which some decoders cannot make
        if self._rust is not None:
            return str(self._rust.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
        return str(
            self._tokenizer.decode(
                list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def token_names(self, token_ids: Sequence[int]) -> list[str]:
        """Return tokens as the vocabulary spells them; an empty name for an id that it does not have."""
        return [name or "" for name in self._tokenizer.convert_ids_to_tokens(list(token_ids))]

    def rust_json(self) -> str | None:
        """Return the tokenizer as the text of a tokenizer.json, with the tokens of tokenizer_config.json added.

        None if it is not of the library ``tokenizers``.
        """
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return None if backend is None else str(backend.to_str())

    def is_special(self, token_id: int) -> bool:
        """Whether ``decode`` omits the token when it skips special tokens."""
        return token_id in self.special_ids


def _tokenizer_of_directory(path: str | Path) -> Any:
    if not Path(path).is_dir():  # transformers would take it for a name on a hub
        raise ConfigError(f"model '{path}' is not a directory; give the path of a Hugging Face checkpoint")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # slow to import, and not needed for token ids

    try:
        if is_kimi_tokenizer(Path(path)):
            return kimi_tokenizer(Path(path))
        if is_tekken_tokenizer(Path(path)):
            return tekken_tokenizer(Path(path))
        if _has_fast_class_of_its_own(Path(path)):
            logger.info(
                "The code of the tokenizer of '%s' (auto_map) is not run: tokenizer.json is read without it", path
            )
            return PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
        return AutoTokenizer.from_pretrained(str(path), trust_remote_code=False, local_files_only=True)
    except ModelLoadError:
        raise
    except Exception as error:  # transformers and tokenizers raise anything for files that are damaged
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelLoadError(
            f"no tokenizer could be loaded from '{path}': {reason}; add the checkpoint's "
            "tokenizer files, or set skip_tokenizer_init to work with token ids"
        ) from error


def _has_fast_class_of_its_own(path: Path) -> bool:
    """Whether code of the checkpoint's own only names the tokens of its tokenizer.json, which says how to split texts.

    As that of MiniCPM-o is: a subclass of transformers' fast tokenizers, the second of two classes.
    """
    if not (path / "tokenizer.json").is_file():
        return False
    try:
        config: Any = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
        match config["auto_map"]["AutoTokenizer"]:
            case [_, str()]:
                return True
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False
    return False


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
