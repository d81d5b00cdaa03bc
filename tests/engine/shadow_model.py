"""The "model" of the shadow runner: its tokens depend on the whole prefix, and prefixes have numbers."""

from __future__ import annotations

from engine.sampling.beam_search import Candidates
from engine.sampling_params import SamplingParams
from engine.scheduling.drafting.proposer import Proposer
from engine.sequence import Sequence

__all__ = [
    "VOCAB_SIZE",
    "PrefixIds",
    "ShadowProposer",
    "candidates",
    "mix",
    "next_token",
    "num_candidates",
    "token_logprob",
]

VOCAB_SIZE = 64


class PrefixIds:
    """Gives equal numbers to equal (salt, prefix)es, and only to those."""

    def __init__(self) -> None:
        self._ids: dict[tuple[object, int], int] = {}
        self.ends: list[tuple[object, int]] = []  # by identity: of the prefix without its last token, and that token

    def chain(self, salt: str, token_ids: list[int]) -> list[int]:
        """Return the identity of every prefix of ``token_ids``, the shortest first."""
        parent: object = salt
        ids = []
        for token_id in token_ids:
            parent = self.follow(parent, token_id)
            ids.append(parent)
        return ids

    def follow(self, parent: object, token_id: int) -> int:
        """Return the identity of the prefix ``parent``, or of an empty one with this salt, followed by a token."""
        end = (parent, token_id)
        prefix = self._ids.setdefault(end, len(self._ids))
        if prefix == len(self.ends):
            self.ends.append(end)
        return prefix


def mix(number: int) -> int:
    """Return 32 bits that depend on all bits of ``number``; prefix identities are dense."""
    number = (number * 0x9E3779B1 + 0x7F4A7C15) & 0xFFFFFFFF
    number = ((number ^ (number >> 15)) * 0x85EBCA6B) & 0xFFFFFFFF
    return number ^ (number >> 13)


def next_token(prefix: int, index: int = 0) -> int:
    """Return the token that this "model" samples after a prefix, in answer ``index``."""
    return mix(prefix + 7919 * index) % VOCAB_SIZE


def token_logprob(prefix: int, index: int = 0) -> float:
    """Return the log-probability of the token after a prefix, in answer ``index``."""
    return -(mix(3 * prefix + 104729 * index + 1) % 1000) / 100


def candidates(prefix: int, count: int) -> Candidates:
    """Return the most likely tokens of a beam and their log-probabilities."""
    ranking = sorted(((mix(prefix * VOCAB_SIZE + token) % 997 + 1, token) for token in range(VOCAB_SIZE)), reverse=True)
    return [token for _, token in ranking[:count]], [(weight - 1000) / 100 for weight, _ in ranking[:count]]


def num_candidates(params: SamplingParams, stop_token_ids: frozenset[int]) -> int:
    """Return how many candidates of a beam its search takes."""
    assert params.beam_width is not None
    return params.beam_width + len(stop_token_ids)


class ShadowProposer(Proposer):
    """Proposes the tokens that the shadow runner will sample, sometimes wrongly or too few."""

    def __init__(self, ids: PrefixIds) -> None:
        self._ids = ids

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        """Return up to ``limit`` tokens; none after the prompts of some lengths."""
        if sequence.num_prompt_tokens % 3 == 2:
            return []
        prefix = self._ids.chain(sequence.cache_key, sequence.token_ids)[-1]
        draft: list[int] = []
        while len(draft) < limit and mix(5 * prefix + 1) % 8:
            is_wrong = mix(7 * prefix + 3) % 4 == 0
            draft.append((next_token(prefix, sequence.index) + is_wrong) % VOCAB_SIZE)
            prefix = self._ids.follow(prefix, draft[-1])
        return draft
