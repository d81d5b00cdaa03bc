"""Groups of experts, of which a token chooses the best ones first: routes against loops over one token's scores."""

from __future__ import annotations

import pytest
import torch

from kernels.experts.route import Groups, Scores, route

NUM_EXPERTS, TOP_K = 12, 3


def expected_route(
    logits: list[float], bias: list[float], groups: Groups, *, is_sigmoid: bool, normalize: bool
) -> tuple[list[float], list[int]]:
    """Return the weights and the experts of one token, before they are scaled."""
    exponentials = torch.tensor(logits, dtype=torch.float64).exp()
    scores = (exponentials / (exponentials + 1.0) if is_sigmoid else exponentials / exponentials.sum()).tolist()
    choice = [score + offset for score, offset in zip(scores, bias, strict=True)]
    size = NUM_EXPERTS // groups.count
    members = [list(range(start, start + size)) for start in range(0, NUM_EXPERTS, size)]
    best_two = [sorted((choice[expert] for expert in group), reverse=True)[:2] for group in members]
    of_group = [sum(best) if groups.sums_two else best[0] for best in best_two]
    chosen_groups = sorted(range(groups.count), key=lambda group: -of_group[group])[: groups.chosen]
    allowed = [expert for group in chosen_groups for expert in members[group]]
    ids = sorted(allowed, key=lambda expert: (-choice[expert], expert))[:TOP_K]
    total = sum(scores[expert] for expert in ids) if normalize else 1.0
    return [scores[expert] / total for expert in ids], ids


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("is_sigmoid", [True, False])
@pytest.mark.parametrize("groups", [Groups(4, 2, True), Groups(4, 1, False), Groups(3, 2, False), Groups(6, 2, True)])
def test_experts_are_chosen_in_the_best_groups(groups: Groups, is_sigmoid: bool, normalize: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, NUM_EXPERTS, generator=generator) * 2.0
    bias = torch.randn(NUM_EXPERTS, generator=generator) * 0.3 if is_sigmoid else None
    top_k = min(TOP_K, groups.chosen * NUM_EXPERTS // groups.count)
    assert top_k == TOP_K
    scores = Scores(bias, scale=2.5, is_sigmoid=is_sigmoid, groups=groups)
    weights, ids = route(logits, TOP_K, normalize=normalize, scores=scores)
    differs = False
    for row, its_weights, its_ids in zip(logits.tolist(), weights, ids.tolist(), strict=True):
        offsets = [0.0] * NUM_EXPERTS if bias is None else bias.tolist()
        expected, expected_ids = expected_route(row, offsets, groups, is_sigmoid=is_sigmoid, normalize=normalize)
        assert its_ids == expected_ids
        torch.testing.assert_close(its_weights, torch.tensor(expected) * 2.5, atol=1e-6, rtol=1e-5)
        everything = expected_route(row, offsets, Groups(1, 1, False), is_sigmoid=is_sigmoid, normalize=normalize)
        differs |= everything[1] != expected_ids
    assert differs, "no group excludes an expert"


def test_of_equal_groups_the_first_are_chosen() -> None:
    _, ids = route(torch.zeros(2, NUM_EXPERTS), TOP_K, normalize=True, scores=Scores(groups=Groups(4, 1, True)))
    assert ids.tolist() == [[0, 1, 2]] * 2
