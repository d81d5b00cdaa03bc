"""With the C kernels, models with states give the same bytes alone, batched, chunked, preempted, swapped and migrated.

The settings are those of models without states. test_same_bytes.py beside this folder tries a few in `make test`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kernels.cpu.library import library
from tests.engine.models.decoder.saved_models import Saved
from tests.engine.models.decoder.test_same_bytes import NUM_PROMPTS, SETTINGS, LogitsRecorder, check

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

# Slots for the snapshots of all prompts, on the device where every prompt is found in the cache again, or on the host.
MORE_SLOTS: dict[str, dict[str, Any]] = {
    "warm": {"state_snapshots": 24, "kv_cache_memory": "512MiB"},
    "chunks of 17": {"state_snapshot_interval": 1},  # one after each block
    "evicted to the host": {"swap_space_gib": 0.5},
}
FEW_SETTINGS = ("chunks of 17", "all at once, shared", "migrated, warm")
KINDS = ("float32", "bfloat16")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> LogitsRecorder:
    for setting, options in MORE_SLOTS.items():
        monkeypatch.setitem(SETTINGS, setting, SETTINGS[setting] | options)
    return LogitsRecorder(monkeypatch)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param("qwen3-next", "bfloat16", marks=pytest.mark.long),
        pytest.param("qwen3-next", "float32", marks=pytest.mark.exhaustive("bfloat16 rounds more, and CI has it")),
        *(
            pytest.param(name, kind, marks=pytest.mark.exhaustive("forty answers of further families"))
            for kind in KINDS
            for name in (
                "lfm2-moe",
                "olmo-hybrid",
                "kimi-linear",
                "granite-4-h-moe",
                "falcon-h1-norm",
                "nemotron-3-nano",
                "nemotron-3-super",
            )
        ),
    ],
)
def test_forty_answers(
    recorder: LogitsRecorder, saved: Callable[[str], Saved], name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    preempting = ("preempted", "preempted, cached", "swapped")
    settings = (*FEW_SETTINGS, "blocks of 1", *preempting, "evicted to the host", "warm")
    for setting in preempting:
        monkeypatch.setitem(SETTINGS, setting, SETTINGS[setting] | {"num_blocks": 330})  # for few answers
    check(recorder, saved(name).path, kind, settings, 40)


@pytest.mark.exhaustive("more prompts, in every setting")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["lfm2", "qwen3.5", "mamba2", "nemotron-h"])
def test_two_hundred_answers_in_every_setting(
    recorder: LogitsRecorder, saved: Callable[[str], Saved], name: str, kind: str
) -> None:
    check(recorder, saved(name).path, kind, list(SETTINGS), NUM_PROMPTS)
