"""The text part of a multimodal checkpoint gives the tokens that the multimodal class of transformers gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from engine.errors import ConfigError
from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.files.text_parts import MULTIMODAL, TEXT_ARCHITECTURES
from engine.sampling_params import SamplingParams
from tests.engine.models.adapter.greedy_answers import MAX_TOKENS, POOL_TOKENS, SETTINGS, check, make_prompts, oracle
from tests.engine.models.multimodal.conftest import Published
from tests.engine.models.multimodal.tiny_checkpoints import CASES, COMPARED_APART, FEW, TINY, save
from tests.engine.oracle import answers, make_llm, oracle_beams, run
from tests.engine.worker.test_tensor_parallel import ThreadRanks

SETTING = (4, 7, True, 0.0)
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)

Expected = Callable[[str], list[list[list[int]]]]


@pytest.fixture(scope="module")
def expected(published: Published) -> Expected:
    """Return a function from a checkpoint's name to the answers of transformers."""
    return cache(lambda name: oracle(published(name).model, make_prompts()))


def test_every_text_part_that_is_served_is_compared() -> None:
    compared = {(tiny.architecture, tiny.text_type) for tiny in TINY.values()}
    compared |= set(COMPARED_APART.values())
    assert compared == {(name, model_type) for name, types in MULTIMODAL.items() for model_type in types}
    assert {model_type for _, model_type in compared} <= TEXT_ARCHITECTURES.keys()


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_equal_those_of_the_multimodal_class(published: Published, expected: Expected, name: str) -> None:
    assert len({tuple(answer) for (answer,) in expected(name)}) > 1, "the oracle's answers are too much alike"
    pool_tokens = 44 if TINY[name].has_states else POOL_TOKENS  # so that requests are preempted
    for model_impl in TINY[name].implementations:
        path = str(published(name).path)
        activity = check(path, SETTING, expected(name), model_impl=model_impl, pool_tokens=pool_tokens)
        assert activity.num_recomputed


SWEEP = pytest.mark.exhaustive("24 settings of decoders whose own families have them, too; CI runs one")
FURTHER = pytest.mark.exhaustive("names of further kinds")
LONG_OR_EXHAUSTIVE = [pytest.param(name, marks=pytest.mark.long if name in FEW else FURTHER) for name in TINY]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name == "gemma3" else SWEEP) for name in FEW]
)
def test_greedy_tokens_in_every_setting(published: Published, expected: Expected, name: str) -> None:
    for setting in SETTINGS:
        check(str(published(name).path), setting, expected(name), model_impl="auto")


@pytest.mark.parametrize("name", LONG_OR_EXHAUSTIVE)
def test_names_of_transformers_own_modules_are_read(expected: Expected, name: str, tmp_path: Path) -> None:
    save(name, tmp_path, as_published=False)
    for model_impl in TINY[name].implementations:
        check(str(tmp_path), SETTING, expected(name), model_impl=model_impl)


@pytest.mark.parametrize("name", LONG_OR_EXHAUSTIVE)
def test_beams_equal_those_of_the_multimodal_class(published: Published, name: str) -> None:
    llm = make_llm(str(published(name).path), block_size=4, max_num_batched_tokens=16)
    params = SamplingParams(beam_width=3, n=3, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    prompts = make_prompts()[:2]
    with logits_of_text_class(published(name).model) as model:
        expected = [oracle_beams(model, prompt, params, [])[0] for prompt in prompts]
    assert answers(run(llm, prompts, params)) == expected


@contextmanager
def logits_of_text_class(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Multiply the logits of a multimodal model as the class of its text part does.

    The multimodal classes of transformers leave out the factor of Granite and Cohere, which no greedy token shows.
    """
    text = model.config.get_text_config()
    factor = getattr(text, "logit_scale", 1.0) / getattr(text, "logits_scaling", 1.0)
    if factor == 1.0:
        yield model
        return
    hook = model.get_output_embeddings().register_forward_hook(lambda module, inputs, logits: logits * factor)
    try:
        yield model
    finally:
        hook.remove()


ONE_RANK = ("aria",)  # its experts are transformers' modules, which are not shared
SHARED = [param for param in LONG_OR_EXHAUSTIVE if param.values[0] not in (*ONE_RANK, "qwen3-vl-moe")]


@pytest.mark.parametrize("name", ["qwen3-vl-moe", *SHARED])
def test_two_ranks_share_a_text_part(
    published: Published, expected: Expected, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also experts that are stored the other way round."""
    monkeypatch.setattr("engine.worker.worker_pool.RemoteRanks", ThreadRanks)
    llm = make_llm(str(published(name).path), tensor_parallel_size=2, num_blocks=32)
    assert answers(run(llm, make_prompts(), GREEDY)) == expected(name)
    llm.engine.close()


@pytest.mark.parametrize("name", ONE_RANK)
def test_a_text_part_that_is_not_shared_is_refused(published: Published, name: str) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 is not supported for 'AriaText.*; set 1"):
        make_llm(str(published(name).path), tensor_parallel_size=2, num_blocks=32)


@pytest.mark.parametrize("model_impl", ["pagoda", "transformers"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stored_head_counts_although_the_class_ties_by_default(
    expected: Expected, model_impl: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Mistral-Small-3.1 is published: nothing says that embeddings are not tied, but there is a head."""
    save("mistral3", tmp_path)
    raw = TINY["mistral3"].config_json
    del raw["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_hf_config(tmp_path).tie_word_embeddings
    monkeypatch.setattr("engine.worker.worker_pool.RemoteRanks", ThreadRanks)
    llm = make_llm(str(tmp_path), tensor_parallel_size=ranks, num_blocks=32, model_impl=model_impl)
    assert answers(run(llm, make_prompts(), GREEDY)) == expected("mistral3")
    llm.engine.close()
