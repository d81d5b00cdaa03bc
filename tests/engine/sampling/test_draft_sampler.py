"""A draft that the host has not seen is what the sampler would choose, token by token, with every parameter."""

from __future__ import annotations

from typing import Any

import torch

from engine.options.thinking_budget import ThinkingBudget
from engine.sampling.draft_sampler import DraftSampler
from tests.engine.sampling.batches import CPU, STOP, VOCAB_SIZE, make_sequence, random_logits, sample

LENGTH = 6
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 0.8, "top_k": 5, "min_p": 0.1},
    {"temperature": 0.0, "repetition_penalty": 3.0},
    {"temperature": 0.0, "frequency_penalty": 2.0, "presence_penalty": 1.0},
    {"temperature": 1.0, "bad_words_token_ids": ((3,), (4, 5), (STOP, 8, 9))},
    {"temperature": 1.0, "min_tokens": 3, "stop_token_ids": [STOP]},
    {"temperature": 0.0, "logit_bias": {6: 2.0}},
    {"temperature": 1.0, "allowed_token_ids": [3, 4, 5, 9]},
    {"temperature": 1.0, "thinking_budget": ThinkingBudget(2, 3, 4)},
    {"temperature": 1.0, "logprobs": 2},
]


def test_a_draft_is_what_the_sampler_chooses_token_by_token() -> None:
    # Few tokens are likely, so that penalties and forbidden words matter.
    logits = [random_logits(len(PARAMS), seed) for seed in range(LENGTH)]
    for each in logits:
        each[:, 12:] -= 8.0
    sequences = [make_sequence(seed, **params) for seed, params in enumerate(PARAMS)]
    sampler = DraftSampler(sequences, VOCAB_SIZE, CPU)
    drafted = torch.stack([sampler.choose(each.clone(), None) for each in logits], dim=1).tolist()

    expected: list[list[int]] = [[] for _ in sequences]
    for each in logits:
        longer = [sequence.continued(draft, None) for sequence, draft in zip(sequences, expected, strict=True)]
        for draft, token_id in zip(expected, sample(each, longer), strict=True):
            draft.append(token_id)
    assert drafted == expected
    without_past = [sample(each, sequences) for each in logits]
    differing = [index for index, draft in enumerate(expected) if draft != [row[index] for row in without_past]]
    assert len(differing) > len(PARAMS) // 2, "the tokens before and the positions do not matter"


def test_a_token_that_cannot_be_chosen_counts_as_none() -> None:
    sequences = [make_sequence(0, temperature=0.0, repetition_penalty=2.0), make_sequence(1, temperature=0.0)]
    sampler = DraftSampler(sequences, VOCAB_SIZE, CPU)
    logits = random_logits(2, 0)
    logits[0] = torch.nan
    assert sampler.choose(logits, None).tolist()[0] < 0
    assert min(sampler.choose(random_logits(2, 1), None).tolist()) >= 0
