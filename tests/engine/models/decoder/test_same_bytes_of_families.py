"""With the C kernels, every family gives the same bytes alone, batched, chunked, resumed, preempted, swapped, migrated.

The settings are those of test_same_bytes.py. Families whose layers cache other things than keys and values of one size
are in this sweep: states, latents, chosen latents, windows and chunks, heads of several sizes, shared keys and values.
`make test` runs one of each kind with few prompts, CI's long tests all of them, and `make test-all` 200 prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernels.cpu.library import library
from tests.engine.models.decoder.gemma.gemma_families import GEMMA_FAMILIES, save_gemma_model
from tests.engine.models.decoder.latent.latent_families import LATENT_FAMILIES, save_latent_model
from tests.engine.models.decoder.llama4.llama4_models import LLAMA4_MODELS, save_llama4_model
from tests.engine.models.decoder.recurrent.recurrent_families import RECURRENT_FAMILIES, save_recurrent_model
from tests.engine.models.decoder.test_same_bytes import (
    ALONE,
    NUM_PROMPTS,
    SETTINGS,
    SMALL_POOL,
    LogitsRecorder,
    check,
)

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

SAVE: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(RECURRENT_FAMILIES, save_recurrent_model),
    **dict.fromkeys(LATENT_FAMILIES, save_latent_model),
    **dict.fromkeys(GEMMA_FAMILIES, save_gemma_model),
    **dict.fromkeys(LLAMA4_MODELS, save_llama4_model),
}
FEW_BLOCKS = 310  # for few answers
KINDS = ("float32", "bfloat16")
QUICK = (
    "granite-4-h",
    "kimi-linear",
    "deepseek-v3.2",
    "llama-4-scout",
    "gemma-3n-e4b",
)  # others are in `make test` elsewhere
LONG = ("qwen3-next", "falcon-h1", "deepseek-v3", "gemma-4-e4b")  # one of each kind, in most settings
# Slots for the snapshots of all prompts, on the device where every prompt is found in the cache again, or on the host.
MORE_SLOTS: dict[str, dict[str, Any]] = {
    "warm": {"state_snapshots": 24, "kv_cache_memory": "512MiB"},
    "chunks of 17": {"state_snapshot_interval": 1},  # one after each block
    "evicted to the host": {"swap_space_gib": 0.5},
}
# Pages of windows for the ends of all prompts, where a hit needs them; their number follows that of sequences.
MORE_PAGES: dict[str, dict[str, Any]] = {
    "warm": {"max_num_seqs": NUM_PROMPTS, "kv_cache_memory": "512MiB"},
    "evicted to the host": {"swap_space_gib": 0.5},
}
FEW_SETTINGS = ("chunks of 17", "all at once, three threads", "migrated, warm")
PREEMPTING = ("preempted", "preempted, cached", "swapped")
MOST_SETTINGS = (
    *FEW_SETTINGS,
    "all at once, shared",
    "blocks of 1",
    "blocks of 48",
    "evicted to the host",
    *PREEMPTING,
)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> LogitsRecorder:
    return LogitsRecorder(monkeypatch)


def sweep(
    recorder: LogitsRecorder,
    name: str,
    kind: str,
    settings: tuple[str, ...],
    count: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compare the answers and logits of a family in these settings with those of every prompt computed alone."""
    if name in RECURRENT_FAMILIES and name != "granite-4":  # which has no recurrent layer
        for setting, options in MORE_SLOTS.items():
            monkeypatch.setitem(SETTINGS, setting, SETTINGS[setting] | options)
    if name in GEMMA_FAMILIES or name in LLAMA4_MODELS:
        for setting, options in MORE_PAGES.items():
            monkeypatch.setitem(SETTINGS, setting, SETTINGS[setting] | options)
    if count < NUM_PROMPTS:
        monkeypatch.setitem(SETTINGS, "alone", ALONE)
        for setting in SETTINGS:
            monkeypatch.setitem(SETTINGS, setting, SETTINGS[setting] | _small_pools(SETTINGS[setting]))
    _, path = SAVE[name](name, tmp_path)
    check(recorder, path, kind, settings, count)


def _small_pools(options: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of pools for few prompts, which the checks of each step visit."""
    small: dict[str, Any] = {} if "num_blocks" in options else {"kv_cache_memory": "6MiB"}
    if options.get("num_blocks") == SMALL_POOL["num_blocks"]:
        small["num_blocks"] = FEW_BLOCKS
    if "swap_space_gib" in options:
        small["swap_space_gib"] = 0.02
    return small


@pytest.mark.parametrize("name", QUICK)
def test_eight_answers(recorder: LogitsRecorder, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep(recorder, name, "bfloat16", FEW_SETTINGS, 8, tmp_path, monkeypatch)


def _marks(name: str, kind: str) -> pytest.MarkDecorator:
    if name in LONG and kind == "bfloat16":
        return pytest.mark.long
    return pytest.mark.exhaustive("the remaining families and dtypes, in most settings")


@pytest.mark.parametrize(
    ("name", "kind"), [pytest.param(name, kind, marks=_marks(name, kind)) for name in SAVE for kind in KINDS]
)
def test_twelve_answers(
    recorder: LogitsRecorder, name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep(recorder, name, kind, MOST_SETTINGS, 12, tmp_path, monkeypatch)


@pytest.mark.exhaustive("more prompts, in every setting")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SAVE)
def test_two_hundred_answers_in_every_setting(
    recorder: LogitsRecorder, name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep(recorder, name, kind, tuple(SETTINGS), NUM_PROMPTS, tmp_path, monkeypatch)
