"""Loads the hand-written text of the demo model.

Knows the layout of the TOML files in `corpus/` and nothing of tokens, models or augmentation.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CORPUS_DIR = Path(__file__).parent / "corpus"
TOPIC_FILES = ("kv_cache", "models", "paging", "batching", "prefix_caching", "routing", "ray_serve", "pagoda", "api")

Message = dict[str, Any]  # role, content and perhaps tool calls, as the chat template takes it

FOLLOW_UPS = ("why", "more", "example")


@dataclass(frozen=True)
class Question:
    """One fact: several phrasings of the question, and one answer."""

    topic: str
    ask: tuple[str, ...]
    answer: str
    terms: tuple[str, ...]
    follow_ups: dict[str, str]  # kind of follow-up -> its own answer
    held_out: str | None  # a plain phrasing for the tests: never trained on
    held_out_far: str | None  # the same, but in words far from every trained phrasing
    validation: str | None  # a phrasing that is not trained on, but monitored during training


@dataclass(frozen=True)
class OffTopic:
    """Off-topic questions, and the one answer to all of them."""

    answer: str
    ask: tuple[str, ...]
    held_out: tuple[str, ...]
    frames: tuple[tuple[str, tuple[str, ...]], ...]  # (question with one {}, words that fit)
    word_frames: tuple[str, ...]  # questions with {} for arbitrary words


@dataclass(frozen=True)
class Chat:
    """The parts of a conversation around the questions."""

    default_system: str
    no_more: str
    systems: tuple[str, ...]
    follow_ups: dict[str, tuple[str, ...]]  # kind of follow-up -> ways to ask for it
    prefixes: tuple[str, ...]
    lead_ins: tuple[str, ...]
    suffixes: tuple[str, ...]
    term_frames: tuple[str, ...]
    synonyms: tuple[tuple[str, ...], ...]
    stop_words: frozenset[str]  # words that a question can omit without losing its meaning


@dataclass(frozen=True)
class Corpus:
    """All of the text."""

    questions: tuple[Question, ...]
    small_talk: tuple[Question, ...]
    off_topic: OffTopic
    chat: Chat

    def answers(self) -> list[str]:
        """Every text that the model may say."""
        asked = [*self.questions, *self.small_talk]
        texts = [text for q in asked for text in (q.answer, *q.follow_ups.values())]
        return [*texts, self.off_topic.answer, self.chat.no_more]


def load_corpus(folder: Path = CORPUS_DIR) -> Corpus:
    """Read all files of `folder`."""
    questions = [question for name in TOPIC_FILES for question in _questions(folder / f"{name}.toml")]
    return Corpus(
        questions=tuple(questions),
        small_talk=tuple(_questions(folder / "small_talk.toml")),
        off_topic=_off_topic(_read(folder / "off_topic.toml")),
        chat=_chat(_read(folder / "chat.toml")),
    )


def training_phrasings(question: Question, chat: Chat) -> list[str]:
    """Every phrasing of a question that training starts from, before augmentation."""
    return [*question.ask, *(frame.format(term) for frame in chat.term_frames for term in question.terms)]


def _read(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def text_lines(text: str) -> tuple[str, ...]:
    """The lines of `text` that are not blank, without spaces around them."""
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def _questions(path: Path) -> list[Question]:
    data = _read(path)
    return [_question(str(data["topic"]), entry) for entry in data["question"]]


def _question(topic: str, entry: dict[str, Any]) -> Question:
    known = {"ask", "answer", "terms", "held_out", "held_out_far", "validation", *FOLLOW_UPS}
    if unknown := set(entry) - known:
        raise ValueError(f"unknown keys {sorted(unknown)} in a question of {topic!r}; known are {sorted(known)}")
    return Question(
        topic=topic,
        ask=text_lines(entry["ask"]),
        answer=entry["answer"],
        terms=tuple(entry.get("terms", ())),
        follow_ups={kind: entry[kind] for kind in FOLLOW_UPS if kind in entry},
        held_out=entry.get("held_out"),
        held_out_far=entry.get("held_out_far"),
        validation=entry.get("validation"),
    )


def _off_topic(data: dict[str, Any]) -> OffTopic:
    fillers = {name: tuple(word.strip() for word in words.split(",")) for name, words in data["fillers"].items()}
    frames = [(frame, fillers[name]) for name, text in data["frames"].items() for frame in text_lines(text)]
    return OffTopic(
        answer=data["answer"],
        ask=text_lines(data["ask"]),
        held_out=text_lines(data["held_out"]),
        frames=tuple(frames),
        word_frames=text_lines(data["word_frames"]["ask"]),
    )


def _chat(data: dict[str, Any]) -> Chat:
    groups = [tuple(word.strip() for word in line.split(",")) for line in text_lines(data["synonyms"])]
    return Chat(
        default_system=data["default_system"],
        no_more=data["no_more"],
        systems=text_lines(data["systems"]),
        follow_ups={kind: text_lines(data[kind]) for kind in FOLLOW_UPS},
        prefixes=text_lines(data["prefixes"]),
        lead_ins=text_lines(data["lead_ins"]),
        suffixes=text_lines(data["suffixes"]),
        term_frames=text_lines(data["term_frames"]),
        synonyms=tuple(groups),
        stop_words=frozenset(data["stop_words"].split()),
    )
