"""The demo model's text: its size, its consistency, and that held-out phrasings stay out of training."""

from __future__ import annotations

import re

import pytest

from demo.conversations import ConversationMaker
from demo.corpus import Corpus, load_corpus, training_phrasings


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


def normalized(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def kept_out(corpus: Corpus) -> list[str]:
    asked = [text for q in corpus.questions for text in (q.held_out, q.held_out_far, q.validation) if text]
    return [*asked, *corpus.off_topic.held_out]


def nearness_to_training(phrasings: list[str], corpus: Corpus) -> dict[str, float]:
    """For each phrasing, the share of words in common with the most similar training phrasing."""
    asked = (*corpus.questions, *corpus.small_talk)
    trained = [p for q in asked for p in training_phrasings(q, corpus.chat)]
    bags = [word_set(p) for p in (*trained, *corpus.off_topic.ask)]
    return {p: max(len(words & bag) / len(words | bag) for bag in bags) for p in phrasings if (words := word_set(p))}


def word_set(text: str) -> set[str]:
    return set(normalized(text).split())


def test_there_are_enough_questions_and_phrasings(corpus: Corpus) -> None:
    assert len(corpus.questions) >= 150
    assert min(len(set(q.ask)) for q in corpus.questions) >= 6
    assert sum(bool(q.follow_ups) for q in corpus.questions) >= 90
    assert len(set(corpus.off_topic.ask)) >= 80


def test_all_topics_are_covered(corpus: Corpus) -> None:
    topics = {q.topic for q in corpus.questions}
    assert {"KV caches", "paging", "continuous batching", "prefix caching", "routing", "Ray Serve", "Pagoda"} <= topics


def test_no_two_questions_share_an_answer(corpus: Corpus) -> None:
    answers = corpus.answers()
    assert len(set(answers)) == len(answers)


def test_no_phrasing_asks_for_two_answers(corpus: Corpus) -> None:
    asked_for: dict[str, str] = {}
    for question in (*corpus.questions, *corpus.small_talk):
        for phrasing in training_phrasings(question, corpus.chat):
            assert asked_for.setdefault(normalized(phrasing), question.answer) == question.answer, phrasing


def test_thirty_questions_have_a_held_out_phrasing(corpus: Corpus) -> None:
    assert sum(q.held_out is not None for q in corpus.questions) == 30
    assert sum(q.held_out_far is not None for q in corpus.questions) == 30


def test_held_out_phrasings_differ_from_training_phrasings(corpus: Corpus) -> None:
    plain = nearness_to_training([q.held_out for q in corpus.questions if q.held_out], corpus)
    far = nearness_to_training([q.held_out_far for q in corpus.questions if q.held_out_far], corpus)
    assert max(plain.values()) < 0.8, max(plain, key=plain.__getitem__)
    assert max(far.values()) < 0.6, max(far, key=far.__getitem__)


@pytest.mark.long
def test_training_conversations_never_contain_a_held_out_phrasing(corpus: Corpus) -> None:
    maker = ConversationMaker(corpus, seed=1)
    drawn = {normalized(m["content"]) for _ in range(3000) for m in maker.draw() if m["role"] == "user"}
    assert not drawn & {normalized(phrasing) for phrasing in kept_out(corpus)}


def test_the_same_seed_draws_the_same_conversations(corpus: Corpus) -> None:
    first, second, other = (ConversationMaker(corpus, seed) for seed in (7, 7, 8))
    drawn = [first.draw() for _ in range(20)]
    assert drawn == [second.draw() for _ in range(20)]
    assert drawn != [other.draw() for _ in range(20)]
