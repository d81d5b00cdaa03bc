"""Proposers for tests: adversaries, the suffix proposer after it has seen the answers, and an engine's draft model."""

from __future__ import annotations

import random
from collections.abc import Sequence as GenericSequence

from engine.llm import LLM, RequestOutput
from engine.options.speculative_config import SpeculativeConfig
from engine.scheduling.drafting.model_drafting import ModelDrafting
from engine.scheduling.drafting.proposer import Proposer
from engine.scheduling.drafting.suffix_proposer import SuffixProposer
from engine.sequence import Sequence

__all__ = ["PROPOSERS", "Adversary", "let_draft"]

PROPOSERS = ("truth", "wrong", "random", "illegal", "mixed", "suffix", "model")


class Adversary(Proposer):
    """Proposes tokens of one kind after every sequence.

    Args:
        kind: ``truth``: the answer; ``wrong``: never the answer; ``random``: any tokens; ``illegal``: the tokens that
            end answers and those that the sequence's parameters forbid; ``mixed``: each token is of any of these kinds.
        answers: of requests, which must have different prompts.
        vocab_size: of the model.
        seed: of what is drawn.
    """

    def __init__(self, kind: str, answers: GenericSequence[RequestOutput], vocab_size: int, seed: int) -> None:
        self._kind, self._vocab_size, self._rng = kind, vocab_size, random.Random(seed)
        self._known = {
            (tuple(answer.prompt_token_ids), completion.index): completion.token_ids
            for answer in answers
            for completion in answer.outputs
        }

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        """Return ``limit`` tokens, or fewer where an answer ends."""
        key = tuple(sequence.token_ids[: sequence.num_prompt_tokens]), sequence.index
        right = self._known.get(key, [])[sequence.num_output_tokens :][:limit]
        if self._kind == "truth":
            return list(right)
        right = right + [0] * (limit - len(right))
        return [self._token(sequence, token_id) for token_id in right]

    def _token(self, sequence: Sequence, right: int) -> int:
        kind = self._kind
        if kind == "mixed":
            kind = self._rng.choice(("truth", "truth", "truth", "truth", "wrong", "random", "illegal"))
        if kind == "truth":
            return right
        if kind == "wrong":
            return (right + 1 + self._rng.randrange(self._vocab_size - 1)) % self._vocab_size
        if kind == "illegal":
            params = sequence.params
            banned = [word[-1] for word in params.bad_words_token_ids or ()]
            return self._rng.choice([*sequence.stop_token_ids, *banned, self._rng.randrange(self._vocab_size)])
        return self._rng.randrange(self._vocab_size)


def let_draft(llm: LLM, kind: str, answers: GenericSequence[RequestOutput], seed: int = 0) -> None:
    """Let an engine with ``speculative_config`` draft what an adversary, the suffix proposer or its model proposes."""
    drafter = llm.engine.scheduler.drafter
    assert drafter is not None
    drafter.model = None
    if kind == "model":
        model = llm.engine.runner.draft_model
        assert model is not None
        drafter.proposers, drafter.model = {}, ModelDrafting(model, drafter.acceptance)
        return
    if kind != "suffix":
        drafter.proposers = {"test": Adversary(kind, answers, llm.engine.info.vocab_size, seed)}
        return
    suffixes = SuffixProposer(SpeculativeConfig.from_options({"method": "suffix"}))
    for answer in answers:
        for completion in answer.outputs:
            suffixes.answers.add("", [*answer.prompt_token_ids, *completion.token_ids])
    drafter.proposers = {"test": suffixes}
