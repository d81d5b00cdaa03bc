"""A sequence's tokens do not depend on its batch, and kept columns are what new ones would be."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.sampler import NUM_CANDIDATES, Sampler
from engine.sequence import Sequence
from tests.engine.sampling.batches import CPU, VOCAB_SIZE, make_sequence, random_logits, sample

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"top_k": 9, "top_p": 0.5},
    {"repetition_penalty": 1.7},
    {"frequency_penalty": 1.5, "presence_penalty": -0.5},
    {"presence_penalty": 2.0},
    {"temperature": 0.0, "repetition_penalty": 0.6, "frequency_penalty": 0.9},
    {"logit_bias": {3: 4.0, 8: -100.0}},
    {"allowed_token_ids": [2, 3, 5, 7, 11]},
    {"bad_words_token_ids": ((4,), (1, 9), (3, 1, 9), (2, 3, 5, 6))},
    {"temperature": 0.0, "bad_words_token_ids": ((12,), (9, 9))},
    {"min_tokens": 3},
    {"temperature": 1.7, "top_p": 0.99},
    {"logprobs": 3, "top_p": 0.9},
    {"temperature": 0.0, "logprobs": 0},
    {"n": 2, "best_of": 4, "presence_penalty": 1.0},
    {"temperature": 0.0, "beam_width": 3},
    {"temperature": 0.0, "beam_width": 2, "min_tokens": 2},
]


def one_of_each(rows: int) -> list[Sequence]:
    return [make_sequence(seed=row, num_tokens=row % 5 + 1, **KINDS[row % len(KINDS)]) for row in range(rows)]


@pytest.mark.parametrize("num_candidates", [4, NUM_CANDIDATES])
def test_a_sequence_does_not_depend_on_its_neighbours(num_candidates: int, request: pytest.FixtureRequest) -> None:
    if num_candidates < NUM_CANDIDATES:
        request.getfixturevalue("by_torch")
    rows = 32
    sequences = one_of_each(rows)
    together = Sampler(VOCAB_SIZE, CPU, num_candidates=num_candidates)
    rng = random.Random(3)
    present = list(range(rows))
    for step in range(12):
        logits = random_logits(rows, step)
        if step % 3 == 2:  # some leave, some come back
            present = sorted(rng.sample(range(rows), rng.randrange(1, rows + 1)))
        output = together.sample(logits[present], [sequences[row] for row in present])
        for i, row in enumerate(present):
            alone = Sampler(VOCAB_SIZE, CPU, num_candidates=num_candidates).sample(
                logits[row : row + 1].clone(), [sequences[row]]
            )
            assert output.token_ids[i] == alone.token_ids[0], KINDS[row % len(KINDS)]
            assert output.beams.get(i) == alone.beams.get(0)
            assert (output.logprobs or {i: None})[i] == (alone.logprobs or [None])[0]
            sequences[row].token_ids.append(max(alone.token_ids[0], 0))


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["stay", "join", "leave", "swap", "replace last", "rewrite", "rewind", "pause", "twice", "reset"]
        ),
        st.integers(0, 1000),
    ),
    max_size=14,
)


@settings(max_examples=150, deadline=None)
@given(actions=ACTIONS, first=st.integers(0, 20))
def test_kept_columns_are_what_new_ones_would_be(actions: list[tuple[str, int]], first: int) -> None:
    """Whatever happens to the sequences between steps, a sampler with a past does as one without."""
    kept = Sampler(VOCAB_SIZE, CPU, num_candidates=8)
    pool = one_of_each(24)
    batch = pool[first : first + 6] or pool[:6]
    before = "stay"
    for step, (action, number) in enumerate([("stay", 0), *actions]):
        chosen = batch[number % len(batch)]
        if action == "rewrite" and before == "twice":
            kept.reset()  # it rewrites a token before the last that the sampler has seen
        before = action
        if action == "join":
            batch = batch + [s for s in [pool[number % len(pool)]] if s not in batch]
        elif action == "leave" and len(batch) > 1:
            batch = [s for s in batch if s is not chosen]
        elif action == "swap":
            batch = batch[::-1]
        elif action == "replace last" and chosen.num_output_tokens:
            chosen.token_ids[-1] = number % VOCAB_SIZE  # a token that it sampled but did not keep
        elif action == "rewrite" and chosen.num_output_tokens > 1:
            chosen.token_ids[-2] = number % VOCAB_SIZE
        elif action == "rewind" and chosen.num_output_tokens:
            chosen.token_ids.pop()
        elif action == "pause":
            chosen.token_ids.append(number % VOCAB_SIZE)  # another engine continued it
        elif action == "reset":
            kept.reset()
        logits = random_logits(len(batch), step)
        output = kept.sample(logits.clone(), batch)
        assert output == Sampler(VOCAB_SIZE, CPU, num_candidates=8).sample(logits.clone(), batch)
        for sequence, token_id in zip(batch, output.token_ids, strict=True):
            if action != "twice":
                sequence.token_ids.append(max(token_id, 0))


def test_columns_are_kept_while_the_same_sequences_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import engine.sampling.sampler

    built: list[int] = []
    real = engine.sampling.sampler.SamplingBatch
    monkeypatch.setattr(engine.sampling.sampler, "SamplingBatch", lambda *args: built.append(1) or real(*args))
    sampler, sequences = Sampler(VOCAB_SIZE, CPU), one_of_each(len(KINDS))
    for step in range(5):
        output = sampler.sample(random_logits(len(sequences), step), sequences)
        for sequence, token_id in zip(sequences, output.token_ids, strict=True):
            sequence.token_ids.append(max(token_id, 0))
    assert len(built) == 1
    sampler.sample(random_logits(len(sequences) - 1, 5), sequences[1:])
    assert len(built) == 2


@pytest.mark.parametrize(
    "params", [{"presence_penalty": 2.0}, {"repetition_penalty": 1024.0}, {"bad_words_token_ids": ((20, 6, 20),)}]
)
def test_a_token_that_was_replaced_after_the_next_one_came_is_noticed(params: dict[str, Any]) -> None:
    sequence = make_sequence(temperature=0.0, **params)
    sampler = Sampler(VOCAB_SIZE, CPU)
    sequence.token_ids += [9]
    sampler.sample(random_logits(1, 0), [sequence])
    sequence.token_ids[-1] = 20
    sequence.token_ids.append(6)
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 20:22] = torch.tensor([1.0, 0.5])
    assert sampler.sample(logits.clone(), [sequence]).token_ids == sample(logits, [sequence]) != [20]


def test_a_sequence_that_lost_a_sampled_token_is_handled_by_reset() -> None:
    """Tokens rewritten before the last one are not noticed: the one case in which the caller must call reset."""
    sequence = make_sequence(temperature=0.0, presence_penalty=2.0)
    sampler = Sampler(VOCAB_SIZE, CPU)
    sequence.token_ids += [9, 8, 7]
    sampler.sample(random_logits(1, 0), [sequence])
    sequence.token_ids[4] = 20
    sequence.token_ids.append(6)
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 20] = 1.0
    sampler.reset()
    assert sampler.sample(logits.clone(), [sequence]).token_ids == sample(logits, [sequence]) != [20]
