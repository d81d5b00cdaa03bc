"""What is sampled with a draft model follows the large model's distribution."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.sampling_params import SamplingParams
from tests.engine.checkpoints import build_model, save_checkpoint
from tests.engine.conftest import SavedModel
from tests.engine.models.test_speculative_generation import DraftCounter
from tests.engine.oracle import answers, make_llm, run
from tests.engine.sampling.batches import chi_square

PROMPT, ALLOWED, TEMPERATURE, LENGTH = [5, 9, 20, 7], (30, 31, 32), 2.0, 4
LEAST_EXPECTED = 5  # answers: rarer ones are counted together
CRITICAL = 146  # with at most 80 degrees of freedom, the statistic exceeds it once in 100,000 runs


def probabilities(model: PreTrainedModel) -> dict[tuple[int, ...], float]:
    """Return the probability of every answer of four tokens, by transformers."""
    every = list(product(ALLOWED, repeat=LENGTH))
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *answer] for answer in every])).logits[:, len(PROMPT) - 1 : -1]
    logprobs = (logits[:, :, list(ALLOWED)].double() / TEMPERATURE).log_softmax(dim=2)
    chosen = torch.tensor([[ALLOWED.index(token_id) for token_id in answer] for answer in every])
    return dict(zip(every, logprobs.gather(2, chosen[:, :, None]).sum(dim=(1, 2)).exp().tolist(), strict=True))


@pytest.mark.parametrize(
    "draws",
    [1_500, pytest.param(100_000, marks=[pytest.mark.exhaustive("more draws"), pytest.mark.timeout(1200)])],
)
def test_answers_follow_the_distribution_of_the_large_model(
    qwen3: SavedModel, draws: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = DraftCounter(monkeypatch)
    draft = save_checkpoint(build_model("qwen3", num_hidden_layers=1), tmp_path)
    speculation = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
    llm = make_llm(qwen3.path, speculative_config=speculation, kv_cache_memory="32MiB")
    counts: Counter[tuple[int, ...]] = Counter()
    for first in range(0, draws, 500):
        params = [
            SamplingParams(
                temperature=TEMPERATURE, seed=seed, max_tokens=LENGTH, allowed_token_ids=list(ALLOWED), ignore_eos=True
            )
            for seed in range(first, first + 500)
        ]
        counts.update(tuple(token_ids) for (token_ids,) in answers(run(llm, [PROMPT] * 500, params)))
    assert 0.2 < drafts.num_accepted / drafts.num_drafted < 0.9, "drafts of one kind only"
    expected = probabilities(qwen3.model)
    usual = [answer for answer, probability in expected.items() if probability * draws >= LEAST_EXPECTED]
    cells = [(counts[answer], expected[answer]) for answer in usual]
    cells.append((draws - sum(count for count, _ in cells), max(1.0 - sum(p for _, p in cells), 1e-12)))
    statistic = chi_square([count for count, _ in cells], [probability for _, probability in cells])
    print(f"chi square {statistic:.1f} over {len(cells)} answers, {drafts.num_accepted} of {drafts.num_drafted} right")
    assert len(cells) > 20
    assert statistic < CRITICAL
