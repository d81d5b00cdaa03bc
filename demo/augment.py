"""Rewrites a question as people type it: other words, missing words, typos, no capitals.

The corpus is small: without rewriting, the model would memorise its phrasings and fail on all others.
Knows only strings and a random number generator.
"""

from __future__ import annotations

import ast
import random
import re
import string
import sysconfig
from functools import cache
from pathlib import Path

from demo.corpus import Chat

STDLIB_MODULES = 150  # enough for varied text, and it is parsed in about two seconds


class Rewriter:
    """Random rewrites of one question; each keeps its meaning for a human reader."""

    def __init__(self, chat: Chat, noise_words: list[str], rng: random.Random) -> None:
        self._chat = chat
        self._noise_words = noise_words
        self._rng = rng
        self._synonyms = [
            (re.compile(rf"\b{re.escape(word)}(?!\w)", re.IGNORECASE), group)
            for group in chat.synonyms
            for word in group
        ]

    def rewrite(self, text: str) -> str:
        """Apply a random choice of rewrites; one time in six none at all."""
        if self._chance(1 / 6):
            return text
        if self._chance(0.4):
            text = self._swap_synonyms(text)
        text = self._edit_words(text)
        text = self._surround(text)
        if self._chance(0.2):
            text = self._add_typos(text)
        return self._change_case_and_marks(text)

    def rewrite_around(self, text: str) -> str:
        """Add words before and after and change marks and capitals, but no word: for a text whose digits count."""
        return self._change_case_and_marks(self._surround(text))

    def _chance(self, probability: float) -> bool:
        return self._rng.random() < probability

    def _swap_synonyms(self, text: str) -> str:
        hits = [(pattern, group) for pattern, group in self._synonyms if pattern.search(text)]
        for pattern, group in self._rng.sample(hits, min(len(hits), 2)):
            text = pattern.sub(self._rng.choice(group), text, count=1)
        return text

    def _edit_words(self, text: str) -> str:
        words = text.split()
        if len(words) < 4:
            return text
        drop_stop_words = 0.9 if self._chance(0.1) else self._rng.choice((0.0, 0.0, 0.15, 0.3))
        kept = [word for word in words if not self._dropped(word, drop_stop_words)]
        if self._chance(0.1):
            kept.insert(self._rng.randrange(len(kept) + 1), self._rng.choice(self._noise_words))
        if self._chance(0.05) and len(kept) > 3:
            at = self._rng.randrange(len(kept) - 1)
            kept[at], kept[at + 1] = kept[at + 1], kept[at]
        return " ".join(kept) or text

    def _dropped(self, word: str, drop_stop_words: float) -> bool:
        is_stop_word = word.lower().strip("?.,") in self._chat.stop_words
        return self._chance(drop_stop_words if is_stop_word else 0.02)

    def _surround(self, text: str) -> str:
        chat, rng = self._chat, self._rng
        if self._chance(0.15):
            text = f"{rng.choice(chat.lead_ins)} {text}"
        elif self._chance(0.22):
            text = f"{rng.choice(chat.prefixes)} {text[:1].lower()}{text[1:]}"
        if self._chance(0.12):
            text = f"{text.rstrip('?.')}{rng.choice((' ', ', '))}{rng.choice(chat.suffixes)}?"
        return text

    def _add_typos(self, text: str) -> str:
        words = text.split()
        long_words = [i for i, word in enumerate(words) if len(word) > 3]
        for i in self._rng.sample(long_words, min(len(long_words), self._rng.choice((1, 1, 2)))):
            words[i] = self._misspell(words[i])
        return " ".join(words)

    def _misspell(self, word: str) -> str:
        at = self._rng.randrange(1, len(word) - 1)
        letter = self._rng.choice(string.ascii_lowercase)
        edits = (
            word[:at] + word[at + 1] + word[at] + word[at + 2 :],  # two letters swapped
            word[:at] + word[at + 1 :],  # one missing
            word[:at] + word[at] + word[at:],  # one doubled
            word[:at] + letter + word[at + 1 :],  # one replaced
        )
        return self._rng.choice(edits)

    def _change_case_and_marks(self, text: str) -> str:
        if self._chance(0.35):
            text = text.lower()
        elif self._chance(0.02):
            text = text.upper()
        if self._chance(0.35):
            text = text.rstrip("?.!")
        elif self._chance(0.05):
            text = text.rstrip("?.!") + self._rng.choice(("??", "?!", " ?", "...", "!"))
        return text


@cache
def stdlib_paragraphs() -> list[str]:
    """English paragraphs from the docstrings of Python's standard library, which every machine with Python has."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))[:STDLIB_MODULES]
    docstrings = [doc for path in files for doc in _docstrings(path.read_text(encoding="utf-8", errors="ignore"))]
    paragraphs = [" ".join(part.split()) for doc in docstrings for part in doc.split("\n\n")]
    return [text for text in paragraphs if 40 < len(text) < 800]


def _docstrings(source: str) -> list[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    return [doc for doc in map(ast.get_docstring, nodes) if doc]


def foreign_words(known_text: list[str]) -> list[str]:
    """Words of the standard library's texts that do not occur in `known_text`, in a fixed order."""
    known = {word for text in known_text for word in _words(text)}
    words = {word for text in stdlib_paragraphs() for word in _words(text)}
    return sorted(word for word in words - known if 4 <= len(word) <= 14)


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())
