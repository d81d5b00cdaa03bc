"""Tensor-parallel ranks share host pages, which a disk and other engines read and write as a whole."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kv.page_memory import PageMemory
from engine.kv.shared_host import host_shares
from engine.kv.tiers.page_format import PageFormat, PageKind
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from engine.worker.model_worker import ModelWorker
from engine.worker.worker_pool import WorkerPool
from tests.engine.checkpoints import build_model, save_checkpoint
from tests.engine.oracle import answers, make_llm, random_tokens, run
from tests.engine.worker.test_tensor_parallel import ThreadRanks

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}


@pytest.fixture
def rank_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.worker.worker_pool.RemoteRanks", ThreadRanks)


def make(path: str, disk: Path | None, **options: Any) -> LLM:
    tiers: dict[str, Any] = {} if disk is None else {"disk_cache_path": str(disk), "disk_cache_gib": 0.02}
    fixed = {"tensor_parallel_size": 2, "block_size": 4, "num_blocks": 200, "swap_space_gib": 0.01}
    return make_llm(path, **fixed | tiers | options)


def workers_of(llm: LLM) -> list[ModelWorker]:
    pool: WorkerPool = llm.engine.runner.workers  # type: ignore[attr-defined]
    assert isinstance(pool._ranks, ThreadRanks)
    return [pool.local, *pool._ranks.workers]


def cached_bits(llm: LLM, prompt: list[int], num_blocks: int) -> list[torch.Tensor]:
    """Return the bits that each rank has cached of a text's first blocks, in the layers that attend to everything."""
    engine = llm.engine
    assert engine.tiers is not None
    match = engine.block_manager.prefix_cache.match(engine.tiers.chain(prompt, ""))
    blocks = [match.block_id(index) for index in range(num_blocks)]
    assert -1 not in blocks
    parts = [part for worker in workers_of(llm) for part in worker.kv_cache.blocks.parts]
    return [part[blocks].contiguous().view(torch.uint8).clone() for part in parts]


def check_restart(family: str, directory: Path, bits_of: Callable[..., list[torch.Tensor]] | None) -> None:
    path, prompt = (
        save_checkpoint(build_model(family, **HEADS), directory / "model"),
        random_tokens(random.Random(7), 90),
    )
    alone, first = make(path, None), make(path, directory / "disk")
    expected = answers(run(alone, [prompt], GREEDY))
    assert answers(run(first, [prompt], GREEDY)) == expected
    bits = bits_of(first, prompt, 20) if bits_of else []
    alone.engine.close()
    first.engine.close()
    second = make(path, directory / "disk")
    assert second.engine.tiers is not None
    assert second.engine.tiers.disk is not None
    assert second.engine.tiers.disk.num_blocks >= 22
    outputs = run(second, [prompt], GREEDY)
    assert answers(outputs) == expected
    assert outputs[0].num_cached_tokens >= 84
    if bits_of:
        fetched = bits_of(second, prompt, 20)
        assert len(fetched) == len(bits) > 0
        assert all(map(torch.equal, fetched, bits))
        assert not torch.equal(bits[0], bits[len(bits) // 2]), "the ranks have other heads"
    second.engine.close()
    one = make(path, directory / "disk", tensor_parallel_size=1)
    assert run(one, [prompt], GREEDY)[0].num_cached_tokens == 0, "one rank rounds other sums, so its KV differs"
    one.engine.close()


@pytest.mark.usefixtures("rank_threads")
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_a_restart_gives_every_rank_its_part_of_a_page(family: str, tmp_path: Path) -> None:
    check_restart(family, tmp_path, cached_bits if family == "qwen3" else None)


def test_ranks_in_processes_share_the_host_pool(tmp_path: Path) -> None:
    check_restart("qwen3", tmp_path, None)


@pytest.mark.usefixtures("rank_threads")
def test_a_prefix_that_the_device_has_evicted_comes_back_on_every_rank(tmp_path: Path) -> None:
    path = save_checkpoint(build_model("qwen3", **HEADS), tmp_path / "model")
    texts = [random_tokens(random.Random(seed), 60) for seed in range(6)]
    alone, llm = make(path, None), make(path, tmp_path / "disk", num_blocks=40)
    expected = [answers(run(alone, [text], GREEDY)) for text in texts]
    for _ in range(2):
        outputs = [run(llm, [text], GREEDY) for text in texts]
        assert [answers(output) for output in outputs] == expected
    assert all(output[0].num_cached_tokens >= 56 for output in outputs)
    alone.engine.close()
    llm.engine.close()


@pytest.mark.usefixtures("rank_threads")
def test_a_step_that_only_copies_ends_when_all_ranks_have_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_checkpoint(build_model("qwen3", **HEADS), tmp_path / "model")
    llm = make(path, tmp_path / "disk")
    calls = list[int]()
    copy = ModelWorker.copy_pages

    def recorded(worker: ModelWorker, *args: Any) -> None:
        copy(worker, *args)
        calls.append(worker.rank)

    monkeypatch.setattr(ModelWorker, "copy_pages", recorded)
    run(llm, [random_tokens(random.Random(7), 90)], GREEDY)
    tiers = llm.engine.tiers
    assert tiers is not None
    while tiers.is_saving:
        if tiers.needs_step:
            before = len(calls)
            llm.engine.step()
            assert sorted(calls[before:]) == [0, 1]
        else:
            tiers.inbox.wait(0.01)
    assert calls
    llm.engine.close()


def test_each_rank_copies_to_its_part_of_a_page() -> None:
    shape, options = (4, 2, 8), {"num_pages": 6, "dtype": torch.float32, "device": torch.device("cpu")}
    with host_shares(1, 2) as (share,):
        ranks = [
            PageMemory("KV block", [shape] * 3, num_host_pages=5, rank=rank, share=share, **options)  # type: ignore[arg-type]
            for rank in range(2)
        ]
    for rank, memory in enumerate(ranks):
        for number, part in enumerate(memory.parts):
            part[1] = 10 * rank + number
        memory.swap_out([(1, 3)])
    size = ranks[0].bytes_per_page
    assert ranks[0].host_page_bytes == 2 * size
    for memory in ranks:
        page = torch.frombuffer(memory.host_bytes, dtype=torch.float32)[3 * 2 * size // 4 : 4 * 2 * size // 4]
        assert page.view(6, -1).unique(dim=1).flatten().tolist() == [0, 1, 2, 10, 11, 12]
    for rank, memory in enumerate(ranks):
        memory.swap_in([(3, 5)])
        assert all(torch.equal(part[5], part[1]) for part in memory.parts), rank


def test_ranks_are_part_of_the_format() -> None:
    formats = [PageFormat(b"m", 4, (PageKind("blocks", 64),), num_ranks) for num_ranks in (1, 2, 4)]
    assert len({page_format.digest for page_format in formats}) == 3
