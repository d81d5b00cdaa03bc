"""DecodingRules: how the decoder of a tokenizer makes a text of tokens.

It reads the decoders of the library ``tokenizers``, whose code is the authority, and knows nothing of vocabularies.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["DecodingRules"]


@dataclass(frozen=True)
class DecodingRules:
    """What the decoder of a tokenizer does.

    Attributes:
        joins: whether the text of a token depends on its neighbours only in being the first, and in bytes that form a
            character together.
        is_byte_level: whether each character of a token stands for a byte, as in GPT-2.
        has_byte_tokens: whether ``<0x0A>`` stands for a byte, as in SentencePiece.
        drops_first_space: whether the first token of a text may have another text than in the middle.
    """

    joins: bool
    is_byte_level: bool
    has_byte_tokens: bool
    drops_first_space: bool

    @classmethod
    def of(cls, rust: Any | None) -> DecodingRules:
        """Read the rules of a tokenizer of the library ``tokenizers``; None stands for code that is not known."""
        if rust is None:
            return cls(joins=False, is_byte_level=False, has_byte_tokens=True, drops_first_space=True)
        steps = [] if rust.decoder is None else list(_steps(json.loads(rust.decoder.__getstate__())))
        kinds = [step["type"] for step in steps]
        is_byte_level = "ByteLevel" in kinds
        return cls(
            joins=[kind for kind in kinds if kind != "Fuse"] == ["ByteLevel"] or _joins(steps),
            is_byte_level=is_byte_level,
            has_byte_tokens="ByteFallback" in kinds,
            drops_first_space=not is_byte_level,
        )


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the steps of nested sequences of decoders."""
    if decoder["type"] != "Sequence":
        yield decoder
        return
    for step in decoder["decoders"]:
        yield from _steps(step)


def _joins(steps: list[dict[str, Any]]) -> bool:
    """Return whether each step changes a token alone: by itself, by being the first, or a character of it alone."""
    is_fused = has_bytes = False
    for step in steps:
        match step["type"]:
            case "Fuse":
                is_fused = True
            case "ByteFallback" if not is_fused:
                has_bytes = True
            case "Replace" if not (is_fused or has_bytes) or len(step["pattern"].get("String", "")) == 1:
                pass
            case "Strip" if is_fused and step["stop"] == 0 and step["start"] <= 1:
                pass
            case "Strip" if not (is_fused or has_bytes):
                pass
            case "Metaspace" | "WordPiece" if not is_fused:
                pass
            case _:
                return False
    return True
