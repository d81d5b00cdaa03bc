"""Logit filters against transformers' processors and the formulas that define them, step after step."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from engine.options.thinking_budget import ThinkingBudget
from engine.request import EngineRequest
from engine.sampling.filters import build_filters
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence, SequenceGroup
from engine.structured_outputs.bitmask import apply_bitmask

VOCAB_SIZE = 12  # small: tokens repeat, and words of several tokens come about
CPU = torch.device("cpu")
STOPS = frozenset({7, 9})


def make_sequences(kinds: list[dict[str, Any]], num_prompt_tokens: int = 3) -> list[Sequence]:
    rng = random.Random(0)
    return [
        SequenceGroup(
            EngineRequest(
                str(row), [rng.randrange(VOCAB_SIZE) for _ in range(num_prompt_tokens)], SamplingParams(**kind)
            ),
            arrival=0,
            root=0,
            stop_token_ids=STOPS,
            max_total_tokens=100,
            seed=0,
        ).sequences[0]
        for row, kind in enumerate(kinds)
    ]


def filtered_steps(sequences: list[Sequence], steps: int = 25) -> Any:
    """Yield logits before and after the filters while every sequence grows by random tokens."""
    rng = random.Random(1)
    filters = build_filters(sequences, VOCAB_SIZE, CPU)
    for step in range(steps):
        logits = torch.randn(len(sequences), VOCAB_SIZE, generator=torch.Generator().manual_seed(step)) * 3
        changed = logits.clone()
        for logit_filter in filters:
            logit_filter.apply(changed)
        yield logits, changed
        for sequence in sequences:
            sequence.token_ids.append(rng.randrange(VOCAB_SIZE))
        for logit_filter in filters:
            logit_filter.advance(torch.tensor([sequence.token_ids[-1] for sequence in sequences]))


def test_repetition_penalty_is_transformers() -> None:
    penalties = [1.0, 1.3, 0.5, 1024.0]
    sequences = make_sequences([{"repetition_penalty": penalty} for penalty in penalties])
    for logits, changed in filtered_steps(sequences):
        for row, penalty in enumerate(penalties):
            ids = torch.tensor([sequences[row].token_ids])
            expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits[row : row + 1].clone())
            assert torch.equal(changed[row : row + 1], expected)


def test_frequency_and_presence_penalties_count_the_output_only() -> None:
    pairs = [(0.0, 0.0), (0.7, 0.0), (0.0, 1.5), (-2.0, 2.0)]
    sequences = make_sequences([{"frequency_penalty": f, "presence_penalty": p} for f, p in pairs])
    for logits, changed in filtered_steps(sequences):
        for row, (frequency, presence) in enumerate(pairs):
            counts = Counter(sequences[row].output_token_ids)
            for token in range(VOCAB_SIZE):
                expected = logits[row, token].item() - frequency * counts[token] - presence * (counts[token] > 0)
                assert changed[row, token].item() == pytest.approx(expected, abs=1e-5)


def test_penalties_apply_in_vllms_order() -> None:
    """Biased first, then divided, then subtracted from: another order gives another number."""
    [sequence] = make_sequences([{"logit_bias": {3: 1.0}, "repetition_penalty": 2.0, "frequency_penalty": 0.5}])
    sequence.token_ids += [3, 3]
    logits = torch.full((1, VOCAB_SIZE), 4.0)
    for logit_filter in build_filters([sequence], VOCAB_SIZE, CPU):
        logit_filter.apply(logits)
    assert logits[0, 3].item() == (4.0 + 1.0) / 2.0 - 0.5 * 2


def test_bad_words_are_transformers() -> None:
    rng = random.Random(2)
    words: list[list[list[int]]] = [
        [[3]],
        [[1, 2], [4, 2], [2]],
        [[0, 0], [5, 0], [1, 1, 1]],
        [[6, 7, 8, 9, 10], [2, 3]],
        *([[rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 2, 2, 3]))] for _ in range(20)] for _ in range(6)),
    ]
    kinds: list[dict[str, Any]] = [{}, *({"bad_words_token_ids": word} for word in words)]
    sequences = make_sequences(kinds, num_prompt_tokens=2)
    banned = 0
    for logits, changed in filtered_steps(sequences, steps=60):
        assert torch.equal(changed[0], logits[0])
        for row, bad in enumerate(words, start=1):
            ids = torch.tensor([sequences[row].token_ids])
            expected = NoBadWordsLogitsProcessor(bad)(ids, logits[row : row + 1].clone())
            assert torch.equal(changed[row : row + 1], expected)
            banned += int((expected == -math.inf).sum()) - sum(len(word) == 1 for word in set(map(tuple, bad)))
    assert banned > 200  # by words of several tokens


def test_min_tokens_is_transformers() -> None:
    least = [0, 1, 5, 10**30]
    sequences = make_sequences([{"min_tokens": number, "max_tokens": None} for number in least])
    for logits, changed in filtered_steps(sequences, steps=8):
        for row, number in enumerate(least):
            ids = torch.tensor([sequences[row].token_ids])
            process = MinNewTokensLengthLogitsProcessor(3, min(number, 1000), sorted(STOPS))
            assert torch.equal(changed[row : row + 1], process(ids, logits[row : row + 1].clone()))


def test_bias_and_allowed_tokens_do_what_they_say() -> None:
    sequences = make_sequences(
        [{"logit_bias": {3: 5.0, "0": -100}}, {"allowed_token_ids": [3, 11]}, {}, {"logit_bias": {}}]
    )
    sequences.append(make_sequences([{"logit_bias": {3: 5.0}, "allowed_token_ids": [3, 4]}])[0])
    for logits, changed in filtered_steps(sequences, steps=3):
        expected = logits.clone()
        expected[0, 3] += 5.0
        expected[0, 0] -= 100.0
        expected[4, 3] += 5.0
        expected[1, [i for i in range(VOCAB_SIZE) if i not in (3, 11)]] = -math.inf
        expected[4, [i for i in range(VOCAB_SIZE) if i not in (3, 4)]] = -math.inf
        assert torch.equal(changed, expected)


THINK, END = 4, 6  # the tokens around reasoning


def _must_end(output: list[int], budget: ThinkingBudget) -> bool:
    """Whether the reasoning in ``output`` has used its budget, token by token."""
    used, is_over = 0 if budget.start_token_id is None else None, False
    for token_id in output:
        if used is None:
            used = 0 if token_id == THINK else None
        else:
            used, is_over = used + 1, is_over or token_id == END
    return used is not None and not is_over and used >= budget.num_tokens


@pytest.mark.parametrize("num_output_tokens", [0, 1, 30])
def test_reasoning_ends_after_its_budget(num_output_tokens: int) -> None:
    budgets = [ThinkingBudget(number, END, start) for number in (0, 1, 3, 20) for start in (None, THINK)]
    kinds = [{"thinking_budget": budget, "allowed_token_ids": [1, THINK]} for budget in budgets]
    sequences = make_sequences([{}, *kinds])
    for sequence in sequences:  # as after a preemption
        sequence.token_ids += [random.Random(num_output_tokens).randrange(VOCAB_SIZE) for _ in range(num_output_tokens)]
    num_forced = 0
    for logits, changed in filtered_steps(sequences, steps=60):
        assert torch.equal(changed[0], logits[0])
        for index, budget in enumerate(budgets, start=1):
            is_forced = _must_end(sequences[index].output_token_ids, budget)
            finite = changed[index].isfinite().nonzero().flatten().tolist()
            assert finite == ([END] if is_forced else [1, THINK])
            num_forced += is_forced
    assert num_forced > 0


def test_nobody_pays_for_what_nobody_asks() -> None:
    sequences = make_sequences([{}, {"temperature": 0.0}, {"top_p": 0.5}, {"min_tokens": 0}, {"logit_bias": {}}])
    assert build_filters(sequences, VOCAB_SIZE, CPU) == []


def test_a_bitmask_for_no_row_changes_nothing() -> None:
    logits = torch.zeros(2, VOCAB_SIZE)
    apply_bitmask(logits, [], torch.zeros(0, 1, dtype=torch.int32))
    assert torch.equal(logits, torch.zeros(2, VOCAB_SIZE))
