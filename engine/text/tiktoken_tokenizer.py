"""Kimi's tokenizer: a tiktoken.model, whose checkpoint has a program of its own to read it.

transformers reads the vocabulary, but splits texts as GPT-4's tokenizer does. Kimi's splits off Chinese characters.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from engine.text.gguf_words import KIMI

__all__ = ["is_kimi_tokenizer", "kimi_tokenizer"]

_VOCABULARY = "tiktoken.model"
_CLASS = "TikTokenTokenizer"  # of the checkpoint's program


def is_kimi_tokenizer(path: Path) -> bool:
    """Whether a checkpoint's only tokenizer is Kimi's."""
    if not (path / _VOCABULARY).is_file() or (path / "tokenizer.json").exists():
        return False
    try:
        config: Any = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and config.get("tokenizer_class") == _CLASS


def kimi_tokenizer(path: Path) -> Any:
    """Return Kimi's tokenizer as one of transformers; it raises what ``AutoTokenizer.from_pretrained`` does."""
    from tokenizers import Regex, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # tiktoken would keep a copy of the file by its path, and not notice that the file has changed.
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", "")
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    words = pre_tokenizers.Split(Regex(KIMI), behavior="isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_])
    return tokenizer
