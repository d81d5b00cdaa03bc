"""Engines on tiny models with latent attention: tokens and beams equal those of transformers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.errors import ConfigError
from tests.engine.models.adapter import greedy_answers
from tests.engine.models.decoder.family_answers import check_beams, check_drafts, check_two_ranks
from tests.engine.models.decoder.latent.latent_families import LATENT_FAMILIES
from tests.engine.models.decoder.saved_models import Saved
from tests.engine.oracle import make_llm

FEW = ("deepseek-v2", "deepseek-v3", "deepseek-v3.2", "glm-5.2", "minicpm3")
MOST = [name if name in FEW else pytest.param(name, marks=pytest.mark.long) for name in LATENT_FAMILIES]


@pytest.mark.parametrize("name", MOST)
def test_greedy_tokens_equal_transformers(saved: Callable[[str], Saved], name: str) -> None:
    """With blocks of 4 tokens, steps of 7, shared prefixes, a cached prompt, and preemption."""
    expected = greedy_answers.oracle(saved(name).model, greedy_answers.make_prompts())
    assert len({tuple(answer) for (answer,) in expected}) > 1, "the oracle's answers are too much alike"
    activity = greedy_answers.check(saved(name).path, (4, 7, True, 0.0), expected, model_impl="auto")
    assert activity.num_recomputed


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("deepseek-v3", marks=pytest.mark.long),
        pytest.param("glm-5.2", marks=pytest.mark.long),
        pytest.param("mistral-4", marks=pytest.mark.exhaustive("24 settings; CI runs those of DeepSeek V3")),
    ],
)
def test_greedy_tokens_in_every_setting(saved: Callable[[str], Saved], name: str) -> None:
    """Also swapped to the host, and without a prefix cache."""
    expected = greedy_answers.oracle(saved(name).model, greedy_answers.make_prompts())
    for setting in greedy_answers.SETTINGS:
        greedy_answers.check(saved(name).path, setting, expected, model_impl="auto")


@pytest.mark.parametrize("name", ["deepseek-v3", "glm-5.2"])
def test_latents_that_were_swapped_are_read_again(saved: Callable[[str], Saved], name: str) -> None:
    expected = greedy_answers.oracle(saved(name).model, greedy_answers.make_prompts())
    activity = greedy_answers.check(saved(name).path, (4, 7, True, 0.001), expected, model_impl="auto")
    assert activity.num_swapped_out


@pytest.mark.parametrize("name", ["deepseek-v3", "glm-5.2"])
def test_drafts_change_no_token(saved: Callable[[str], Saved], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = check_drafts(saved(name), monkeypatch)
    assert drafts.num_drafted > 0


@pytest.mark.parametrize("name", MOST)
def test_two_ranks_share_a_model(saved: Callable[[str], Saved], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_two_ranks(saved(name), monkeypatch)


def test_ranks_that_do_not_divide_the_heads_are_refused(saved: Callable[[str], Saved]) -> None:
    with pytest.raises(
        ConfigError, match="tensor_parallel_size=3 does not divide the model's 4 attention heads; choose"
    ):
        make_llm(saved("deepseek-v3").path, tensor_parallel_size=3)


@pytest.mark.parametrize("name", ["deepseek-v3", "glm-5.2", pytest.param("glm-4.7-flash", marks=pytest.mark.long)])
def test_beams_equal_transformers(saved: Callable[[str], Saved], name: str) -> None:
    """Forks copy the block that they share in part."""
    check_beams(saved(name))
