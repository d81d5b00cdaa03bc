"""Whatever happens to a transfer between two engines, the answer is the one of an undisturbed engine."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from deployments.transport.pages import client as client_module
from engine.kv.tiers import fetching
from engine.request import KVSource
from engine.sampling_params import SamplingParams
from tests.deployments.transport.pages.nodes import GREEDY, Node, nodes, prompt_of, save
from tests.deployments.transport.pages.proxy import proxy
from tests.waiting import HANG_S, until_in_loop

SEEDED = SamplingParams(temperature=1.0, seed=5, max_tokens=6)
PROMPT = prompt_of(90)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests wait for pages however busy the machine is."""
    monkeypatch.setattr(fetching, "LEAST_WAIT_S", HANG_S)
    monkeypatch.setattr(fetching, "DEFAULT_WAIT_S", HANG_S)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save("qwen3", tmp_path_factory.mktemp("qwen3"))


async def is_unharmed(source: Node, target: Node) -> bool:
    """Whether no page stays pinned, and other prompts are answered."""
    await until_in_loop(lambda: source.is_clean() and target.is_clean(), "every page is free")
    other = prompt_of(30, seed=9)
    return await target.answer(other) == await source.answer(other)


async def test_a_source_that_has_evicted_the_prompt(qwen3: str) -> None:
    async with nodes(qwen3, 2, {"num_blocks": 40, "swap_space_gib": 0.00005}) as (source, target):
        expected = await source.answer(PROMPT)
        assert source.inner.info.num_host_blocks < 20
        for seed in range(20, 24):
            await source.answer(prompt_of(120, seed))
        assert await target.answer(PROMPT, GREEDY, source.source(88)) == expected
        assert target.failures == {("peer", "gone"): 1}
        assert target.num_fetched < 88
        assert await is_unharmed(source, target)


async def test_a_target_with_little_host_memory_takes_what_fits(qwen3: str) -> None:
    async with nodes(qwen3, 2, {}, {"swap_space_gib": 0.00005}) as (source, target):
        expected = await source.answer(PROMPT)
        assert await target.answer(PROMPT, GREEDY, source.source(88)) == expected
        assert 0 < target.num_fetched < 88
        assert await is_unharmed(source, target)


async def test_a_flipped_bit_is_computed_again(qwen3: str) -> None:
    async with nodes(qwen3, 2) as (source, target):
        expected = await source.answer(PROMPT, SEEDED)

        def flip(start: int, data: bytes) -> bytes:
            changed = bytearray(data)
            if start <= 50_000 < start + len(data):
                changed[50_000 - start] ^= 1
            return bytes(changed)

        named = source.source(88)
        with proxy(named.endpoint, flip) as endpoint:
            assert await target.answer(PROMPT, SEEDED, replace(named, endpoint=endpoint)) == expected
        assert target.failures == {("peer", "checksum"): 1}
        assert 0 < target.num_fetched < 88
        assert await is_unharmed(source, target)


@pytest.mark.parametrize("name", ["model", "dtype", "block_size"])
async def test_other_pages_are_refused(name: str, qwen3: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save("llama", tmp_path) if name == "model" else qwen3
    options = {"dtype": {"dtype": "bfloat16"}, "block_size": {"block_size": 8}}.get(name, {})
    async with nodes(qwen3, 2) as (source, alone):
        target = Node(path, **options)
        expected = await target.answer(prompt_of(30, 9), GREEDY)
        await source.answer(PROMPT)
        mine = await target.answer(PROMPT, GREEDY, source.source(88))
        assert target.failures == {("peer", "refused"): 1}
        assert target.num_fetched == 0
        assert f"{name} is" in caplog.text
        assert source.count("kv_peer_rejections", "refused") == 1
        await target.answer(PROMPT[1:], GREEDY, source.source(88))
        assert target.failures == {("peer", "refused"): 1}  # it is not asked again
        target.inner.reset_prefix_cache()
        assert await target.answer(PROMPT, GREEDY) == mine
        assert await target.answer(prompt_of(30, 9), GREEDY) == expected
        await target.close()
        assert await is_unharmed(source, alone)


async def test_an_aborted_request_ends_its_transfer(qwen3: str) -> None:
    async with nodes(qwen3, 2) as (source, target):
        expected = await source.answer(PROMPT)
        held: list[object] = []
        lend, source.transfer._server._lender.lend = (
            source.transfer._server._lender.lend,
            (  # type: ignore[method-assign]
                lambda *args, **kwargs: held.append((args, kwargs))
            ),
        )
        waiting = asyncio.create_task(target.answer(PROMPT, GREEDY, source.source(88)))
        await until_in_loop(lambda: bool(held), "the source is asked")
        waiting.cancel()
        await asyncio.wait([waiting])
        args, kwargs = held[0]  # type: ignore[misc]
        lend(*args, **kwargs)
        source.transfer._server._lender.lend = lend  # type: ignore[method-assign]
        assert await is_unharmed(source, target)
        assert await target.answer(PROMPT, GREEDY, source.source(88)) == expected


async def test_a_source_that_shuts_down_ends_what_it_has_begun(qwen3: str) -> None:
    async with nodes(qwen3, 2) as (source, target):
        expected = await source.answer(PROMPT)
        held: list[object] = []
        post, source.tiers.inbox.post = source.tiers.inbox.post, held.append  # type: ignore[method-assign, assignment]
        waiting = asyncio.create_task(target.answer(PROMPT, GREEDY, source.source(88)))
        await until_in_loop(lambda: bool(held), "the source is asked")
        draining = asyncio.create_task(asyncio.to_thread(source.transfer.drain, 0.0, HANG_S))
        await asyncio.sleep(0.01)
        source.tiers.inbox.post = post  # type: ignore[method-assign]
        for call in held:
            post(call)  # type: ignore[arg-type]
        assert await waiting == expected
        await draining
        assert not source.transfer._server.is_sending
        assert target.num_fetched == 88


async def test_a_reset_of_the_source_ends_its_leases(qwen3: str) -> None:
    async with nodes(qwen3, 2) as (source, target):
        expected = await source.answer(PROMPT)
        source.engine.call_in_step_thread(source.inner.reset_prefix_cache)
        assert await target.answer(PROMPT, GREEDY, source.source(88)) == expected
        assert target.failures == {("peer", "gone"): 1}
        assert await is_unharmed(source, target)


async def test_a_reset_of_the_target_drops_what_comes(qwen3: str) -> None:
    """The weights may have changed: what comes is of the old ones."""
    async with nodes(qwen3, 2) as (source, target):
        expected = await source.answer(PROMPT)
        arrived = target.tiers.arrivals.publish

        def reset_first(arrival: object) -> int:
            target.inner.reset_prefix_cache()
            return arrived(arrival)  # type: ignore[arg-type]

        target.tiers.arrivals.publish = reset_first  # type: ignore[method-assign, assignment]
        assert await target.answer(PROMPT, GREEDY, source.source(88)) == expected
        assert target.count("prefix_cache_hit_tokens") == 0
        assert await is_unharmed(source, target)


CHILD = """
import asyncio, sys
from tests.deployments.transport.pages.nodes import GREEDY, Node, prompt_of

async def main():
    node = Node(sys.argv[1])
    tokens = await node.answer(prompt_of(90))
    lender = node.transfer._server._lender
    lend, is_first = lender.lend, True
    node.tiers.departures._max_blocks = 8  # several leases

    def second_never(*args, **kwargs):
        if args[1]:
            print("stuck", flush=True)
        else:
            lend(*args, **kwargs)

    lender.lend = second_never
    address = node.transfer.address
    print(address.endpoint, address.secret, *tokens, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@contextmanager
def source_process(path: str) -> Iterator[tuple[subprocess.Popen[str], KVSource, list[int]]]:
    """An engine in another process that sends the first eight blocks, prints a line, and then sends nothing."""
    command = [sys.executable, "-c", CHILD, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as process:
        try:
            assert process.stdout is not None
            while len(words := process.stdout.readline().split()) < 3:
                assert process.poll() is None
            yield process, KVSource(words[0], words[1], 88), list(map(int, words[2:]))
        finally:
            process.kill()


@pytest.mark.long
@pytest.mark.parametrize(("number", "error"), [(signal.SIGKILL, "io"), (signal.SIGSTOP, "late")])
async def test_a_source_process_that_dies_or_stops(number: signal.Signals, error: str, qwen3: str) -> None:
    node = Node(qwen3)
    with source_process(qwen3) as (process, source, expected):
        answer = asyncio.create_task(node.answer(PROMPT, GREEDY, source))
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "stuck\n"
        await until_in_loop(
            lambda: [a.num_done for a in node.tiers.arrivals._reserved] == [8], "what was sent has come"
        )
        process.send_signal(number)
        assert await answer == expected
        assert node.failures == {("peer", error): 1}
        assert node.num_fetched == 32
        assert node.is_clean()
    await node.close()


async def test_random_pulls_among_small_engines(qwen3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared prefixes, small pools, sources that have less than said, aborts and resets: every answer is right."""
    monkeypatch.setattr(client_module, "FLOOR_S", HANG_S)
    rng = random.Random(3)
    stems = [prompt_of(60, seed) for seed in range(5)]
    prompts = [stem[: rng.randrange(20, 60)] + prompt_of(rng.randrange(1, 40), rng.randrange(6)) for stem in stems * 4]
    small = {"num_blocks": 64, "swap_space_gib": 0.0002}
    async with nodes(qwen3, 4, {"num_blocks": 400}, small, small, small) as (alone, *others):
        expected = [await alone.answer(prompt, SEEDED) for prompt in prompts]
        running: set[asyncio.Task[None]] = set()

        async def ask(index: int) -> None:
            target, source = rng.sample(others, 2)
            named = source.source(rng.randrange(len(prompts[index]) + 8))
            tokens = await target.answer(prompts[index], SEEDED, named)
            assert tokens == expected[index]

        for number in range(150):
            task = asyncio.create_task(ask(rng.randrange(len(prompts))))
            running.add(task)
            if number % 20 == 7:
                await asyncio.sleep(0.005)
                task.cancel()
            if number % 50 == 33:
                node = rng.choice(others)
                node.engine.call_in_step_thread(node.inner.reset_prefix_cache)
            if len(running) > 5:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    assert task.cancelled() or task.exception() is None, task.exception()
        for result in await asyncio.gather(*running, return_exceptions=True):
            assert result is None or isinstance(result, asyncio.CancelledError), result
        assert sum(node.num_fetched for node in others) > 300
        await until_in_loop(lambda: all(node.is_clean() for node in others), "every page is free")
        for node in others:
            errors = {reason for _, reason in node.failures}
            assert errors <= {"gone", "cancelled", "late", "full"}
