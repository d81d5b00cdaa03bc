"""Swaps of pages between a simulated GPU and the host: which bytes move, in how many launches and copies."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.kv.host import page_staging
from engine.kv.page_memory import PageMemory
from tests.gpu_rehearsal.kernel_contracts import plain
from tests.gpu_rehearsal.rehearsal import Rehearsal

NUM_PAGES, NUM_HOST_PAGES = 12, 20
SHAPES = [(16, 2, 8), (16, 2, 8), (5,), (16, 2, 8)]  # of parts, in two tensors


def new_memory(**options: Any) -> PageMemory:
    """Return pages with random bits."""
    defaults: dict[str, Any] = {"num_pages": NUM_PAGES, "dtype": torch.float32, "num_host_pages": NUM_HOST_PAGES}
    memory = PageMemory("KV block", SHAPES, device=torch.device("cuda:0"), **(defaults | options))
    for part in memory.parts:
        plain(part).copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(1)))
    return memory


def contents(memory: PageMemory) -> list[torch.Tensor]:
    return [plain(part).clone() for part in memory.parts]


def shuffled(count: int, number: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(count), number)


@pytest.fixture(params=[1, 3, 100], ids="{} pages of staging".format)
def batch_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many pages the staging memory holds, if there are as many on the host."""
    bytes_per_page = 4 * sum(torch.Size(shape).numel() for shape in SHAPES)
    monkeypatch.setattr(page_staging, "_BYTES", request.param * bytes_per_page)
    return int(request.param)


def test_what_is_swapped_out_comes_back(batch_size: int, gpu: Rehearsal) -> None:
    memory = new_memory()
    before = contents(memory)
    pages, host_pages = list(range(NUM_PAGES)), shuffled(NUM_HOST_PAGES, NUM_PAGES, seed=2)
    back = shuffled(NUM_PAGES, NUM_PAGES, seed=3)
    with gpu.machine.step():
        memory.swap_out(list(zip(pages, host_pages, strict=True)))
        for part in memory.parts:
            part.fill_(7.0)  # a later step may write there at once
        memory.swap_in(list(zip(host_pages, back, strict=True)))
    gpu.machine.check()  # the host has not waited
    for part, old in zip(contents(memory), before, strict=True):
        assert torch.equal(part[back], old[pages])


def test_neighbours_move_in_one_copy(gpu: Rehearsal) -> None:
    """A batch of pages takes a launch for each shape of parts, the copy of its ids, and one for each run."""
    memory = new_memory()

    def launches(method: str, pairs: list[tuple[int, int]]) -> int:
        before = gpu.machine.num_launches
        getattr(memory, method)(pairs)
        return gpu.machine.num_launches - before

    pages = shuffled(NUM_PAGES, 8, seed=4)
    for host_pages, num_runs in ((range(5, 13), 1), ([0, 1, 2, 9, 10, 4, 5, 6], 3), ([7, 5, 3, 1, 9, 11, 13, 15], 8)):
        assert launches("swap_out", list(zip(pages, host_pages, strict=True))) == 1 + 2 + num_runs
        assert launches("swap_in", list(zip(host_pages, pages, strict=True))) == 1 + 2 + num_runs


def test_a_rank_writes_its_own_part_of_a_shared_host_page(gpu: Rehearsal) -> None:
    """Pages of the two ranks alternate, so each is a copy of its own."""
    whole: list[torch.Tensor] = []

    def map_pool(num_host_pages: int, bytes_per_page: int) -> torch.Tensor:
        whole.append(torch.zeros(num_host_pages, 2 * bytes_per_page, dtype=torch.uint8))
        return whole[0]

    memory = new_memory(rank=1, share=SimpleNamespace(map=map_pool))
    before = contents(memory)
    with gpu.machine.step():
        memory.swap_out([(page, page + 1) for page in range(NUM_PAGES)])
        memory.swap_in([(page + 1, NUM_PAGES - 1 - page) for page in range(NUM_PAGES)])
        torch.cuda.synchronize()
    gpu.machine.check()
    assert not whole[0][:, : memory.bytes_per_page].any()
    assert whole[0][1 : NUM_PAGES + 1, memory.bytes_per_page :].any(dim=1).all()
    for part, old in zip(contents(memory), before, strict=True):
        assert torch.equal(part, old.flip(0))


def test_no_swap_compiles_a_kernel(gpu: Rehearsal) -> None:
    memory = new_memory()
    gpu.launches.is_serving = True
    with gpu.machine.step():
        for count in (1, 2, 3, 12):
            memory.swap_out([(page, page) for page in range(count)])
            memory.swap_in([(page, page) for page in range(count)])
    gpu.machine.check()


def test_a_pool_without_pages_on_the_host_has_no_staging_memory(gpu: Rehearsal) -> None:
    assert new_memory(num_host_pages=0)._staging is None
    assert not gpu.launches.counts
