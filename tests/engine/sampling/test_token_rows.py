"""TokenRows counts what the sequences of a batch have, however the batch changes, and reads no history twice."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

from engine.sampling.filters import OutputPenalties, RepetitionPenalty
from engine.sampling.sampler import Sampler
from engine.sampling.token_rows import TokenRows, bytes_of_histories
from engine.sequence import Sequence
from tests.engine.sampling.batches import CPU, VOCAB_SIZE, make_sequence, random_logits


def check(rows: TokenRows, batch: list[Sequence], dtype: torch.dtype, *, counts_prompt: bool) -> None:
    """Compare the rows with the tokens of their sequences, counted anew."""
    assert sorted(rows.indices.tolist()) == list(range(len(batch)))
    for row, index in enumerate(rows.indices.tolist()):
        sequence = batch[index]
        assert rows.sequences[row] is sequence
        counts = Counter(sequence.token_ids if counts_prompt else sequence.output_token_ids)
        expected = [counts[token_id] for token_id in range(VOCAB_SIZE)]
        assert rows.values[row].tolist() == [bool(n) if dtype == torch.bool else n for n in expected]


@pytest.mark.parametrize(("dtype", "counts_prompt"), [(torch.bool, True), (torch.int32, False), (torch.int32, True)])
@pytest.mark.parametrize("seed", range(5))
def test_any_change_of_the_batch(dtype: torch.dtype, counts_prompt: bool, seed: int) -> None:
    rng = random.Random(seed)
    rows = TokenRows(VOCAB_SIZE, dtype, counts_prompt=counts_prompt, device=CPU)
    pool = [make_sequence(seed=i, num_tokens=rng.randrange(1, 9)) for i in range(12)]
    known: dict[Sequence, int] = {}
    for _ in range(60):
        batch = rng.sample(pool, rng.randrange(1, len(pool) + 1))
        for sequence in rng.sample(pool, 3):  # some get tokens, some restart
            if rng.random() < 0.5:
                sequence.token_ids += [rng.randrange(VOCAB_SIZE)] * rng.randrange(3)
            else:
                known.pop(sequence, None)
                del sequence.token_ids[sequence.num_prompt_tokens :]
        rows.serve(list(enumerate(batch)), known)
        check(rows, batch, dtype, counts_prompt=counts_prompt)
        for _ in range(rng.randrange(3)):
            new_ids = [rng.randrange(VOCAB_SIZE) for _ in batch]
            for sequence, token_id in zip(batch, new_ids, strict=True):
                sequence.token_ids.append(token_id)
            rows.advance(torch.tensor(new_ids))
            check(rows, batch, dtype, counts_prompt=counts_prompt)
        known = {sequence: len(sequence.token_ids) for sequence in batch}


@pytest.mark.parametrize("batch_sizes", [[1, 2, 3, 4, 5, 6, 7, 8, 20], [20], [3, 19, 20], [16, 20]])
def test_the_memory_of_histories_is_known(batch_sizes: list[int]) -> None:
    """However a batch has grown, its rows take no more than the warm-up leaves room for."""
    filters: list[Any] = [RepetitionPenalty(VOCAB_SIZE, CPU), OutputPenalties(VOCAB_SIZE, CPU)]
    params = {"repetition_penalty": 1.2, "presence_penalty": 1.0}
    for size in batch_sizes:
        for penalty in filters:
            penalty.serve([make_sequence(seed=i, num_tokens=3, **params) for i in range(size)], {})
    num_bytes = filters[0]._seen._memory.nbytes + filters[1]._counts._memory.nbytes
    needed = VOCAB_SIZE * 20 * (1 + 4)
    assert needed <= num_bytes <= bytes_of_histories(20, VOCAB_SIZE) <= 1.25 * needed


def test_a_change_of_the_batch_reads_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """All histories of 256 sequences of 2,048 tokens took 84 ms whenever one of them ended."""
    read: list[int] = []
    add = TokenRows._add

    def note(rows: TokenRows, token_ids: list[list[int]]) -> None:
        read.append(sum(map(len, token_ids)))
        add(rows, token_ids)

    monkeypatch.setattr(TokenRows, "_add", note)
    kinds: list[dict[str, Any]] = [{"repetition_penalty": 1.2}, {"presence_penalty": 1.0, "frequency_penalty": 0.5}]
    sequences = [make_sequence(seed=i, num_tokens=20, **kinds[i % 2]) for i in range(8)]
    sampler = Sampler(VOCAB_SIZE, CPU)

    def step(batch: list[Sequence]) -> list[int]:
        read.clear()
        output = sampler.sample(random_logits(len(batch), 0), batch)
        for sequence, token_id in zip(batch, output.token_ids, strict=True):
            sequence.token_ids.append(token_id)
        return read

    assert step(sequences) == [4 * 20, 0]
    assert step(sequences) == []
    assert step(sequences[2:]) == [3, 3]  # each has one more token
    assert step([*sequences[2:], *sequences[:2]]) == [3 + 22, 3 + 2]
    sampler.reset()
    assert step(sequences)[0] > 4 * 20
