"""Engines on tiny models of Llama 4's kinds: tokens and beams equal those of transformers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine.models.adapter import greedy_answers
from tests.engine.models.decoder.family_answers import check_beams, check_conversation, check_drafts, check_two_ranks
from tests.engine.models.decoder.llama4.llama4_models import LLAMA4_MODELS
from tests.engine.models.decoder.saved_models import Saved

SCOUT, MAVERICK, OTHER = LLAMA4_MODELS


@pytest.mark.parametrize("name", LLAMA4_MODELS)
def test_greedy_tokens_equal_transformers(saved: Callable[[str], Saved], name: str) -> None:
    """With blocks of 4 tokens, steps of 7, shared prefixes, a cached prompt, and preemption."""
    expected = greedy_answers.oracle(saved(name).model, greedy_answers.make_prompts())
    assert len({tuple(answer) for (answer,) in expected}) > 1, "the oracle's answers are too much alike"
    for swap_space_gib in (0.0, 0.001):
        setting = (4, 7, True, swap_space_gib)
        activity = greedy_answers.check(saved(name).path, setting, expected, model_impl="pagoda")
        assert activity.num_swapped_out if swap_space_gib else activity.num_recomputed


@pytest.mark.long
@pytest.mark.parametrize("name", LLAMA4_MODELS)
def test_greedy_tokens_in_every_setting(saved: Callable[[str], Saved], name: str) -> None:
    expected = greedy_answers.oracle(saved(name).model, greedy_answers.make_prompts())
    for setting in greedy_answers.SETTINGS:
        greedy_answers.check(saved(name).path, setting, expected, model_impl="pagoda")


@pytest.mark.parametrize("name", [SCOUT, OTHER])
def test_a_conversation_of_many_chunks_resumes_at_its_prefix(saved: Callable[[str], Saved], name: str) -> None:
    check_conversation(saved(name))


def test_rejected_drafts_leave_no_trace(saved: Callable[[str], Saved], monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts cross the borders of chunks."""
    drafts = check_drafts(saved(SCOUT), monkeypatch)
    assert drafts.num_accepted < drafts.num_drafted


@pytest.mark.parametrize("name", [SCOUT, OTHER])
def test_beams_equal_transformers(saved: Callable[[str], Saved], name: str) -> None:
    check_beams(saved(name))


@pytest.mark.parametrize("name", [SCOUT, MAVERICK])
def test_two_ranks_share_a_model(saved: Callable[[str], Saved], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_two_ranks(saved(name), monkeypatch)
