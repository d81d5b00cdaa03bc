"""The comparison with lm-eval: its items, and that it sees an answer or a score that differs."""

from __future__ import annotations

from typing import Any

from benchmarks.lm_eval_agreement import NUM_CHOICES, compare_answers, compare_choices, items


def scored(*scores: list[float]) -> dict[str, Any]:
    """Return a run of lm-eval with these scores of the choices of each item."""
    samples = [{"resps": [[(str(score), "False")] for score in item]} for item in scores]
    return {"results": {"acc,none": 0.5, "acc_norm,none": 0.5}, "samples": samples}


def test_items_have_their_answer_among_the_choices() -> None:
    chosen = items(20)
    assert chosen == items(20)
    assert len({item["question"] for item in chosen}) == 20
    assert all(len(set(item["choices"])) == NUM_CHOICES for item in chosen)
    assert {item["label"] for item in chosen} == set(range(NUM_CHOICES))


def test_answers_are_compared_exactly() -> None:
    ours = {"results": {"exact_match,none": 0.5}, "samples": [{"resps": [["a"]]}, {"resps": [["b"]]}]}
    assert compare_answers(ours, ["a", "b"])["same_answer"] == 2
    assert compare_answers(ours, ["a", "b "])["same_answer"] == 1


def test_choices_are_compared_by_their_scores() -> None:
    comparison = compare_choices(scored([-1.0, -2.0], [-3.0, -4.0]), scored([-1.0, -2.5], [-5.0, -4.0]))
    assert (comparison["items"], comparison["same_choice"], comparison["largest_difference"]) == (2, 1, 2.0)
