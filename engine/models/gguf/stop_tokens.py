"""stop_token_ids: the tokens that end an answer, which a GGUF file names by keys, or only by their texts.

A file's eos_token_id is a single one, though a model may end its turns with others: Gemma's is <eos>, and its answers
end with <end_of_turn>. llama.cpp finds those by their texts, and so does this module.
"""

from __future__ import annotations

from engine.errors import ModelLoadError, shown
from engine.models.gguf.file import GgufFile

__all__ = ["TOKENS", "TOKEN_TYPES", "TURN_ENDS", "is_control", "stop_token_ids"]

TOKENS, TOKEN_TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
_CONTROL = 3
_IDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|observation|>",
        "<end_of_turn>",
        "<turn|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<EOT>",
        "[EOT]",
        "[EOS]",
        "<eos>",
        "</s>",
    }
)
_ORDINARY = {"<EOT>", "[EOT]", "[EOS]", "<eos>", "</s>"}  # part of a text in some vocabularies: </s> is HTML's, too
TURN_ENDS = _TEXTS - _ORDINARY  # control tokens, whatever the file says
_HARMONY = {"<|return|>", "<|call|>"}  # where these end an answer, <|end|> only ends one of its messages


def stop_token_ids(gguf: GgufFile) -> list[int]:
    """Return the ids of the tokens that end an answer, the end of a text first.

    Raises:
        ModelLoadError: if the tokens are not a list, or an id is not one of a token.
    """
    tokens = gguf.metadata.get(TOKENS)
    if not isinstance(tokens, list | None):
        raise ModelLoadError(
            f"'{gguf.path}' could not be read: {TOKENS}={shown(tokens)} is not a list; download the file again"
        )
    count = None if tokens is None else len(tokens)
    ids: list[int] = []
    for key in _IDS:
        token_id = gguf.metadata.get(key)
        if token_id is None:
            continue
        if type(token_id) is not int or token_id < 0 or (count is not None and token_id >= count):
            raise ModelLoadError(
                f"'{gguf.path}' could not be read: {key}={shown(token_id)} is not the id of one of its "
                f"{'' if count is None else count} tokens; download the file again"
            )
        ids.append(token_id)
    by_text = {text: token_id for token_id, text in enumerate(tokens or ()) if text in _TEXTS}
    if by_text.keys() >= _HARMONY:
        by_text.pop("<|end|>", None)
    ids += [token_id for text, token_id in by_text.items() if text in TURN_ENDS or is_control(gguf, token_id)]
    return list(dict.fromkeys(ids))


def is_control(gguf: GgufFile, token_id: int) -> bool:
    """Return whether a token is a control token, not part of an answer's text."""
    types = gguf.metadata.get(TOKEN_TYPES)
    return isinstance(types, list) and token_id < len(types) and types[token_id] == _CONTROL
