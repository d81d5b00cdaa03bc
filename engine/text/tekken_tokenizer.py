"""Mistral's tokenizer: a tekken.json, the only file of a tokenizer in some of Mistral's checkpoints.

transformers reads the vocabulary and the special tokens. What only Mistral's own program knows is added here: which
tokens start and end a text, and that a text starts with one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import ModelLoadError

__all__ = ["is_tekken_tokenizer", "tekken_tokenizer", "tekken_version"]

_FILE = "tekken.json"
_OTHERS = ("tokenizer.json", "tokenizer.model", "vocab.json")  # which transformers reads first
_NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def is_tekken_tokenizer(path: Path) -> bool:
    """Whether tekken.json is a checkpoint's only tokenizer."""
    return (path / _FILE).is_file() and not any((path / name).exists() for name in _OTHERS)


def tekken_version(path: Path) -> str | None:
    """Return the version that tekken.json names, such as ``v11``, by which the prompts differ; None without one."""
    try:
        config: Any = _content(path).get("config")
    except (OSError, ValueError, RecursionError, AttributeError):
        return None
    version = config.get("version") if isinstance(config, dict) else None
    return version if isinstance(version, str) else None


def tekken_tokenizer(path: Path) -> Any:
    """Return Mistral's tokenizer as one of transformers; it raises what ``AutoTokenizer.from_pretrained`` does.

    Raises:
        ModelLoadError: if the file does not list its special tokens, as those of the first versions do not.
    """
    from tokenizers import processors
    from transformers import AutoTokenizer

    if not _content(path).get("special_tokens"):
        raise ModelLoadError(
            f"'{path / _FILE}' lists no special_tokens, so their ids are unknown; add the checkpoint's tokenizer.json"
        )
    # transformers knows a wrong pattern of some tokenizer.json files, and would warn of it; this file has its own.
    options = {"trust_remote_code": False, "local_files_only": True, "fix_mistral_regex": False}
    tokenizer: Any = AutoTokenizer.from_pretrained(str(path), **options)
    vocabulary = tokenizer.get_vocab()
    for name, token in _NAMED.items():
        if token in vocabulary and getattr(tokenizer, name) is None:
            setattr(tokenizer, name, token)
    if (bos := tokenizer.bos_token) is not None:
        start = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])])
        bytes_ = processors.ByteLevel(trim_offsets=False)
        tokenizer.backend_tokenizer.post_processor = processors.Sequence([bytes_, start])
    return tokenizer


def _content(path: Path) -> Any:
    return json.loads((path / _FILE).read_text(encoding="utf-8"))
