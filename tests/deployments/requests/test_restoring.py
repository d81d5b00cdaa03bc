"""Streams whose replica dies or shuts down: they continue with the KV that is left, and the tokens are the same."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from deployments.transport.pages import client as client_module
from deployments.transport.pages import conversation as conversation_module
from engine.kv.tiers import copies as copies_module
from engine.kv.tiers import fetching
from engine.sampling_params import SamplingParams
from tests.deployments.requests.cluster import Stream, cluster
from tests.deployments.transport.pages.nodes import BLOCK_SIZE, prompt_of, save
from tests.waiting import HANG_S, until_in_loop

LONG = SamplingParams(temperature=1.0, seed=3, max_tokens=300, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
OPTIONS = {"num_blocks": 600, "swap_space_gib": 0.05}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests wait for pages however busy the machine is."""
    monkeypatch.setattr(fetching, "LEAST_WAIT_S", HANG_S)
    monkeypatch.setattr(fetching, "DEFAULT_WAIT_S", HANG_S)
    monkeypatch.setattr(client_module, "FLOOR_S", HANG_S)
    monkeypatch.setattr(conversation_module, "MAX_WAIT_S", HANG_S)
    monkeypatch.setattr(copies_module, "LATE_S", HANG_S)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save("qwen3", tmp_path_factory.mktemp("qwen3"))


async def test_a_lost_stream_continues_from_the_kv_that_another_replica_holds(qwen3: str, tmp_path: Path) -> None:
    prompt = prompt_of(200)
    async with cluster(qwen3, "abc", **OPTIONS) as running:
        first = Stream(running.generation(prompt, LONG))
        expected = await first.task
        holder = running.serving(first.generation)
        for replica in running.replicas.values():
            replica.hold_after(60)
        again = Stream(running.generation(prompt, LONG))
        await again.until(40)
        served_by = running.serving(again.generation)
        others = [replica for replica in running.replicas.values() if replica is not served_by]
        if served_by is holder:  # what it holds dies with it
            others[0].go_on()
            await others[0].answer(prompt, LONG)
        for replica in others:
            replica.go_on()
        await served_by.kill()
        assert await again.task == expected
        assert again.generation.num_migrations == 1
        assert sum(replica.resumed("restored") for replica in others) >= 200
        assert sum(replica.resumed("recomputed") for replica in others) < 8


async def test_a_replica_that_shuts_down_hands_its_streams_over_with_their_kv(qwen3: str) -> None:
    prompts = [prompt_of(150, seed) for seed in range(4)]
    async with cluster(qwen3, "ab", **OPTIONS) as running:
        a, b = running.replicas["a"], running.replicas["b"]
        expected = [await b.answer(prompt, LONG) for prompt in prompts]
        b.engine.call_in_step_thread(b.inner.reset_prefix_cache)
        await running.set_replicas("a")
        a.hold_after(100)
        streams = [Stream(running.generation(prompt, LONG)) for prompt in prompts]
        for stream in streams:
            await stream.until(30)
        await running.set_replicas("b")
        draining = asyncio.create_task(a.server.drain(lambda: 0.0))
        await asyncio.sleep(0)
        a.go_on()
        assert await draining == 4
        await asyncio.to_thread(a.transfer.drain, 0.5, HANG_S)
        assert [await stream.task for stream in streams] == expected
        assert [stream.generation.num_migrations for stream in streams] == [0] * 4
        assert b.resumed("restored") > 4 * 170
        assert b.resumed("recomputed") < 4 * 4
        # Some prompts may be read twice: for the stream, and because ``a`` leaves. Nothing else is read or restored.
        copied = b.count("kv_copied_tokens", "drain")
        assert b.num_fetched - copied <= b.resumed("restored") <= b.num_fetched


async def test_a_killed_replica_costs_no_more_than_what_was_not_copied_yet(qwen3: str) -> None:
    prompts = [prompt_of(150, seed) for seed in range(3)]
    every = 32
    async with cluster(qwen3, "abc", kv_replication=every, **OPTIONS) as running:
        a, b, c = running.replicas.values()
        expected = [await c.answer(prompt, LONG) for prompt in prompts]
        c.engine.call_in_step_thread(c.inner.reset_prefix_cache)
        await running.set_replicas("a")
        a.hold_after(60)
        streams = [Stream(running.generation(prompt, LONG)) for prompt in prompts]
        for stream in streams:
            await stream.until(40)
        await running.set_replicas("a", "b", "c")
        a.hold_after(2 * every)
        for stream in streams:  # each has grown by 1.5 times ``every`` at least
            await stream.until(40 + every + every // 2)
            held = partial(running.num_held_tokens, stream.generation, "b", "c")
            await until_in_loop(lambda held=held: held() >= 150 + 40 - BLOCK_SIZE, "it is copied")
        await a.kill()
        assert [await stream.task for stream in streams] == expected
        assert [stream.generation.num_migrations for stream in streams] == [1] * 3
        assert b.count("kv_copied_tokens", "replication") + c.count("kv_copied_tokens", "replication") >= 3 * 180
        assert b.resumed("recomputed") + c.resumed("recomputed") <= 3 * (2 * every + BLOCK_SIZE)


async def test_a_half_alive_replica_is_found_by_its_steps_and_writes_nothing_when_it_wakes(qwen3: str) -> None:
    """It takes requests, answers health checks and reports its load, but it computes nothing."""
    prompts = [prompt_of(150, seed) for seed in range(3)]
    async with cluster(qwen3, "ab", kv_replication=32, stall_timeout_s=1.0, **OPTIONS) as running:
        a, b = running.replicas.values()
        expected = [await b.answer(prompt, LONG) for prompt in prompts]
        b.engine.call_in_step_thread(b.inner.reset_prefix_cache)
        await running.set_replicas("a")
        a.hold_after(100)
        streams = [Stream(running.generation(prompt, LONG)) for prompt in prompts]
        for stream in streams:
            await stream.until(40)
        await running.set_replicas("a", "b")
        for stream in streams:
            await until_in_loop(lambda stream=stream: running.serving(stream.generation) is not a, "it moves")
        a.engine.check_health()
        a.go_on()
        assert [await stream.task for stream in streams] == expected
        assert all(stream.generation.num_migrations for stream in streams)
        await until_in_loop(lambda: not a.num_requests, "what it ran is aborted")


async def test_neighbours_copy_the_hottest_prompts_of_a_replica_that_leaves_and_new_ones_those_of_all(
    qwen3: str,
) -> None:
    prompts = [prompt_of(150, seed) for seed in range(3)]
    async with cluster(qwen3, "abc", **OPTIONS) as running:
        a, b, c = running.replicas.values()
        await running.set_replicas("a")
        for _ in range(2):  # all are asked twice
            for prompt in prompts:
                await Stream(running.generation(prompt, SHORT)).task
        expected = Stream(running.generation(prompts[0], LONG))
        await expected.task
        await running.set_replicas("a", "b")
        await until_in_loop(lambda: b.count("kv_copied_tokens", "warm_up") == 3 * 148, "the new one has all")
        await running.set_replicas("a", "b", "c")
        await until_in_loop(lambda: c.count("kv_copied_tokens", "warm_up") == 3 * 148, "so has the third")
        await running.set_replicas("a")
        await Stream(running.generation(prompt_of(100, 9), SHORT)).task
        await running.set_replicas("a", "c")
        await running.set_replicas("c")
        await until_in_loop(lambda: c.count("kv_copied_tokens", "drain") == 100, "it has what only the old one had")
        await a.kill()
        again = Stream(running.generation(prompts[0], LONG))
        assert await again.task == expected.generation.token_ids
        assert c.count("prefix_cache_hit_tokens") == 148
