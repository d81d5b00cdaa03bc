"""GrammarTokens: the tokens of a model, as llguidance needs them.

The bytes are those from which texts are made (engine/text/token_bytes.py), so a client gets the text that the grammar
has accepted. It knows no grammars.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.structured_outputs.grammar import Vocabulary
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

__all__ = ["GrammarTokens"]


@dataclass(frozen=True)
class GrammarTokens:
    """The vocabulary of one model. It pickles.

    Attributes:
        spelled: for each logit, the bytes of the token; empty for an id that the tokenizer does not have.
        special_ids: tokens that no text of a grammar has, the EOS ids included.
        eos_token_ids: tokens that end a text.
        tokenizer_json: the tokenizer, as it tokenises within a text.
    """

    spelled: list[bytes]
    special_ids: list[int]
    eos_token_ids: list[int]
    tokenizer_json: str

    @classmethod
    def load(cls, model_path: str | Path, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarTokens:
        """Read the tokenizer of a checkpoint.

        Args:
            model_path: directory with the tokenizer's files.
            vocab_size: size of the model's logits; the tokenizer may have more tokens, or fewer.
            eos_token_ids: the model's EOS ids.

        Raises:
            ConfigError, ModelLoadError: as ``Tokenizer``.
            ValueError: if the text of a token depends on its neighbours, no EOS id has a logit, or most tokens have
                none: then the files are not of one model.
        """
        ends = [token_id for token_id in eos_token_ids if token_id < vocab_size]
        if not ends:
            raise ValueError(f"its EOS ids {list(eos_token_ids)} are outside the model's {vocab_size} logits")
        tokenizer = Tokenizer(model_path)
        if len(tokenizer) > 2 * vocab_size:
            raise ValueError(f"it has {len(tokenizer)} tokens, and the model only {vocab_size} logits")
        tokenizer_json = tokenizer.rust_json()
        if tokenizer_json is None or not tokenizer.token_bytes.is_exact:
            raise ValueError("its decoder is not one whose texts are joined tokens")
        special = {token_id for token_id in (*tokenizer.special_ids, *ends) if token_id < vocab_size}
        return cls(tokenizer.token_bytes.table(vocab_size), sorted(special), ends, _within_a_text(tokenizer_json))

    def vocabulary(self) -> Vocabulary:
        """Return what grammars know of the tokens."""
        # UTF-8 has no other bytes.
        needed = {bytes([byte]) for byte in (*range(0xC0), *range(0xC2, 0xF5))}
        ends = frozenset(self.eos_token_ids)
        return Vocabulary.build(len(self.spelled), ends, has_all_bytes=needed.issubset(self.spelled))

    def new_tokenizer(self) -> LLTokenizer:
        """Return llguidance's tokenizer of these tokens."""
        from llguidance import LLTokenizer

        return LLTokenizer(_Wrapper(self), len(self.spelled), self.eos_token_ids)  # type: ignore[arg-type]


class _Wrapper:
    """What llguidance's TokenizerWrapper is: the tokens, and a function that tokenises text which must come next.

    It runs for each mask, and only the first new token counts, so it reads only the start of a long text.

    Attributes:
        tokens: the bytes of each token.
        special_token_ids: those that never are text.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: GrammarTokens) -> None:
        from tokenizers import Tokenizer as RustTokenizer

        self.tokens = tokens.spelled
        self.special_token_ids = tokens.special_ids
        self.eos_token_id = tokens.eos_token_ids[0]
        self._special, self._ends = frozenset(tokens.special_ids), frozenset(tokens.eos_token_ids)
        self._rust: Any = RustTokenizer.from_str(tokens.tokenizer_json)
        # The token before the text, the one that is asked for, and twice the length of one: llguidance may drop the
        # last tokens, which make up at most one token more than the bytes of the longest.
        self._enough = 4 * (1 + max(map(len, self.tokens)))

    def __call__(self, text: str) -> list[int]:
        """Return tokens whose joined bytes are ``text``, or begin it with at least ``_enough`` bytes.

        They are the tokenizer's own, which the model knows best, up to the first that changes the text or is special.
        From there they are the fewest. A text that spells EOS gets the EOS token, and llguidance then rejects it.
        """
        text = text[: self._enough]
        token_ids: list[int] = self._rust.encode(text, add_special_tokens=False).ids
        if not self._ends.isdisjoint(token_ids):
            return token_ids
        wanted = text.encode()
        usable, length = self._usable(token_ids, wanted)
        return usable + self._fewest(wanted[length : self._enough])

    def _usable(self, token_ids: list[int], wanted: bytes) -> tuple[list[int], int]:
        """Return those of the first tokens that begin ``wanted``, and the number of their bytes."""
        length = 0
        for count, token_id in enumerate(token_ids):
            is_text = token_id < len(self.tokens) and token_id not in self._special
            spelled = self.tokens[token_id] if is_text else b""
            if not spelled or not wanted.startswith(spelled, length):
                return token_ids[:count], length
            length += len(spelled)
        return token_ids, length

    def _fewest(self, wanted: bytes) -> list[int]:
        """Return the fewest tokens that join to ``wanted``, or to as much of it as tokens can."""
        # For each length: how many tokens join to the start of this length, and where the last of them begins.
        table: list[tuple[int, int] | None] = [(0, 0), *[None] * len(wanted)]
        for start, first_byte in enumerate(wanted):
            if (before := table[start]) is None:
                continue
            for end in (start + length for length in self._lengths.get(first_byte, ())):
                if end <= len(wanted) and wanted[start:end] in self._ids:
                    table[end] = min(table[end] or (len(wanted) + 1, 0), (before[0] + 1, start))
        token_ids: list[int] = []
        end = max(length for length, entry in enumerate(table) if entry is not None)
        while end > 0:
            _, start = table[end] or (0, 0)
            token_ids.append(self._ids[wanted[start:end]])
            end = start
        return token_ids[::-1]

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        pairs = ((spelled, token_id) for token_id, spelled in enumerate(self.tokens) if token_id not in self._special)
        return {spelled: token_id for spelled, token_id in pairs if spelled}

    @cached_property
    def _lengths(self) -> dict[int, list[int]]:
        """The lengths of the tokens that begin with a byte, which are few."""
        lengths = defaultdict[int, set[int]](set)
        for spelled in self._ids:
            lengths[spelled[0]].add(len(spelled))
        return {first_byte: sorted(some) for first_byte, some in lengths.items()}


def _within_a_text(tokenizer_json: str) -> str:
    """Return the tokenizer without the space that it adds before a text: what a grammar forces continues one."""
    data: dict[str, Any] = json.loads(tokenizer_json)
    data["normalizer"] = _without_prefix(data.get("normalizer"))
    data["pre_tokenizer"] = _without_prefix(data.get("pre_tokenizer"))
    data["truncation"] = data["padding"] = data["post_processor"] = None
    return json.dumps(data, ensure_ascii=False)


def _without_prefix(step: Any) -> Any:
    if step is None or step["type"] == "Prepend":
        return None
    changed = dict(step)
    for key in ("normalizers", "pretokenizers"):
        if key in step:
            changed[key] = [inner for inner in map(_without_prefix, step[key]) if inner is not None]
    if "prepend_scheme" in step:
        changed["prepend_scheme"] = "never"
    if "add_prefix_space" in step:
        changed["add_prefix_space"] = False
    return changed
