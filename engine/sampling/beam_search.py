"""BeamSearch: which beams of one request continue and which are finished.

The rules are those of transformers' ``generate(num_beams=..., do_sample=False)``, whose tokens are the tests' oracle.
The continuations of all beams are sorted by log-probability. Those among the first ``beam_width`` that end become
hypotheses; the first ``beam_width`` that do not end continue. This module knows tokens and scores, no blocks and no
model.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

__all__ = ["BeamSearch", "Candidates", "Continuation", "Hypothesis"]

Candidates = tuple[list[int], list[float]]  # the most likely next tokens of one beam and their log-probabilities


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished beam; ``score`` is its log-probability with the length penalty applied."""

    score: float
    cumulative_logprob: float
    token_ids: list[int]  # the generated tokens, a stop token included
    ended_by_token: bool  # False if its length ended it


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam that continues: ``parent`` is the index of the beam that it extends, by ``token_id``."""

    parent: int
    token_id: int
    cumulative_logprob: float


class BeamSearch:
    """The state of one request's beams.

    Args:
        beam_width: beams that continue in each step, and hypotheses that are kept.
        length_penalty: exponent of the length that divides a score; above 0 favours long answers.
        early_stopping: when the search ends. True: with ``beam_width`` hypotheses; False: when the best beam cannot
            beat them at its current length; "never": when it cannot at any length.
        num_prompt_tokens: prompt tokens, which lengths do not include.
    """

    def __init__(
        self, beam_width: int, length_penalty: float, early_stopping: bool | Literal["never"], num_prompt_tokens: int
    ) -> None:
        self.beam_width = beam_width
        self.hypotheses: list[Hypothesis] = []  # the best first
        self.is_done = False
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._num_prompt_tokens = num_prompt_tokens
        self._scores = np.zeros(1, dtype=np.float32)  # of the running beams; float32 like the oracle's

    def advance(
        self,
        beams: GenericSequence[list[int]],
        candidates: GenericSequence[Candidates],
        *,
        stop_token_ids: frozenset[int],
        max_total_tokens: int,
    ) -> list[Continuation]:
        """Extend all beams by a token; return the beams that continue, the best first, or none if the search is done.

        Args:
            beams: each beam's tokens, prompt included; all of one length.
            candidates: for each beam, its ``beam_width + len(stop_token_ids)`` most likely tokens in order, or more.
                These include every stop token that may end a hypothesis, and ``beam_width`` other tokens.
            stop_token_ids: tokens that end a beam.
            max_total_tokens: length that ends every beam.
        """
        length = len(beams[0]) + 1
        at_limit = length >= max_total_tokens
        continuing: list[Continuation] = []
        for index, continuation in enumerate(self._by_logprob(candidates)):
            ended_by_token = continuation.token_id in stop_token_ids
            if index < self.beam_width and (ended_by_token or at_limit):
                token_ids = [*beams[continuation.parent], continuation.token_id]
                self._finish(token_ids, continuation.cumulative_logprob, ended_by_token)
            if not ended_by_token:
                continuing.append(continuation)
            if len(continuing) == self.beam_width:
                break
        self._scores = np.array([beam.cumulative_logprob for beam in continuing], dtype=np.float32)
        self.is_done = at_limit or not continuing or not self._can_improve(length, max_total_tokens)
        return [] if self.is_done else continuing

    def _by_logprob(self, candidates: GenericSequence[Candidates]) -> Iterator[Continuation]:
        """Yield the continuations of all beams, the most likely first."""
        parents = [parent for parent, (token_ids, _) in enumerate(candidates) for _ in token_ids]
        tokens = [token_id for token_ids, _ in candidates for token_id in token_ids]
        totals = np.concatenate(
            [
                score + np.array(logprobs, np.float32)
                for score, (_, logprobs) in zip(self._scores, candidates, strict=True)
            ]
        )
        for i in np.argsort(-totals, kind="stable"):
            if totals[i] > -np.inf:
                yield Continuation(parents[i], tokens[i], float(totals[i]))

    def _finish(self, token_ids: list[int], cumulative_logprob: float, ended_by_token: bool) -> None:
        """Keep a hypothesis if it is among the ``beam_width`` best."""
        num_generated = len(token_ids) - self._num_prompt_tokens
        score = float(np.float32(cumulative_logprob) / np.float32(num_generated**self._length_penalty))
        output = token_ids[self._num_prompt_tokens :]
        self.hypotheses.append(Hypothesis(score, cumulative_logprob, output, ended_by_token))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self.beam_width :]

    def _can_improve(self, length: int, max_total_tokens: int) -> bool:
        """Whether a running beam may still become a better hypothesis than the worst one kept."""
        if len(self.hypotheses) < self.beam_width:
            return True
        if self._early_stopping is True:
            return False
        to_the_end = self._early_stopping == "never" and self._length_penalty > 0.0
        reached = (max_total_tokens if to_the_end else length) - self._num_prompt_tokens
        attainable = self._scores[0] / np.float32(reached**self._length_penalty)
        return bool(attainable > self.hypotheses[-1].score)
