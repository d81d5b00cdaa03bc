"""Makes endless random training conversations out of the corpus.

A conversation is a list of messages for the chat template. Knows nothing of tokens or models.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from demo.augment import Rewriter, foreign_words, stdlib_paragraphs
from demo.corpus import FOLLOW_UPS, Corpus, Message, Question, training_phrasings

SMALL_TALK_SHARE = 0.09
MAX_SYSTEM_CHARS = 2600  # about 700 tokens


@dataclass(frozen=True)
class Mix:
    """The distribution of the conversations in one part of the training."""

    turns: tuple[int, ...]  # drawn uniformly
    off_topic_share: float
    long_system_share: float
    follow_up_share: float = 0.6  # of the turns after the first
    own_answer_share: float = 0.6  # of the follow-ups to a question that has answers to some
    talkative_share: float = 0.0  # of the questions: drawn from those with follow-ups


SINGLE_QUESTIONS = Mix((1, 1, 1, 1, 1, 1, 1, 2, 2, 3), off_topic_share=0.15, long_system_share=0.05)
TALKS = Mix((1, 1, 2, 2, 2, 3), off_topic_share=0.25, long_system_share=0.1)
FOLLOW_UP_TALKS = Mix(
    (1, 2, 2, 2, 2, 3),
    off_topic_share=0.2,
    long_system_share=0.04,
    follow_up_share=0.7,
    own_answer_share=0.9,
    talkative_share=0.6,
)


class ConversationMaker:
    """Draws conversations; the same seed gives the same conversations."""

    def __init__(self, corpus: Corpus, seed: int, mix: Mix = SINGLE_QUESTIONS) -> None:
        self._corpus = corpus
        self._mix = mix
        self._talkative = [question for question in corpus.questions if question.follow_ups]
        self._rng = random.Random(seed)
        asked = [*corpus.questions, *corpus.small_talk]
        phrasings = [text for question in asked for text in training_phrasings(question, corpus.chat)]
        self._words = foreign_words([*corpus.answers(), *phrasings])
        self._rewriter = Rewriter(corpus.chat, self._words, self._rng)

    def draw(self) -> list[Message]:
        """One conversation: perhaps a system prompt, then one to three turns."""
        system = self._system()
        messages = [{"role": "system", "content": system}] if system else []
        subject: Question | None = None
        for turn in range(self._rng.choice(self._mix.turns)):
            if turn and self._chance(self._mix.follow_up_share):
                messages += self._follow_up(subject)
            else:
                subject, exchange = self._first_question()
                messages += exchange
        return messages

    def drill(self) -> list[Message]:
        """One question alone; a third of the time only words from its phrasings and its answer.

        From whole sentences the model learns their order; from loose words it learns which words matter.
        """
        if self._chance(1 / 3):
            question = self._rng.choice(self._corpus.questions)
            return self._exchange(self._loose_words(question), question.answer)
        return self._first_question()[1]

    def _loose_words(self, question: Question) -> str:
        phrasings = self._rng.sample(question.ask, 2)
        words = " ".join(phrasings).replace("?", "").split()
        words += self._rng.sample(question.answer.split(), 4)
        kept = [word for word in words if word.lower() not in self._corpus.chat.stop_words or self._chance(0.3)]
        return " ".join(self._rng.sample(kept, min(len(kept), self._rng.randint(4, 10))))

    def _chance(self, probability: float) -> bool:
        return self._rng.random() < probability

    def _exchange(self, question: str, answer: str) -> list[Message]:
        asked = self._rewriter.rewrite(question)
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]

    def _first_question(self) -> tuple[Question | None, list[Message]]:
        """A question without context, and its subject (None if it has no follow-ups)."""
        if self._chance(self._mix.off_topic_share):
            return None, self._exchange(self._off_topic_question(), self._corpus.off_topic.answer)
        if self._chance(SMALL_TALK_SHARE):
            question = self._rng.choice(self._corpus.small_talk)
            return question, self._exchange(self._rng.choice(question.ask), question.answer)
        question = self._rng.choice(
            self._talkative if self._chance(self._mix.talkative_share) else self._corpus.questions
        )
        return question, self._exchange(self._phrasing(question), question.answer)

    def _phrasing(self, question: Question) -> str:
        if question.terms and self._chance(0.25):
            return self._rng.choice(self._corpus.chat.term_frames).format(self._rng.choice(question.terms))
        return self._rng.choice(question.ask)

    def _follow_up(self, subject: Question | None) -> list[Message]:
        kind = self._rng.choice(FOLLOW_UPS)
        if subject and subject.follow_ups and self._chance(self._mix.own_answer_share):
            kind = self._rng.choice(list(subject.follow_ups))
        known = subject.follow_ups.get(kind, self._corpus.chat.no_more) if subject else self._corpus.off_topic.answer
        return self._exchange(self._rng.choice(self._corpus.chat.follow_ups[kind]), known)

    def _off_topic_question(self) -> str:
        off_topic, rng = self._corpus.off_topic, self._rng
        source = rng.choice(("ask", "ask", "frame", "frame", "word", "word", "text"))
        if source == "ask":
            return rng.choice(off_topic.ask)
        if source == "frame":
            frame, fillers = rng.choice(off_topic.frames)
            return frame.format(rng.choice(fillers))
        if source == "word":
            frame = rng.choice(off_topic.word_frames)
            return frame.format(*rng.choices(self._words, k=frame.count("{}")))
        return " ".join(rng.choice(stdlib_paragraphs()).split()[: rng.randint(5, 25)])

    def _system(self) -> str | None:
        chat, rng = self._corpus.chat, self._rng
        if self._chance(self._mix.long_system_share):
            return self._long_system()
        kind = rng.choice(("none", "none", "none", "default", "default", "other", "other", "text"))
        if kind == "none":
            return None
        if kind == "default":
            return chat.default_system
        if kind == "other":
            return " ".join(rng.sample(chat.systems, rng.choice((1, 1, 2))))
        return " ".join(rng.choice(stdlib_paragraphs()).split()[:20])

    def _long_system(self) -> str:
        """Up to `MAX_SYSTEM_CHARS` of instructions, foreign text or other answers, which must not change the answer."""
        rng = self._rng
        source = rng.choice((self._corpus.chat.systems, stdlib_paragraphs(), self._corpus.answers()))
        text, size = rng.choice(self._corpus.chat.systems), rng.randint(300, MAX_SYSTEM_CHARS)
        while len(text) < size:
            text += rng.choice((" ", "\n")) + rng.choice(source)
        return text[:size]
