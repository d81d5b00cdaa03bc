"""The sampler: filters against plain references, draws against exact probabilities, failures, logprobs, beams."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from engine.outputs import Logprob
from engine.sampling.noise import as_uint64, noise_keys
from engine.sampling.ranking import top_tokens
from engine.sampling.sampler import NUM_CANDIDATES, Sampler
from engine.sampling_params import SamplingParams
from kernels.sampling.exact_math import gumbel_noise
from tests.engine.sampling.batches import CPU, STOP, VOCAB_SIZE, chi_square, make_sequence, random_logits, sample


def reference_support(logits: list[float], params: SamplingParams) -> set[int]:
    """Return the tokens that may be drawn, by the definitions, one row at a time."""
    scaled = [value / params.temperature for value in logits]
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    if params.top_k > 0:
        order = order[: params.top_k]
    weights = [math.exp(scaled[i] - scaled[order[0]]) for i in order]
    total, mass, kept = sum(weights), 0.0, []
    for token, weight in zip(order, weights, strict=True):
        if kept and params.top_p < 1.0 and mass / total >= params.top_p:
            break
        kept.append(token)
        mass += weight
    return {i for i in kept if math.exp(scaled[i] - scaled[order[0]]) >= params.min_p}


@pytest.mark.parametrize("num_candidates", [1, 6, NUM_CANDIDATES])
def test_filters_keep_what_the_definitions_say(num_candidates: int, request: pytest.FixtureRequest) -> None:
    """Each row is the draw by its noise among the reference's tokens, whether few candidates or a sort found them."""
    if num_candidates < NUM_CANDIDATES:
        request.getfixturevalue("by_torch")
    rng = random.Random(0)
    sequences = [
        make_sequence(
            seed=row,
            temperature=rng.choice([0.3, 1.0, 1.7]),
            top_k=rng.choice([-1, 0, 1, 5, 49, 50, 80]),
            top_p=rng.choice([1.0, 0.9, 0.5, 0.01]),
            min_p=rng.choice([0.0, 0.0, 0.1, 1.0]),
        )
        for row in range(400)
    ]
    logits = random_logits(400, 0, scale=3.0)
    keys = torch.from_numpy(noise_keys(as_uint64(range(400)), np.full(400, 4, dtype=np.uint64)))
    noise = gumbel_noise(keys, torch.arange(VOCAB_SIZE, dtype=torch.int32))
    expected = []
    for row, sequence in enumerate(sequences):
        support = reference_support(logits[row].tolist(), sequence.params)
        noisy = noise[row] + logits[row] / sequence.params.temperature
        expected.append(max(support, key=lambda i, noisy=noisy: float(noisy[i])))
    assert sample(logits, sequences, num_candidates) == expected


@pytest.mark.parametrize("params", [{}, {"temperature": 0.5}, {"top_k": 8}, {"top_p": 0.8}, {"min_p": 0.05}])
def test_draws_follow_the_exact_distribution(params: dict[str, Any]) -> None:
    """20,000 seeds at one position; the statistic exceeds 99 with 49 degrees of freedom once in 30,000 runs."""
    draws = 20_000
    logits = random_logits(1, 1, scale=1.5)
    sequences = [make_sequence(seed=seed, **params) for seed in range(draws)]
    checked = SamplingParams(**params)
    support = reference_support(logits[0].tolist(), checked)
    weights = [math.exp(float(x) / checked.temperature) if i in support else 0.0 for i, x in enumerate(logits[0])]
    probabilities = [weight / sum(weights) for weight in weights]
    for num_candidates in (2, NUM_CANDIDATES):
        tokens = torch.tensor(sample(logits.repeat(draws, 1), sequences, num_candidates))
        counts = torch.bincount(tokens, minlength=VOCAB_SIZE).tolist()
        assert all(p > 0 or c == 0 for c, p in zip(counts, probabilities, strict=True))
        statistic = chi_square(counts, probabilities)
        print(f"{params}: chi square {statistic:.1f} over {len(support)} tokens")
        assert statistic < 99


@pytest.mark.usefixtures("by_torch")
def test_all_that_is_sampled_is_the_same_if_the_vocabulary_must_be_sorted() -> None:
    """Sequences whose candidates do not suffice get their tokens and log-probabilities later than their neighbours."""
    kinds: list[dict[str, Any]] = [
        {"top_p": 0.95, "logprobs": 2},
        {"temperature": 0.0, "logprobs": 3},
        {"top_p": 0.9},
        {"temperature": 0.0, "beam_width": 2},
        {"top_p": 0.99, "min_p": 0.01, "logprobs": 0},
        {"top_p": 0.1, "logprobs": 1},
        {"top_k": 5, "top_p": 0.95, "logprobs": 5},
        {},
    ]
    sequences = [make_sequence(seed=index, **kinds[index % len(kinds)]) for index in range(40)]
    logits = random_logits(40, 2)
    logits[8, 3] = math.nan
    logits[16] = -math.inf
    outputs = [
        Sampler(VOCAB_SIZE, CPU, num_candidates=count).sample(logits.clone(), sequences) for count in (2, VOCAB_SIZE)
    ]
    assert list(outputs[0].failed) == [8, 16]
    assert {2, 6} < set(outputs[0].resampled_on_host)
    assert not outputs[1].resampled_on_host
    outputs[0].resampled_on_host = []
    for output in outputs:
        assert output.logprobs is not None
        output.logprobs[8] = output.logprobs[16] = None  # NaN, which equals nothing
    assert outputs[0] == outputs[1]


@pytest.mark.usefixtures("by_torch")
def test_one_wait_suffices_unless_the_vocabulary_is_sorted() -> None:
    logits = random_logits(2, 2)
    for count, num_waits in ((2, 1), (VOCAB_SIZE, 0)):
        sampler = Sampler(VOCAB_SIZE, CPU, num_candidates=count)
        waits: list[None] = []
        pending = sampler.start(logits.clone(), [make_sequence(top_p=0.95), make_sequence(temperature=0.0)])
        pending.finish(lambda waits=waits: waits.append(None))
        assert len(waits) == num_waits


def test_greedy_takes_the_most_likely_token_and_ignores_the_seed() -> None:
    logits = random_logits(8, 3)
    assert sample(logits, [make_sequence(seed=row, temperature=0.0) for row in range(8)]) == logits.argmax(1).tolist()


def test_a_tiny_temperature_is_greedy_and_not_the_first_of_many_infinities() -> None:
    logits = torch.tensor([[5.0, 10.0, -3.0, 9.99]])
    for temperature in (1e-30, 1e-300):
        assert sample(logits, [make_sequence(temperature=temperature)]) == [1]
        assert sample(logits, [make_sequence(temperature=temperature, top_p=0.5)]) == [1]


def test_equal_logits_are_told_apart_by_id() -> None:
    """16-bit logits are often equal: top-k keeps the smaller ids, and so does the list of the most likely tokens."""
    scores = torch.randint(-3, 3, (20, VOCAB_SIZE), generator=torch.Generator().manual_seed(0)).float()
    above = torch.nextafter(scores, torch.tensor(math.inf))
    scores[:, ::3] = above[:, ::3]  # and what differs in the last bit is not equal
    values, ids = top_tokens(scores, 17)
    expected = [sorted(range(VOCAB_SIZE), key=lambda i, row=row: (-row[i], i))[:17] for row in scores.tolist()]
    assert ids.tolist() == expected
    assert torch.equal(values, scores.gather(1, ids))
    drawn = sample(torch.zeros(200, VOCAB_SIZE), [make_sequence(seed=seed, top_k=3) for seed in range(200)])
    assert set(drawn) == {0, 1, 2}


# --- sequences that cannot be sampled -------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 2, "min_p": 0.1}])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, "all forbidden"])
def test_an_impossible_choice_is_flagged_and_affects_no_other(params: dict[str, Any], wrong: Any) -> None:
    sequences = [make_sequence(seed=row, **params) for row in range(5)]
    logits = random_logits(5, 4)
    expected = sample(logits, sequences)
    if wrong == "all forbidden":
        logits[2] = -math.inf
    else:
        logits[2, 30] = wrong
    output = Sampler(VOCAB_SIZE, CPU, num_candidates=4).sample(logits, sequences)
    assert list(output.failed) == [2]
    assert output.token_ids == [*expected[:2], 0, *expected[3:]]


def test_a_mask_that_forbids_everything_is_flagged() -> None:
    sequences = [make_sequence(temperature=0.0, allowed_token_ids=[STOP], min_tokens=1), make_sequence(min_tokens=1)]
    assert Sampler(VOCAB_SIZE, CPU).sample(random_logits(2, 0), sequences).failed.keys() == {0}


def test_a_nan_behind_a_mask_and_one_in_a_beam_are_flagged() -> None:
    sequences = [
        make_sequence(temperature=0.0, allowed_token_ids=[3], logprobs=1),
        make_sequence(temperature=0.0, beam_width=2),
        make_sequence(temperature=0.0),
    ]
    logits = random_logits(3, 0)
    logits[:2, 30] = math.nan
    output = Sampler(VOCAB_SIZE, CPU).sample(logits, sequences)
    assert list(output.failed) == [0, 1]
    assert output.token_ids[:2] == [0, -1]


def test_no_sequences_no_tokens() -> None:
    assert Sampler(VOCAB_SIZE, CPU).sample(torch.zeros(0, VOCAB_SIZE), []).token_ids == []


# --- grammar --------------------------------------------------------------------------------------------------------


def bitmask_of(allowed: list[set[int]], vocab_size: int) -> torch.Tensor:
    words = [[0] * -(-vocab_size // 32) for _ in allowed]
    for row, ids in zip(words, allowed, strict=True):
        for i in ids:
            row[i // 32] |= 1 << (i % 32)
    return torch.tensor(words, dtype=torch.int64).to(torch.uint32).view(torch.int32)


@pytest.mark.parametrize("vocab_size", [32, 50, 64, 101])
def test_the_grammar_has_the_last_word(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    sequences = [
        make_sequence(seed=row, temperature=rng.choice([0.0, 1.0]), top_p=rng.choice([1.0, 0.8]), logit_bias={0: 100.0})
        for row in range(20)
    ]
    rows = [1, 4, 5, 19, 7]
    allowed = [set(rng.sample(range(1, vocab_size), rng.choice([1, 3, 20]))) for _ in rows]
    allowed[0] = {vocab_size - 1, 31}
    logits = random_logits(20, 0, vocab_size=vocab_size)
    free = sample(logits, sequences)
    masked = logits.clone()
    for row, ids in zip(rows, allowed, strict=True):
        masked[row, [i for i in range(vocab_size) if i not in ids]] = -math.inf
    output = Sampler(vocab_size, CPU).sample(logits.clone(), sequences, (rows, bitmask_of(allowed, vocab_size)))
    assert output.token_ids == [
        token if row in rows else free[row] for row, token in enumerate(sample(masked, sequences))
    ]
    for row, ids in zip(rows, allowed, strict=True):
        assert output.token_ids[row] in ids


# --- logprobs and beams ---------------------------------------------------------------------------------------------


def test_logprobs_are_the_models_own_and_ranked() -> None:
    logits = random_logits(7, 5)
    for row in (0, 6):
        logits[row, 10:14] = logits[row].max() + 1  # four that are equally likely
    kinds: list[dict[str, Any]] = [
        {"logprobs": 2},
        {"logprobs": 20, "frequency_penalty": 2.0, "logit_bias": {5: 50.0}},
        {"logprobs": 0},
        {},
        {"temperature": 0.0, "logprobs": 5},
        {"best_of": 3, "n": 1},
        {"logprobs": -1},
    ]
    sequences = [make_sequence(seed=row, **kind) for row, kind in enumerate(kinds)]
    output = Sampler(VOCAB_SIZE, CPU).sample(logits.clone(), sequences)
    assert output.logprobs is not None
    assert output.logprobs[3] is None
    for row in (0, 1, 2, 4, 5, 6):
        expected = torch.log_softmax(logits[row], dim=0).tolist()
        position = output.logprobs[row]
        assert position is not None
        number = sequences[row].params.logprobs or 0
        k = VOCAB_SIZE if number == -1 else number
        order = sorted(range(VOCAB_SIZE), key=lambda i, e=expected: (-e[i], i))
        assert list(position) == list(dict.fromkeys([output.token_ids[row], *order[:k]]))
        for token_id, logprob in position.items():
            assert logprob.logprob == pytest.approx(expected[token_id], abs=1e-6)
            assert logprob.rank == 1 + sum(value > expected[token_id] for value in expected)
    assert output.token_ids[1] == 5
    assert next(iter(output.logprobs[1] or {})) == 5
    assert sample(logits, sequences) == output.token_ids
    assert Sampler(VOCAB_SIZE, CPU).sample(logits, [make_sequence() for _ in range(7)]).logprobs is None


def test_prompt_logprobs_are_of_the_actual_next_tokens() -> None:
    logits = random_logits(4, 6)
    sampler, token_ids = Sampler(VOCAB_SIZE, CPU), torch.tensor([3, 0, 49, 3])
    got = sampler.prompt_logprobs(logits, token_ids, [2] * 4).to_lists()
    for row, (position, token_id) in enumerate(zip(got, [3, 0, 49, 3], strict=True)):
        expected = torch.log_softmax(logits[row], dim=0)
        rank = 1 + int((expected > expected[token_id]).sum())
        assert next(iter(position.items())) == (
            token_id,
            Logprob(pytest.approx(expected[token_id].item(), abs=1e-6), rank),
        )
        assert set(position) == {token_id, *expected.topk(2).indices.tolist()}
    everything = sampler.prompt_logprobs(logits, token_ids, [0, -1, 2, -1]).to_lists()
    assert [len(position) for position in everything] == [1, VOCAB_SIZE, 3, VOCAB_SIZE]
    for position in everything[1::2]:
        assert sum(math.exp(logprob.logprob) for logprob in position.values()) == pytest.approx(1.0)
        assert sorted(logprob.rank for logprob in position.values()) == list(range(1, VOCAB_SIZE + 1))
    assert sampler.prompt_logprobs(logits[:0], token_ids[:0], []).to_lists() == []


def test_beams_get_the_most_likely_tokens_of_the_models_own() -> None:
    sequences = [
        make_sequence(temperature=0.0),
        make_sequence(temperature=0.0, beam_width=3),
        make_sequence(temperature=0.0, beam_width=40, min_tokens=2),
    ]
    sequences[1].stop_token_ids = frozenset({1, 2, 3})
    logits = random_logits(3, 7)
    logits[:, STOP] = 9.0
    output = Sampler(VOCAB_SIZE, CPU).sample(logits.clone(), sequences)
    assert output.token_ids == [STOP, -1, -1]
    expected = torch.log_softmax(logits, dim=1)
    top = expected[1].topk(3 + 3)  # tokens that go on, and stop tokens
    assert output.beams[1][0] == top.indices.tolist()
    assert output.beams[1][1] == pytest.approx(top.values.tolist())
    expected[2, STOP] = -math.inf  # masked, but the others' probabilities are not renormalised
    top = expected[2].topk(40 + 1)
    assert output.beams[2][0] == top.indices.tolist()
    assert output.beams[2][1] == pytest.approx(top.values.tolist())
    assert set(output.beams) == {1, 2}


@pytest.mark.usefixtures("by_torch")
def test_warming_up_takes_the_longest_way(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.sampling.choosers import TruncatedDraw

    sorted_indices: list[list[int]] = []
    real = TruncatedDraw.choose_sorted
    monkeypatch.setattr(
        TruncatedDraw,
        "choose_sorted",
        lambda self, logits, undecided: sorted_indices.append(undecided) or real(self, logits, undecided),
    )
    Sampler(5000, CPU).warm_up(3, 20)
    assert sorted_indices == [[0, 1, 2]]
    Sampler(VOCAB_SIZE, CPU).warm_up(3, 20)


def test_warming_up_uses_every_filter_whose_tensors_are_as_wide_as_the_vocabulary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import engine.sampling.sampler

    batches: list[Any] = []
    real = engine.sampling.sampler.SamplingBatch
    monkeypatch.setattr(
        engine.sampling.sampler, "SamplingBatch", lambda *args: batches.append(real(*args)) or batches[-1]
    )
    sampler = Sampler(VOCAB_SIZE, CPU)
    sampler.warm_up(3, -1)
    (batch,) = batches
    names = [type(logit_filter).__name__ for logit_filter in batch.filters]
    assert names == ["AllowedTokens", "BadWords", "MinTokens", "LogitBias", "RepetitionPenalty", "OutputPenalties"]
    assert (batch.logprob_indices, batch.num_logprobs) == ([0, 1, 2], [-1] * 3)
    sequences = [make_sequence() for _ in range(3)]
    sampler.sample(random_logits(3, 0), sequences)
    assert len(batches) == 2, "the next batch must not continue that of the warm-up"


def test_listed_tokens_have_log_probabilities_whatever_their_rank() -> None:
    """Each sequence gets its own tokens, beside the sampled and the most likely ones."""
    logits = random_logits(4, 3)
    expected = logits.log_softmax(dim=1)
    listed: list[list[int] | None] = [[49, 0], None, [5], None]
    numbers = [0, 2, 1, None]
    sequences = [
        make_sequence(temperature=0.0, logprobs=number, logprob_token_ids=ids)
        for number, ids in zip(numbers, listed, strict=True)
    ]
    sampled = Sampler(VOCAB_SIZE, CPU).sample(logits.clone(), sequences)
    assert sampled.logprobs is not None
    for row, (position, number, ids) in enumerate(zip(sampled.logprobs, numbers, listed, strict=True)):
        if number is None:
            assert position is None
            continue
        assert position is not None
        order = expected[row].argsort(descending=True).tolist()
        assert next(iter(position)) == sampled.token_ids[row]
        assert set(position) == {sampled.token_ids[row], *order[:number], *(ids or ())}
        for token_id, logprob in position.items():
            assert logprob.logprob == pytest.approx(float(expected[row, token_id]), abs=1e-5)
            assert logprob.rank == 1 + order.index(token_id)


def test_listed_tokens_of_a_draw_that_needs_the_whole_vocabulary() -> None:
    """With few candidates, top-p leaves the draw undecided at first."""
    logits = random_logits(40, 5, scale=0.1)
    sequences = [
        make_sequence(seed=row, temperature=1.0, top_p=0.9, logprobs=0, logprob_token_ids=[row % VOCAB_SIZE, 7])
        for row in range(40)
    ]
    sampled = Sampler(VOCAB_SIZE, CPU, num_candidates=2).sample(logits.clone(), sequences)
    assert sampled.logprobs is not None
    for row, (token_id, position) in enumerate(zip(sampled.token_ids, sampled.logprobs, strict=True)):
        assert position is not None
        assert set(position) == {token_id, row % VOCAB_SIZE, 7}
        assert next(iter(position)) == token_id
