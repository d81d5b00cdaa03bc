"""KV that is copied before a request needs it: right, reported, bounded, and dropped when it is late."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deployments.transport.pages import client as client_module
from deployments.transport.pages import conversation as conversation_module
from engine.kv.tiers import copies as copies_module
from engine.kv.tiers.copies import CopyOrder
from engine.request import KVSource
from engine.sampling_params import SamplingParams
from tests.deployments.transport.pages.nodes import BLOCK_SIZE, GREEDY, Node, nodes, prompt_of, save
from tests.engine.async_streams import collect, stream
from tests.waiting import HANG_S, until_in_loop

PROMPT = prompt_of(90)
SMALL_GIB = 0.0001  # of 12 or so pages
LONG = SamplingParams(temperature=1.0, seed=3, max_tokens=100, ignore_eos=True)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let copies wait for pages however busy the machine is."""
    monkeypatch.setattr(copies_module, "LATE_S", HANG_S)
    monkeypatch.setattr(conversation_module, "MAX_WAIT_S", HANG_S)
    monkeypatch.setattr(client_module, "FLOOR_S", HANG_S)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save("qwen3", tmp_path_factory.mktemp("qwen3"))


def order(source: Node, tokens: list[int]) -> CopyOrder:
    num_tokens = len(tokens) // BLOCK_SIZE * BLOCK_SIZE
    return CopyOrder(tokens, "", source.source(num_tokens), "replication")


async def copy(target: Node, *orders: CopyOrder) -> None:
    """Give orders to an engine at once, and wait until it is done with them."""
    copies, added = target.tiers.copies, []

    def add() -> None:
        for each in orders:
            copies.add(each)
        added.append(True)

    target.engine.call_in_step_thread(add)
    await until_in_loop(lambda: bool(added) and not copies._queue and not copies._running, "the copies have ended")


async def test_an_idle_engine_copies_and_reports_what_a_request_then_hits(qwen3: str) -> None:
    async with nodes(qwen3, 3) as (source, target, alone):
        expected = await alone.answer(PROMPT, LONG)
        assert await source.answer(PROMPT, LONG) == expected
        await copy(target, order(source, [*PROMPT, *expected]))
        assert target.count("kv_copied_tokens", "replication") == target.num_fetched == 188
        assert target.count("prefix_cache_tier_hit_tokens", "peer") == 0  # no request has got it
        chain = target.tiers.chain([*PROMPT, *expected], "")
        assert {chain.block_hash(index, BLOCK_SIZE) for index in range(47)} <= target.reported
        assert await target.answer(PROMPT, LONG) == expected
        assert target.count("prefix_cache_hit_tokens") == 88
        assert all(map(torch.equal, target.bits(PROMPT, 22), alone.bits(PROMPT, 22)))
        await until_in_loop(lambda: source.is_clean() and target.is_clean(), "every page is free")


async def test_a_running_answer_is_copied_up_to_its_last_full_block(qwen3: str) -> None:
    async with nodes(qwen3, 2) as (source, target):
        tokens: list[int] = []
        async for output in stream(source.engine, source.request(PROMPT, LONG)):
            tokens += output.token_ids
            if len(tokens) >= 43 and not target.num_fetched:
                await copy(target, order(source, [*PROMPT, *tokens[:43]]))
                assert target.num_fetched == 132  # of 133, the last of which may not be computed yet
        assert len(tokens) == 100


@pytest.mark.parametrize("family", ["mistral", "qwen3.5"])
async def test_windows_and_states_are_copied_too(family: str, tmp_path: Path) -> None:
    prompt = prompt_of(120)
    async with nodes(save(family, tmp_path), 2) as (source, target):
        expected = await source.answer(prompt)
        await copy(target, order(source, prompt))
        assert await target.answer(prompt) == expected
        assert target.count("prefix_cache_hit_tokens") > 60
        await until_in_loop(lambda: source.is_clean() and target.is_clean(), "every page is free")


async def test_orders_for_one_text_make_one_transfer_and_later_ones_copy_what_is_new(qwen3: str) -> None:
    async with nodes(qwen3, 2) as (source, target):
        await source.answer(PROMPT)
        await copy(target, *[order(source, PROMPT[:60])] * 5)
        assert target.num_fetched == 60
        await copy(target, order(source, PROMPT[:60]), order(source, PROMPT))
        assert target.num_fetched == 88
        assert target.failures == {}


async def test_what_is_late_or_too_much_is_dropped(qwen3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with nodes(qwen3, 2) as (source, target):
        await source.answer(PROMPT)
        monkeypatch.setattr(copies_module, "MAX_RUNNING", 0)  # so that they wait
        target.engine.call_in_step_thread(
            lambda: [target.tiers.copies.add(order(source, PROMPT)) for _ in range(copies_module.MAX_QUEUED + 3)]  # type: ignore[func-returns-value]
        )
        await until_in_loop(lambda: target.failures == {("peer", "late"): 3}, "the oldest are dropped")
        monkeypatch.setattr(copies_module, "MAX_RUNNING", 2)
        monkeypatch.setattr(copies_module, "LATE_S", -1.0)
        await copy(target, order(source, PROMPT))
        assert target.num_fetched == 0
        assert target.failures == {("peer", "late"): copies_module.MAX_QUEUED + 4}


async def test_a_source_that_is_gone_costs_nothing(qwen3: str) -> None:
    async with nodes(qwen3, 2) as (source, target):
        expected = await source.answer(PROMPT)
        gone = CopyOrder(PROMPT, "", KVSource("tcp://127.0.0.1:9", "secret", 88), "drain")
        await copy(target, gone)
        assert target.failures == {("peer", "io"): 1}
        assert target.is_clean()
        await copy(target, order(source, prompt_of(90, 9)))  # it does not hold that
        assert target.failures == {("peer", "io"): 1, ("peer", "gone"): 1}
        assert await target.answer(PROMPT, GREEDY) == expected


async def test_copies_need_room_in_the_host_pool(qwen3: str) -> None:
    async with nodes(qwen3, 2, {}, {"swap_space_gib": SMALL_GIB}) as (source, target):
        expected = await source.answer(PROMPT)
        await copy(target, order(source, PROMPT))
        assert 0 < target.num_fetched < 88
        assert await target.answer(PROMPT) == expected


@pytest.mark.parametrize("tokens", [[], [-1] * 8, [2**31 - 1] * 8, [5] * 100_000])
async def test_a_text_that_no_request_can_have_is_ignored(qwen3: str, tokens: list[int]) -> None:
    async with nodes(qwen3, 1) as (node,):
        node.transfer.copy(CopyOrder(tokens, "", node.source(8), "replication"))
        assert await node.answer(PROMPT)
        assert node.failures == {}


async def test_without_a_client_nothing_is_copied(qwen3: str) -> None:
    async with nodes(qwen3, 1) as (node,):
        node.tiers.copies.peers = None
        await copy(node, order(node, PROMPT))
        assert await collect(stream(node.engine, node.request(PROMPT)))
