"""Tokenizers of every kind of decoder, and the window method of detokenisation in its plainest form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.text.tokenizer import Tokenizer
from tests.engine.checkpoints import save_tokenizer

__all__ = ["KINDS", "PlainDetokenizer"]


def _save_byte_fallback(path: Path) -> None:
    """SentencePiece's decoder: spaces are part of tokens, and characters without a token are bytes."""
    words = ["▁", "a", "b", "t", "h", "e", "▁t", "▁the", "th", "▁a", "▁▁", "he", "é"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [("▁", "t"), ("t", "h"), ("h", "e"), ("▁t", "he"), ("▁", "a"), ("▁", "▁")]
    vocab = {name: index for index, name in enumerate(names)}
    tokenizer = RustTokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    names_of = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names_of).save_pretrained(path)


def _save_metaspace(path: Path) -> None:
    pieces = [("<unk>", 0.0), ("▁", -1.0), ("a", -2.0), ("b", -2.0), ("▁a", -1.5), ("▁the", -1.5), ("é", -3.0)]
    tokenizer = RustTokenizer(models.Unigram(pieces, 0, False))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(path)


def _save_word_piece(path: Path) -> None:
    names = ["[UNK]", "a", "b", "##a", "##b", "don", "'", "t", ".", ","]
    model = models.WordPiece({name: index for index, name in enumerate(names)}, unk_token="[UNK]")
    tokenizer = RustTokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", sep_token="[SEP]").save_pretrained(path)


KINDS: dict[str, Callable[[Path], None]] = {
    "byte-level": save_tokenizer,
    "byte-fallback": _save_byte_fallback,
    "metaspace": _save_metaspace,
    "word-piece": _save_word_piece,
}


class PlainDetokenizer:
    """Decodes two windows of tokens for every token, with transformers."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._decode_all = tokenizer._tokenizer.decode
        self._skip = skip_special_tokens
        self._ids = list(prompt[-12:])
        self._prefix, self._read = 0, len(self._ids)
        for held_back in range(4):
            if not self._decode(0, len(self._ids) - held_back).endswith("\ufffd"):
                self._read = len(self._ids) - held_back
                break

    def push(self, token_ids: Sequence[int], *, final: bool = False) -> str:
        self._ids += token_ids
        before, after = self._decode(self._prefix, self._read), self._decode(self._prefix, len(self._ids))
        undecodable = len(after) - len(after.rstrip("\ufffd"))
        if len(after) <= len(before) or (0 < undecodable < 4 and not final):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def _decode(self, start: int, end: int) -> str:
        ids = self._ids[start:end]
        return str(self._decode_all(ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False))
