"""Engines on CPUs run after the ingress, and only they."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from deployments.cpu_priority import NICENESS, yield_cores
from engine.config import EngineConfig


def _niceness_after(config: EngineConfig) -> int:
    """Return by how much the niceness of a thread and of those that it starts grows; this thread's stays."""
    seen = list[int]()

    def started_later() -> None:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    def thread() -> None:
        yield_cores(config)
        later = threading.Thread(target=started_later)
        later.start()
        later.join()

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    one = threading.Thread(target=thread)
    one.start()
    one.join()
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
    return seen[0] - before


@pytest.mark.parametrize(
    ("device", "has_gpu", "is_nicer"),
    [("cpu", True, True), ("auto", False, True), ("auto", True, False), ("cuda", True, False)],
)
def test_engines_on_cpus_yield(monkeypatch: pytest.MonkeyPatch, device: str, has_gpu: bool, is_nicer: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    config = EngineConfig(model="demo/model", device=device)
    assert _niceness_after(config) == (NICENESS if is_nicer else 0)
