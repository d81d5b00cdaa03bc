"""Shadow engines with a disk cache, or with a shared one, whose threads are real."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from engine.kv.tiers.disk.disk_tier import DiskTier
from engine.kv.tiers.disk.slot_file import SlotFile
from engine.kv.tiers.shared.object_store import ObjectStore
from engine.kv.tiers.shared.shared_tier import SharedTier
from engine.kv.tiers.storage_tier import StorageTier
from engine.kv.tiers.tiers import Tiers
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.engine.shadow import ShadowRunner, check_integrity, make_engine, run_to_end

__all__ = [
    "PROMPT",
    "SIZE",
    "Gate",
    "answer",
    "disk_of",
    "make",
    "settle",
    "shared_of",
    "storage_of",
    "storage_options",
    "tiers_of",
]

SIZE = 4
PROMPT = [token % 60 for token in range(3, 3 + 10 * SIZE + 2)]  # ten blocks and a bit


def storage_options(storage: str, directory: Path | str) -> dict[str, Any]:
    """Return the options of a disk cache of 64 slots, or of a shared cache."""
    if storage == "disk":
        return {"disk_cache_path": str(directory), "disk_cache_gib": 64 * 4096 / 2**30}
    return {"shared_cache_path": str(directory)}


def make(
    directory: Path | str, runner: ShadowRunner | None = None, storage: str = "disk", **options: Any
) -> tuple[Engine, ShadowRunner]:
    """Return an engine with a storage, which it has looked at, and the prefixes of an earlier engine's ``runner``."""
    defaults = {"num_blocks": 40, "num_host_blocks": 32, "block_size": SIZE} | storage_options(storage, directory)
    engine, made = make_engine(**(defaults | options))
    if runner is not None:
        made.ids = runner.ids
    while storage == "shared" and not shared_of(engine).is_on:
        tiers_of(engine).inbox.wait()
    return engine, made


def tiers_of(engine: Engine) -> Tiers:
    assert engine.tiers is not None
    return engine.tiers


def disk_of(engine: Engine) -> DiskTier:
    disk = tiers_of(engine).disk
    assert disk is not None
    return disk


def shared_of(engine: Engine) -> SharedTier:
    shared = tiers_of(engine).shared
    assert shared is not None
    return shared


def storage_of(engine: Engine) -> StorageTier[Any]:
    """Return the one storage of an engine."""
    (storage,) = tiers_of(engine)._storage
    return storage


def settle(engine: Engine) -> None:
    """Let the engine write what it has to write."""
    tiers = tiers_of(engine)
    while tiers.is_saving:
        tiers.inbox.wait(0.01)
        if engine.can_step:
            engine.step()
    tiers.inbox.run()
    check_integrity(engine)
    for storage in tiers._storage:
        storage.check_integrity()


def answer(
    engine: Engine, runner: ShadowRunner, prompt: list[int] = PROMPT, name: str = "request", max_tokens: int = 3
) -> int:
    """Answer a prompt, check the answer, and return how many of its tokens were cached."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    group = engine.add_request(EngineRequest(name, prompt, params))
    tokens = run_to_end(engine)[name]
    assert tokens == runner.answer(prompt, max_tokens)
    settle(engine)
    assert all(not pool.pinned for pool in tiers_of(engine).pages.pools)
    return group.sequences[0].num_cached_tokens


class Gate:
    """Lets no read or write of a storage end before it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch, method: str = "read") -> None:
        self.is_open = threading.Event()
        self.num_calls = 0
        for storage in (SlotFile, ObjectStore):
            self._hold(patch, storage, method)

    def _hold(self, patch: pytest.MonkeyPatch, storage: type[Any], method: str) -> None:
        call = getattr(storage, method)

        def wait(self_: Any, *args: Any) -> Any:
            self.num_calls += 1
            assert self.is_open.wait(60)
            return call(self_, *args)

        patch.setattr(storage, method, wait)
