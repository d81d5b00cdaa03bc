"""A prefix that another engine has computed: the same bits and the same tokens as if this one had computed it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.kv.tiers import fetching
from engine.options.structured_outputs import StructuredOutputsParams
from engine.sampling_params import SamplingParams
from tests.deployments.transport.pages.nodes import BLOCK_SIZE, GREEDY, nodes, prompt_of, save
from tests.engine.shadow import make_engine
from tests.engine.tiny_tokenizers import save_tokenizer
from tests.waiting import HANG_S, until_in_loop

SEEDED = SamplingParams(temperature=1.0, seed=5, max_tokens=12)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests wait for pages however busy the machine is."""
    monkeypatch.setattr(fetching, "LEAST_WAIT_S", HANG_S)
    monkeypatch.setattr(fetching, "DEFAULT_WAIT_S", HANG_S)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("qwen3")
    save_tokenizer(path)
    return save("qwen3", path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_pulled_blocks_have_the_bits_and_give_the_tokens_of_computed_ones(qwen3: str, dtype: str) -> None:
    prompt = prompt_of(90)
    async with nodes(qwen3, 3, dtype=dtype) as (source, target, alone):
        expected = {params: await alone.answer(prompt, params) for params in (GREEDY, SEEDED)}
        assert await source.answer(prompt) == expected[GREEDY]
        assert await target.answer(prompt, SEEDED, source.source(88)) == expected[SEEDED]
        assert target.num_fetched == 88
        assert target.failures == {}
        assert all(map(torch.equal, target.bits(prompt, 22), alone.bits(prompt, 22)))
        chain = target.tiers.chain(prompt, "")
        assert {chain.block_hash(index, BLOCK_SIZE) for index in range(22)} <= target.reported
        assert await target.answer(prompt, GREEDY, source.source(88)) == expected[GREEDY]  # now it is its own
        assert target.num_fetched == 88
        await until_in_loop(lambda: source.is_clean() and target.is_clean(), "every page is free")
        (rate,) = target.tiers.source_rates()
        assert rate.source == source.transfer.address.endpoint
        assert source.tiers.source_rates() == ()
        assert source.count("kv_tier_tokens", "peer", "out") == 88
        assert source.count("kv_tier_bytes", "peer", "out") == target.count("kv_tier_bytes", "peer", "in") > 0


@pytest.mark.parametrize("family", ["mistral", "qwen3.5"])
async def test_windows_and_states_are_pulled_too(family: str, tmp_path: Path) -> None:
    prompt = prompt_of(120)
    async with nodes(save(family, tmp_path), 3) as (source, target, alone):
        expected = await alone.answer(prompt, SEEDED)
        assert await source.answer(prompt, SEEDED) == expected
        assert await target.answer(prompt, SEEDED, source.source(120)) == expected
        assert target.num_fetched > 60
        assert target.count("prefix_cache_hit_tokens") > 60
        await until_in_loop(lambda: source.is_clean() and target.is_clean(), "every page is free")


async def test_a_resumed_stream_takes_the_kv_of_its_answer_too(qwen3: str) -> None:
    """A stream that moves to another replica carries the tokens that it has got."""
    prompt = prompt_of(50)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)
    async with nodes(qwen3, 2) as (source, target):
        expected = await source.answer(prompt, params)
        moved = await target.answer(prompt, params, source.source(88), output_token_ids=expected[:40])
        assert expected[:40] + moved == expected
        assert target.num_fetched == 88


async def test_a_grammar_goes_on_after_pulled_blocks(qwen3: str) -> None:
    prompt, form = prompt_of(40), StructuredOutputsParams(regex="[a-z]{20} [0-9]{20}")
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=30, structured_outputs=form)
    async with nodes(qwen3, 2, skip_tokenizer_init=False) as (source, target):
        expected = await source.answer(prompt, params)
        moved = await target.answer(prompt, params, source.source(52), output_token_ids=expected[:14])
        assert expected[:14] + moved == expected
        assert target.num_fetched == 52


async def test_only_what_the_target_lacks_is_pulled(qwen3: str) -> None:
    prompt = prompt_of(90)
    async with nodes(qwen3, 2) as (source, target):
        expected = await source.answer(prompt)
        await target.answer(prompt[:41])
        assert await target.answer(prompt, GREEDY, source.source(90)) == expected
        assert target.num_fetched == 48


async def test_requests_of_one_prefix_wait_for_one_transfer(qwen3: str) -> None:
    prompt = prompt_of(90)
    async with nodes(qwen3, 2) as (source, target):
        expected = await source.answer(prompt)
        answers = await asyncio.gather(*(target.answer(prompt, GREEDY, source.source(88)) for _ in range(4)))
        assert answers == [expected] * 4
        assert target.num_fetched == 88
        await until_in_loop(lambda: source.is_clean() and target.is_clean(), "every page is free")


async def test_a_salt_separates_pulled_blocks(qwen3: str) -> None:
    prompt = prompt_of(90)
    async with nodes(qwen3, 2) as (source, target):
        expected = await source.answer(prompt, cache_salt="a")
        assert await target.answer(prompt, GREEDY, source.source(88), cache_salt="b") == expected
        assert target.num_fetched == 0
        assert target.failures == {("peer", "gone"): 1}
        assert await target.answer(prompt_of(90, 8), GREEDY, source.source(88), cache_salt="a")
        assert target.failures == {("peer", "gone"): 2}
        await target.answer(prompt, GREEDY, source.source(88), cache_salt="a")
        assert target.num_fetched == 88


@pytest.mark.parametrize("options", [{"num_host_blocks": 0}, {"num_host_blocks": 9, "enable_prefix_caching": False}])
def test_transfers_need_a_host_pool_and_the_prefix_cache(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"kv_transfer=True needs a host pool.*, or set it false"):
        make_engine(kv_transfer=True, **options)
    engine, _ = make_engine(**options)  # by default there are none
    assert engine.tiers is None
