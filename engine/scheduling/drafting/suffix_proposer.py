"""SuffixProposer: draft tokens that most often followed the end of a sequence, in itself or in earlier answers.

It guesses well where answers repeat earlier ones: the same question, agents that call one tool after another, formats
that every answer has. The method is SuffixDecoding (Oliaro et al., 2024): the longer the match, the longer the draft.
This module knows neither the scheduler nor the model.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from engine.options.speculative_config import SpeculativeConfig
from engine.scheduling.drafting.earlier_answers import EarlierAnswers
from engine.scheduling.drafting.proposer import Proposer
from engine.scheduling.drafting.suffix_index import Match, SuffixIndex
from engine.sequence import Sequence, SequenceGroup

__all__ = ["SuffixProposer"]

MAX_TOKENS_AT_ONCE = 2048  # of a long prompt: one or two milliseconds


class SuffixProposer(Proposer):
    """Proposes draft tokens from the sequence itself and from the answers of requests with the same cache key.

    Args:
        options: those that begin with ``suffix_decoding``.
    """

    def __init__(self, options: SpeculativeConfig) -> None:
        self._depth = options.suffix_decoding_max_tree_depth
        self._least_probability = options.suffix_decoding_min_token_prob
        self._limits = _draft_limits(self._depth, options.suffix_decoding_max_spec_factor)
        self._indices: WeakKeyDictionary[Sequence, SuffixIndex] = WeakKeyDictionary()
        self.answers = EarlierAnswers(options.suffix_decoding_max_cached_requests)

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        """Return up to ``limit`` tokens that may follow the sequence; none if its last tokens never occurred before."""
        match = self._match_in_itself(sequence)
        answers = self.answers.index(sequence.cache_key)
        if answers is not None and (other := answers.longest_match(sequence.token_ids, self._depth)) is not None:
            match = other if match is None or other.length > match.length else match
        if match is None:
            return []
        return match.draft(min(limit, self._limits[match.length]), self._least_probability)

    def learn(self, group: SequenceGroup) -> None:
        """Keep the answers of a request that has ended. Those of a beam search are other answers than its beams."""
        if group.beams is not None:
            return
        for sequence in group.sequences:
            start = max(0, sequence.num_prompt_tokens - self._depth)
            if sequence.num_output_tokens:
                self.answers.add(sequence.cache_key, sequence.token_ids[start:])

    def _match_in_itself(self, sequence: Sequence) -> Match | None:
        index = self._indices.get(sequence)
        if index is None:
            index = self._indices[sequence] = SuffixIndex(sequence.token_ids)
        index.extend(MAX_TOKENS_AT_ONCE)
        return index.longest_match(sequence.token_ids, self._depth)


def _draft_limits(depth: int, factor: float) -> list[int]:
    """Return the most draft tokens after a match of 0, 1, ... ``depth`` tokens.

    They are ``factor`` times those of the match, or of its end, which together are no more than ``depth``.
    """
    limits = [0]
    for length in range(1, depth + 1):
        limits.append(max(limits[-1], min(int(factor * length), depth - length)))
    return limits
