"""gguf_tokenizer: the tokenizer that a GGUF file's metadata describes, as one of transformers.

The file has the vocabulary, merges or scores, the kinds of tokens, and a name for the way in which text is split into
words. The rest of a tokenizer.json is the same for all tokenizers of a kind, and is put together here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.errors import ModelLoadError, shown
from engine.models.gguf.file import GgufFile, open_gguf
from engine.models.gguf.stop_tokens import TURN_ENDS
from engine.text.gguf_words import BEGIN_WITH_BOS, IGNORE_MERGES, WITH_NFC, WORDS

__all__ = ["gguf_tokenizer"]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_NOT_OF_TEXT = (_UNKNOWN, _CONTROL, _UNUSED, _BYTE)
_KEY = "tokenizer.ggml."
_SENTENCEPIECE = ("llama", "gemma4")  # of scores; of merges
_SPACE = "▁"  # how SentencePiece spells a space
_WITHOUT_RSTRIP = ("<unk>", "<s>", "<|endoftext|>")  # Phi-3's other added tokens take the spaces after them
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def gguf_tokenizer(path: str | Path) -> Any:
    """Return a tokenizer of transformers, with the chat template if the file has one.

    Raises:
        ConfigError: if there is no such file.
        ModelLoadError: if it has no tokenizer, one of a kind that is not read, or one that is malformed.
    """
    from transformers import PreTrainedTokenizerFast  # slow to import

    vocabulary = _Vocabulary(open_gguf(path))
    kind = vocabulary.text("model")
    if kind == "gpt2":
        tokenizer = _byte_level(vocabulary)
    elif kind in _SENTENCEPIECE:
        tokenizer = _sentencepiece(vocabulary)
    else:
        raise vocabulary.error(f"its tokenizer is of the kind {shown(kind)}; gpt2, llama and gemma4 are supported")
    vocabulary.add_special_tokens(tokenizer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        chat_template=vocabulary.chat_template(),
        **vocabulary.named_tokens,
    )


class _Vocabulary:
    """What the metadata says about a tokenizer, checked."""

    def __init__(self, gguf: GgufFile) -> None:
        self._gguf = gguf
        self.tokens: list[str] = self._list("tokens", str)
        if not self.tokens:
            raise self.error("it has no tokens")
        types: list[int] = self._list("token_type", int, len(self.tokens)) or [_NORMAL] * len(self.tokens)
        self.types = [
            _CONTROL if kind in (_NORMAL, _USER_DEFINED) and token in TURN_ENDS else kind
            for token, kind in zip(self.tokens, types, strict=True)
        ]
        ids = {name: self._id(key) for name, key in _NAMED.items()}
        self.named_tokens = {name: self.tokens[token_id] for name, token_id in ids.items() if token_id is not None}

    @property
    def vocab(self) -> dict[str, int]:
        """The tokens' ids, without the names of unused rows of the embedding."""
        kept = set(self.named_tokens.values())
        return {
            token: token_id
            for token_id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind != _UNUSED or token in kept
        }

    @property
    def architecture(self) -> object:
        return self._gguf.metadata.get("general.architecture")

    def error(self, problem: str) -> ModelLoadError:
        return ModelLoadError(
            f"no tokenizer could be loaded from '{self._gguf.path}': {problem}; give a Hugging Face checkpoint's "
            "directory, or set skip_tokenizer_init to work with token ids"
        )

    def text(self, key: str) -> str | None:
        value = self._gguf.metadata.get(_KEY + key)
        if value is not None and not isinstance(value, str):
            raise self.error(f"{_KEY}{key}={shown(value)} is not a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._gguf.metadata.get(_KEY + key, default)
        if type(value) is not bool:
            raise self.error(f"{_KEY}{key}={shown(value)} is not true or false")
        return value

    def scores(self) -> list[float]:
        return self._list("scores", float, len(self.tokens))

    def merges(self) -> list[tuple[str, str]]:
        pairs = [merge.split(" ") for merge in self._list("merges", str)]
        if wrong := next((pair for pair in pairs if len(pair) != 2), None):
            raise self.error(f"the merge {shown(' '.join(wrong))} is not two tokens")
        return [(left, right) for left, right in pairs]

    def chat_template(self) -> str | dict[str, str] | None:
        """Return the template, or several by name."""
        metadata = self._gguf.metadata
        default, names = metadata.get("tokenizer.chat_template"), metadata.get("tokenizer.chat_templates", [])
        if not isinstance(names, list):
            raise self.error(f"tokenizer.chat_templates={shown(names)} is not a list of names")
        templates: dict[str, Any] = {str(name): metadata.get(f"tokenizer.chat_template.{name}") for name in names}
        if default is not None:
            templates["default"] = default
        if any(not isinstance(template, str) for template in templates.values()):
            raise self.error("its chat template is not a text")
        return templates if set(templates) - {"default"} else templates.get("default")

    def add_special_tokens(self, tokenizer: Any) -> None:
        """Add the tokens that are never split, and what begins or ends every text."""
        from tokenizers import AddedToken
        from tokenizers.processors import TemplateProcessing

        is_sentencepiece = self.text("model") in _SENTENCEPIECE
        strips = is_sentencepiece and self.architecture == "phi3"  # of the original's tokens, which no key says
        special, plain = [], []
        for token, kind in zip(self.tokens, self.types, strict=True):
            if kind in (_CONTROL, _UNKNOWN):
                rstrip = strips and token not in _WITHOUT_RSTRIP
                special.append(AddedToken(token, normalized=False, special=True, rstrip=rstrip))
            elif kind == _USER_DEFINED:
                plain.append(AddedToken(token, normalized=False, special=False, rstrip=strips))
        tokenizer.add_special_tokens(special)
        tokenizer.add_tokens(plain)
        begins = self.flag("add_bos_token", is_sentencepiece or self.text("pre") in BEGIN_WITH_BOS)
        parts = {
            "bos_token": begins and "bos_token" in self.named_tokens,
            "eos_token": self.flag("add_eos_token", False) and "eos_token" in self.named_tokens,
        }
        if not any(parts.values()):
            return
        bos, eos = (self.named_tokens[name] if is_added else None for name, is_added in parts.items())
        single = [*([bos] if bos is not None else []), "$A", *([eos] if eos is not None else [])]
        ids = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys((bos, eos)) if token is not None]
        tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=ids)

    def _id(self, name: str) -> int | None:
        key = f"{_KEY}{name}_token_id"
        token_id = self._gguf.metadata.get(key)
        if token_id is None:
            return None
        if type(token_id) is not int or not 0 <= token_id < len(self.tokens):
            raise self.error(f"{key}={shown(token_id)} is not the id of one of its {len(self.tokens)} tokens")
        return token_id

    def _list(self, key: str, kind: type, count: int | None = None) -> list[Any]:
        """Return a list of a type; empty if it is absent. If there is one, it has ``count`` elements."""
        values = self._gguf.metadata.get(_KEY + key, [])
        if not isinstance(values, list) or any(type(value) is not kind for value in values):
            raise self.error(f"{_KEY}{key} is not a list of {kind.__name__}")
        if values and count is not None and len(values) != count:
            raise self.error(f"{_KEY}{key} has {len(values)} elements for {count} tokens")
        return values


def _bpe(vocabulary: _Vocabulary, merges: Sequence[tuple[str, str]], **options: Any) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    try:
        return Tokenizer(BPE(vocab=vocabulary.vocab, merges=list(merges), **options))
    except Exception as error:  # the library has no type of its own
        raise vocabulary.error(f"its merges do not fit its tokens: {error}") from error


def _byte_level(vocabulary: _Vocabulary) -> Any:
    """Return a byte-level BPE: GPT-2's and all that came after it."""
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    pre = vocabulary.text("pre")
    if pre not in WORDS:
        raise vocabulary.error(
            f"its texts are split into words in a way that is not known (tokenizer.ggml.pre={shown(pre)})"
        )
    tokenizer = _bpe(vocabulary, vocabulary.merges(), ignore_merges=pre in IGNORE_MERGES)
    if pre in WITH_NFC:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in WORDS[pre]]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocabulary: _Vocabulary) -> Any:
    """Return a BPE of SentencePiece: spaces are part of tokens, and characters without a token are bytes."""
    from tokenizers import decoders, normalizers

    has_merges = vocabulary.text("model") == "gemma4"
    is_gemma = str(vocabulary.architecture).startswith("gemma") and not has_merges
    if is_gemma:  # the converter spells tokens that are only spaces with spaces
        vocabulary.tokens = [
            _SPACE * len(token) if token and not token.strip(" ") else token for token in vocabulary.tokens
        ]
    scores = [-float(i) for i in range(len(vocabulary.tokens))] if is_gemma else vocabulary.scores()
    if not scores and not has_merges:
        raise vocabulary.error("its tokens have no scores")
    prepends = vocabulary.flag("add_space_prefix", True)
    tokenizer = _bpe(
        vocabulary,
        vocabulary.merges() if has_merges else _merges_of(vocabulary, scores),
        unk_token=vocabulary.named_tokens.get("unk_token"),
        fuse_unk=True,
        byte_fallback=True,
    )
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prepends else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prepends else steps)
    return tokenizer


def _merges_of(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the merges of a vocabulary whose tokens are joined in the order of their scores, the highest first.

    Every pair of tokens that makes up a token of text is a merge; a control token never results from one. Pairs of one
    score are ordered as transformers does when it converts SentencePiece's files: the longest left part first, then the
    token's id.
    """
    vocab, merges = vocabulary.vocab, []
    for token, token_id in vocab.items():
        if vocabulary.types[token_id] in _NOT_OF_TEXT:
            continue
        score = scores[token_id]
        for index in range(1, len(token)):
            left, right = token[:index], token[index:]
            if left in vocab and right in vocab:
                merges.append((-score, -len(left), -len(right), token_id, left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]
