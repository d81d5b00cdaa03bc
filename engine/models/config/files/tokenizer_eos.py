"""tokenizer_eos_id: the EOS token of a checkpoint's tokenizer, read without transformers.

The files of the tokenizer name it by its text, and have its id in one of several places.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.models.config.files.json_file import read_json

__all__ = ["tokenizer_eos_id", "tokens_of"]


def tokenizer_eos_id(path: str | Path) -> int | None:
    """Return the id of the tokenizer's EOS token; None if its files name none, or not its id.

    Raises:
        ModelLoadError: if a file is not valid JSON.
    """
    config = _read(path, "tokenizer_config.json")
    eos = _text_of(config.get("eos_token")) or _text_of(_read(path, "special_tokens_map.json").get("eos_token"))
    if eos is None:
        return None
    try:
        ids = (token_id for text, token_id in tokens_of(path, config) if text == eos)
        return next((token_id for token_id in ids if type(token_id) is int and token_id >= 0), None)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):  # a tokenizer that does not load, either
        return None


def tokens_of(path: str | Path, config: dict[str, Any] | None = None) -> Iterator[tuple[Any, Any]]:
    """Yield texts and ids of a tokenizer's tokens, from the quickest place to the slowest; unchecked values.

    Args:
        config: of tokenizer_config.json, if it is already read.
    """
    config = _read(path, "tokenizer_config.json") if config is None else config
    added = config.get("added_tokens_decoder")
    for token_id, token in added.items() if isinstance(added, dict) else ():
        if token_id.isdecimal():
            yield _text_of(token), int(token_id)
    tokenizer = _read(path, "tokenizer.json")
    if not tokenizer:  # GPT-2's older files, from which transformers makes it
        for name in ("added_tokens.json", "vocab.json"):
            yield from _read(path, name).items()
    for token in tokenizer.get("added_tokens") or ():
        yield _text_of(token), token.get("id")
    vocabulary = (tokenizer.get("model") or {}).get("vocab")
    if isinstance(vocabulary, dict):
        yield from vocabulary.items()
    else:  # a list of pairs of text and score
        yield from ((pair[0], token_id) for token_id, pair in enumerate(vocabulary or ()))


def _read(path: str | Path, name: str) -> dict[str, Any]:
    file = Path(path) / name
    return read_json(file) if file.is_file() else {}


def _text_of(token: Any) -> str | None:
    """Return the text of a token, which may be a mapping with more about it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
