"""Engines on CPUs run after the ingress, and only they."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from deployments.launcher.environment import SETTINGS
from deployments.serve.cpu_priority import NICENESS, in_yielding_thread
from engine.config import EngineConfig


def _niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def _niceness_of_threads(config: EngineConfig) -> int:
    """Return the niceness of the engine's threads; this thread, which takes requests, keeps its own."""
    seen = list[int]()

    def start() -> str:
        later = threading.Thread(target=lambda: seen.append(_niceness()))  # as the engine's step thread is
        later.start()
        later.join()
        return "started"

    before = _niceness()
    assert in_yielding_thread(config, start) == "started"
    assert _niceness() == before
    return seen[0]


@pytest.mark.parametrize(
    ("device", "has_gpu", "is_nicer"),
    [("cpu", True, True), ("auto", False, True), ("auto", True, False), ("cuda", True, False)],
)
def test_engines_on_cpus_yield(monkeypatch: pytest.MonkeyPatch, device: str, has_gpu: bool, is_nicer: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    config = EngineConfig(model="demo/model", device=device)
    own = _niceness()  # the tests may run under nice, and the kernel's maximum is 19
    assert _niceness_of_threads(config) == (min(19, own + NICENESS) if is_nicer else own)


def test_the_launcher_leaves_room_for_the_engines_niceness() -> None:
    assert int(SETTINGS["RAY_worker_niceness"]) + NICENESS <= 19, "the kernel cuts it"
