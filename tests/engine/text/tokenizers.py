"""Small tokenizers of every kind of decoder, and the text of tokens by the plainest method: transformers' decode."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from engine.text.tokenizer import Tokenizer
from tests.engine.tiny_tokenizers import save_tokenizer

__all__ = ["KINDS", "LETTERS", "NEIGHBOURS", "decoded", "load_kind", "saved_kind"]

TEXTS = ["the cache holds the keys", "    and  the values, of every token.", "é don't stop"] * 4
LETTERS = [*"▁abcdehklnostuvy,.'é"]
SPECIAL = ["<unk>", "<s>", "</s>"]
NAMES = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
BYTE = re.compile("<0x[0-9A-F]{2}>")
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
RUNS = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁▁", "  "), decoders.Replace("▁", " ")]


def _save(tokenizer: RustTokenizer, path: Path, **names: str) -> None:
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **(names or NAMES)).save_pretrained(path)


def _save_byte_level(path: Path, *, add_prefix_space: bool = False, holes: bool = False) -> None:
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    _save(_with_holes(tokenizer) if holes else tokenizer, path)


def _with_holes(tokenizer: RustTokenizer) -> RustTokenizer:
    """Leave out some ids, two of them before the last one."""
    data: dict[str, Any] = json.loads(tokenizer.to_str())
    last = max(data["model"]["vocab"].values())
    gap = {token_id: token_id + (token_id > 260) + (token_id >= last) for token_id in range(last + 1)}
    data["model"]["vocab"] = {name: gap[token_id] for name, token_id in data["model"]["vocab"].items()}
    return RustTokenizer.from_str(json.dumps(data))


def _save_stripped(path: Path) -> None:
    """Byte-level tokens whose text loses its first space."""
    _save_byte_level(path)
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(path)
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    tokenizer.save_pretrained(path)


def _save_added_tokens(path: Path, save: Callable[[Path], None] = _save_byte_level) -> None:
    save(path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    tokenizer.add_tokens(["<tool_call>", "two words", "Ä ö", AddedToken("<right>", rstrip=True), "日本"])
    tokenizer.add_tokens([AddedToken("<| a b |>", special=True)], special_tokens=True)
    tokenizer.save_pretrained(path)


def _save_byte_fallback(
    path: Path, *, legacy: bool = True, strips: bool = True, holes: bool = False, steps: Sequence[Any] = LLAMA
) -> None:
    """SentencePiece's BPE: spaces are part of tokens, and characters without a token are bytes."""
    trained = RustTokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=90, initial_alphabet=LETTERS, show_progress=False)
    )
    merges = [(a, b) for a, b in json.loads(trained.to_str())["model"]["merges"] if set(a + b) <= {*LETTERS}]
    merges += [("▁", "▁"), ("▁▁", "▁▁")]  # indentation of code, as in Mistral's
    words = dict.fromkeys([*LETTERS, *(a + b for a, b in merges)])
    names = [*SPECIAL, *BYTE_TOKENS, *words, *["\n", "\t"]]
    vocab = {name: index for index, name in enumerate(names)}
    tokenizer = RustTokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    if legacy:
        prepend = [normalizers.Prepend("▁")] if strips else []
        tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([*steps] if strips else [*steps][:-1])
    _save(_with_holes(tokenizer) if holes else tokenizer, path)


def _save_metaspace(path: Path, *, scheme: str = "always", split: bool = True) -> None:
    tokenizer = RustTokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme, split=split)
    trainer = trainers.UnigramTrainer(
        vocab_size=80, special_tokens=SPECIAL, unk_token="<unk>", initial_alphabet=LETTERS, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    _save(tokenizer, path)


def _save_unigram_with_bytes(path: Path) -> None:
    _save_metaspace(path, scheme="first", split=False)
    data = json.loads((path / "tokenizer.json").read_text())
    data["model"]["vocab"] += [[name, -20.0] for name in BYTE_TOKENS]
    data["model"]["byte_fallback"] = True
    tokenizer = RustTokenizer.from_str(json.dumps(data))
    tokenizer.decoder = decoders.Sequence(LLAMA)
    _save(tokenizer, path)


def _save_word_piece(path: Path, *, decoder: Any) -> None:
    tokenizer = RustTokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(
        [*TEXTS, "do n't"], trainers.WordPieceTrainer(vocab_size=90, special_tokens=SPECIAL, show_progress=False)
    )
    tokenizer.decoder = decoder
    _save(tokenizer, path)


def _save_suffixes(path: Path) -> None:
    """The space after a word is part of its last token, and missing at the end of a text."""
    tokenizer = RustTokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(vocab_size=90, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    _save(tokenizer, path)


KINDS: dict[str, Callable[[Path], None]] = {
    "byte-level with a chat template": save_tokenizer,
    "byte-level": _save_byte_level,
    "byte-level, prefix space": partial(_save_byte_level, add_prefix_space=True),
    "byte-level, holes": partial(_save_byte_level, holes=True),
    "byte-level, added tokens": _save_added_tokens,
    "byte-fallback, legacy": _save_byte_fallback,
    "byte-fallback, not legacy": partial(_save_byte_fallback, legacy=False),
    "byte-fallback, no prefix": partial(_save_byte_fallback, strips=False),
    "byte-fallback, holes": partial(_save_byte_fallback, holes=True),
    "byte-fallback, added tokens": partial(_save_added_tokens, save=_save_byte_fallback),
    "metaspace always": _save_metaspace,
    "metaspace first": partial(_save_metaspace, scheme="first"),
    "metaspace never": partial(_save_metaspace, scheme="never"),
    "metaspace not split": partial(_save_metaspace, split=False),
    "unigram, byte fallback": _save_unigram_with_bytes,
    "word-piece": partial(_save_word_piece, decoder=decoders.WordPiece()),
    "word-piece, no clean-up": partial(_save_word_piece, decoder=decoders.WordPiece(cleanup=False)),
    "no decoder": partial(_save_word_piece, decoder=None),
    "suffixes": _save_suffixes,
    "runs of spaces": partial(_save_byte_fallback, steps=RUNS),
    "byte-level, stripped": _save_stripped,
    "two spaces stripped": partial(_save_byte_fallback, steps=[*LLAMA[:-1], decoders.Strip(" ", 2, 0)]),
}
NEIGHBOURS = (
    "suffixes",
    "runs of spaces",
    "byte-level, stripped",
    "two spaces stripped",
)  # a token's text depends on those beside it


@cache
def load_kind(kind: str) -> Tokenizer:
    """Return the tokenizer of a kind."""
    return Tokenizer(saved_kind(kind))


def saved_kind(kind: str) -> Path:
    """Return where the tokenizer of a kind is; training it again may give its tokens other ids."""
    return Path(_directory(kind).name)


@cache
def _directory(kind: str) -> TemporaryDirectory[str]:
    directory = TemporaryDirectory()  # removed at the end of the process
    KINDS[kind](Path(directory.name))
    return directory


def decoded(tokenizer: Tokenizer, token_ids: Sequence[int], *, skip: bool) -> str:
    """Return what transformers decodes, without changing spaces.

    It replaces a run of byte tokens as a whole if it is not UTF-8. Here only the bytes that are no character are
    replaced: such a run stands as one private character in the tokens that transformers decodes.
    """
    hidden = set(tokenizer._tokenizer.all_special_ids) | {
        token_id for token_id, token in tokenizer._tokenizer.added_tokens_decoder.items() if token.special
    }
    shown = [token_id for token_id in token_ids if not (skip and token_id in hidden)]
    names = tokenizer._tokenizer.convert_ids_to_tokens(shown)
    private = tokenizer._tokenizer.convert_tokens_to_ids(["<0xEE>", "<0x80>", "<0x80>"])
    tokens, broken = list[int](), list[str]()
    for is_byte, run in groupby(zip(shown, names, strict=True), lambda pair: bool(BYTE.fullmatch(pair[1] or ""))):
        ids, spelled = zip(*run, strict=True)
        text = _replaced(bytes(int(name[3:5], 16) for name in spelled)) if is_byte else ""
        if "\ufffd" in text:
            broken.append(text)
        tokens += private if "\ufffd" in text else ids
    whole = str(tokenizer._tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
    return re.sub("\ue000", lambda _: broken.pop(0), whole)


def _replaced(data: bytes) -> str:
    """Return the characters of ``data``, and U+FFFD for each byte that is not part of one."""
    text, rest = "", data
    while rest:
        for size in (1, 2, 3, 4):
            with suppress(UnicodeDecodeError):
                text, rest = text + rest[:size].decode(), rest[size:]
                break
        else:
            text, rest = text + "\ufffd", rest[1:]
    return text
