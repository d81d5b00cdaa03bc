"""require_same_vocabulary: whether the token ids of two checkpoints mean the same texts, read without transformers."""

from __future__ import annotations

from pathlib import Path

from engine.errors import ConfigError, ModelLoadError
from engine.models.config.files.tokenizer_eos import tokens_of

__all__ = ["require_same_vocabulary"]


def require_same_vocabulary(path: str, other: str) -> None:
    """Check the tokenizers of two checkpoints, as far as their files list texts and ids of tokens.

    Raises:
        ConfigError: if an id is another token in the second one.
        ModelLoadError: if a file is damaged.
    """
    tokens, others = _texts(path), _texts(other)
    if not tokens or not others:  # a format without such a list, as tiktoken's
        return
    for token_id in sorted(tokens.keys() | others.keys()):
        if tokens.get(token_id) != others.get(token_id):
            raise ConfigError(
                f"has another tokenizer than '{path}': token {token_id} is {others.get(token_id)!r} there, and "
                f"{tokens.get(token_id)!r} here",
                param="speculative_config",
                part="model",
                value=other,
                remedy="give a draft model with the same vocabulary",
            )


def _texts(path: str) -> dict[int, str]:
    if not Path(path).is_dir():
        return {}
    try:
        tokens = list(tokens_of(path))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ModelLoadError(
            f"the tokenizer's files in '{path}' do not list its tokens ({reason}); download them again"
        ) from error
    return {token_id: text for text, token_id in tokens if isinstance(token_id, int) and isinstance(text, str)}
