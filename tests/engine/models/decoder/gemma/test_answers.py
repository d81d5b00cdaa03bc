"""Engines on tiny models of the kinds of Gemma 3n and 4: tokens and beams equal those of transformers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.errors import ConfigError, ModelLoadError
from tests.engine.models.adapter import greedy_answers
from tests.engine.models.decoder.family_answers import check_beams, check_conversation, check_drafts, check_two_ranks
from tests.engine.models.decoder.gemma.gemma_families import GEMMA_FAMILIES
from tests.engine.models.decoder.saved_models import Saved
from tests.engine.oracle import make_llm

ALTUP = "gemma-3n-e4b"  # whose layers ranks do not share


def few(*names: str, without: str = "") -> list[object]:
    """Return all kinds as parameters of a test; all but ``names`` are left to the long tests."""
    kinds = [name for name in GEMMA_FAMILIES if name != without]
    return [name if name in names else pytest.param(name, marks=pytest.mark.long) for name in kinds]


@pytest.mark.parametrize("name", GEMMA_FAMILIES)
def test_greedy_tokens_equal_transformers(saved: Callable[[str], Saved], name: str) -> None:
    """With blocks of 4 tokens, steps of 7, shared prefixes, a cached prompt, and preemption."""
    expected = greedy_answers.oracle(saved(name).model, greedy_answers.make_prompts())
    assert len({tuple(answer) for (answer,) in expected}) > 1, "the oracle's answers are too much alike"
    for swap_space_gib in (0.0, 0.001):
        setting = (4, 7, True, swap_space_gib)
        activity = greedy_answers.check(saved(name).path, setting, expected, model_impl="pagoda")
        assert activity.num_swapped_out if swap_space_gib else activity.num_recomputed


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gemma-4-e4b", marks=pytest.mark.long),
        *(
            pytest.param(name, marks=pytest.mark.exhaustive("24 settings of every kind; CI runs one"))
            for name in GEMMA_FAMILIES
            if name != "gemma-4-e4b"
        ),
    ],
)
def test_greedy_tokens_in_every_setting(saved: Callable[[str], Saved], name: str) -> None:
    expected = greedy_answers.oracle(saved(name).model, greedy_answers.make_prompts())
    for setting in greedy_answers.SETTINGS:
        greedy_answers.check(saved(name).path, setting, expected, model_impl="pagoda")


@pytest.mark.parametrize("name", few("gemma-4-31b", "gemma-4-e4b"))
def test_a_conversation_of_many_windows_resumes_at_its_prefix(saved: Callable[[str], Saved], name: str) -> None:
    check_conversation(saved(name))


@pytest.mark.parametrize("name", few("gemma-4-e4b", ALTUP))
def test_rejected_drafts_leave_no_trace(
    saved: Callable[[str], Saved], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = check_drafts(saved(name), monkeypatch)
    assert drafts.num_accepted < drafts.num_drafted


@pytest.mark.parametrize("name", few("gemma-4-31b", "gemma-4-e4b", ALTUP))
def test_beams_equal_transformers(saved: Callable[[str], Saved], name: str) -> None:
    check_beams(saved(name))


@pytest.mark.parametrize("name", few("gemma-4-31b", "gemma-4-26b-a4b", "gemma-4-e4b", without=ALTUP))
def test_two_ranks_share_a_model(saved: Callable[[str], Saved], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_two_ranks(saved(name), monkeypatch)


def test_ranks_that_do_not_divide_a_model_are_refused(saved: Callable[[str], Saved]) -> None:
    with pytest.raises(ModelLoadError, match="whose feed-forwards compare gates with the mean of all of them; set it"):
        make_llm(saved(ALTUP).path, model_impl="pagoda", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="tensor_parallel_size=3 does not divide the model's 4 attention heads"):
        make_llm(saved("gemma-4-31b").path, tensor_parallel_size=3)
