"""Engines whose two ranks run on different nodes: a rank is killed, and a node is lost, under load."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engine.llm import LLM
from engine.sampling_params import SamplingParams
from tests.e2e.cluster import SETTINGS
from tests.e2e.load import TOKENS, Clients, Recorded, questions, record
from tests.e2e.running_cluster import RunningCluster, engines_by_node, num_migrations, running_cluster
from tests.e2e.server import ROOT
from tests.waiting import HANG_S, until

_PLAIN = ("temperature", "max_tokens", "ignore_eos", "stream", "return_token_ids", "prompt")

pytestmark = [
    pytest.mark.exhaustive("a Ray cluster of four nodes with engines of two ranks"),
    pytest.mark.timeout(1200),
]


@pytest.fixture
def two_ranks() -> Iterator[RunningCluster]:
    with running_cluster("two ranks") as running:
        yield running


@pytest.fixture
def four_ranks() -> Iterator[RunningCluster]:
    with running_cluster("four ranks") as running:
        yield running


def _ranks(cluster: RunningCluster) -> set[int]:
    """Return the process ids of the ranks other than 0."""
    started = psutil.Process(cluster.process.pid).children(recursive=True)
    return {process.pid for process in started if "_Rank" in _title(process)}


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[:1])
    except psutil.Error:  # it has just ended
        return ""


def _wait_for_engines(dashboard: str, number: int) -> None:
    def are_complete() -> bool:
        return engines_by_node(dashboard).total() == number

    until(are_complete, "the engines run", hang_s=4 * HANG_S)


def _check_like_one_rank(asked: Recorded, model: Path) -> None:
    """Compare greedy answers with those of an engine of one rank."""
    plain = [
        (question.body["prompt"], answer.token_ids[0])
        for question, answer in asked
        if "prompt" in question.body
        and question.body.keys() <= {*_PLAIN, "prompt"}
        and not question.body["temperature"]
    ]
    assert len(plain) > 2
    llm = LLM(str(model), dtype="float32", device="cpu", kv_cache_memory="64MiB")
    outputs = llm.generate(
        [prompt for prompt, _ in plain],
        SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True),
        use_tqdm=False,
    )
    assert [output.outputs[0].token_ids for output in outputs] == [tokens for _, tokens in plain]


async def _ask(cluster: RunningCluster, engines: int, ranks: int) -> tuple[str, Recorded]:
    """Return where the dashboard is, and requests with answers that have been compared with those of one rank."""
    facts = await asyncio.to_thread(cluster.read_reply)
    await asyncio.to_thread(_wait_for_engines, facts["dashboard"], engines)
    assert len(_ranks(cluster)) == engines * (ranks - 1)
    asked = await record(cluster, questions(24))
    _check_like_one_rank(asked, ROOT / "demo" / "model")
    return facts["dashboard"], asked


async def test_four_ranks_on_two_nodes_answer_like_one(four_ranks: RunningCluster) -> None:
    setting = SETTINGS["four ranks"]
    _, asked = await _ask(four_ranks, setting.engines, setting.ranks)
    assert await record(four_ranks, [question for question, _ in asked]) == asked  # now from the prefix cache


async def test_streams_survive_the_loss_of_a_rank_and_of_a_node(two_ranks: RunningCluster) -> None:
    setting = SETTINGS["two ranks"]
    dashboard, asked = await _ask(two_ranks, setting.engines, setting.ranks)
    async with Clients(two_ranks, asked).running() as report:
        await report.until_completed(24)
        lost, *_ = _ranks(two_ranks)
        psutil.Process(lost).kill()
        await asyncio.to_thread(until, lambda: lost not in _ranks(two_ranks), "the rank is gone")
        await asyncio.to_thread(_wait_for_engines, dashboard, setting.engines)
        await report.until_completed(24)
        moved = await asyncio.to_thread(num_migrations, two_ranks.url)
        await asyncio.to_thread(two_ranks.remove_worker)
        await asyncio.to_thread(_wait_for_engines, dashboard, setting.engines)
        await report.until_completed(24)
    report.check()
    assert moved > 0
    until(lambda: len(_ranks(two_ranks)) == setting.engines, "no rank of an engine that has ended is left")
