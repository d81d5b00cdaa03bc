"""Blocks have their memory before they are used, a bounded number of them, and what they hold stays."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from engine import prefaulter as prefaulter_module
from engine.kv_cache import KVCache
from engine.prefaulter import Prefaulter
from kernels.cpu.memory import huge_zeros
from tests.kernels.cpu.test_memory import num_resident_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is given beforehand on Linux only")

ROOT = Path(__file__).parents[2]
BLOCK = 64 * 2**10
HUGE_BLOCKS = 2 * 2**20 // BLOCK  # what a huge page gives beyond what was asked for


@pytest.fixture
def parts() -> list[torch.Tensor]:
    return [huge_zeros((1000, BLOCK), torch.uint8) for _ in range(2)]


def num_resident_blocks(part: torch.Tensor) -> int:
    return num_resident_bytes(part) // BLOCK


def test_blocks_ahead_are_ready_and_no_more(parts: list[torch.Tensor]) -> None:
    prefaulter = Prefaulter(parts, num_ahead=100)
    prefaulter.use(0)
    prefaulter.wait()
    for part in parts:
        assert 101 <= num_resident_blocks(part) <= 101 + HUGE_BLOCKS


def test_it_goes_on_with_every_few_blocks(parts: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    prefaulter = Prefaulter(parts, num_ahead=100)
    prefaulter.use(0)
    prefaulter.wait()
    monkeypatch.setattr(prefaulter_module, "populate", lambda part: pytest.fail("two blocks are not worth a thread"))
    prefaulter.use(2)
    prefaulter.wait()
    monkeypatch.undo()
    prefaulter.use(60)
    prefaulter.wait()
    prefaulter.use(30)  # handed out again
    prefaulter.wait()
    for part in parts:
        assert 161 <= num_resident_blocks(part) <= 161 + HUGE_BLOCKS


def test_it_ends_with_the_pool(parts: list[torch.Tensor]) -> None:
    prefaulter = Prefaulter(parts, num_ahead=100)
    for block_id in (950, 3, 999, 0):
        prefaulter.use(block_id)
        prefaulter.wait()
    for part in parts:
        assert num_resident_blocks(part) == 1000


def test_what_is_written_meanwhile_stays(parts: list[torch.Tensor]) -> None:
    prefaulter = Prefaulter(parts, num_ahead=1000)
    prefaulter.use(0)
    for block_id in range(1000):
        for part in parts:
            part[block_id] = block_id % 251
    prefaulter.wait()
    expected = (torch.arange(1000) % 251).to(torch.uint8)[:, None]
    for part in parts:
        assert bool((part == expected).all())


def test_a_system_that_cannot_is_asked_once(parts: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.Tensor] = []
    monkeypatch.setattr(prefaulter_module, "populate", lambda part: bool(asked.append(part)))
    prefaulter = Prefaulter(parts, num_ahead=10)
    for block_id in range(0, 1000, 7):
        prefaulter.use(block_id)
        prefaulter.wait()
    assert len(asked) == 1


def test_a_program_that_ends_does_not_wait_for_all_of_it() -> None:
    program = """
import torch
from engine.prefaulter import Prefaulter
from kernels.cpu.memory import huge_zeros
Prefaulter([huge_zeros((100_000, 2**16), torch.uint8)], num_ahead=100_000).use(0)
"""
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - started < 30  # 6.5 GB, which may take longer by themselves


def test_a_cache_is_ready_for_the_first_step_and_for_what_is_expected() -> None:
    cache = KVCache(
        num_layers=2, num_blocks=1000, block_size=16, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16,
        device=torch.device("cpu"), num_blocks_ahead=64,
    )  # fmt: skip
    assert cache._prefaulter is not None
    cache._prefaulter.wait()
    keys, values = cache.layers[1]
    for part in (keys, values):
        assert num_resident_bytes(part[:65]) >= part[:65].numel() * 2
    cache.expect(500)
    cache._prefaulter.wait()
    assert num_resident_bytes(values[:565]) >= values[:565].numel() * 2


def test_a_cache_takes_nothing_beforehand_unless_asked() -> None:
    cache = KVCache(
        num_layers=1, num_blocks=1000, block_size=16, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )  # fmt: skip
    cache.expect(999)
    assert num_resident_bytes(cache.layers[0][0]) == 0
