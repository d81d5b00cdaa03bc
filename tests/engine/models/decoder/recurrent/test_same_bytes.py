"""With the C kernels, models with states give the same bytes alone, batched, chunked, preempted, resumed and migrated.

The settings are those of models without states, but for swapping: states are not swapped. test_same_bytes.py beside
this folder tries a few of them in `make test`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kernels.cpu.library import library
from tests.engine.models.decoder.recurrent.conftest import Saved
from tests.engine.models.decoder.test_same_bytes import NUM_PROMPTS, SETTINGS, LogitsRecorder, check

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

# "warm" finds every prompt in the cache again, but there are not as many slots for snapshots as prompts.
OF_STATES = [name for name in SETTINGS if name not in ("swapped", "evicted to the host", "warm")]
FEW_SETTINGS = ("chunks of 17", "all at once, shared", "migrated, warm")
KINDS = ("float32", "bfloat16")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> LogitsRecorder:
    return LogitsRecorder(monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("qwen3-next", marks=pytest.mark.long),
        *(
            pytest.param(name, marks=pytest.mark.exhaustive("forty answers of further families in every setting"))
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
    settings = (*FEW_SETTINGS, "blocks of 1", "preempted", "preempted, cached", "warm")
    for setting in ("preempted", "preempted, cached"):
        monkeypatch.setitem(SETTINGS, setting, SETTINGS[setting] | {"num_blocks": 330})  # for few answers
    check(recorder, saved(name).path, kind, settings, 40)


@pytest.mark.exhaustive("more prompts, in every setting")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["lfm2", "qwen3.5", "mamba2", "nemotron-h"])
def test_two_hundred_answers_in_every_setting(
    recorder: LogitsRecorder, saved: Callable[[str], Saved], name: str, kind: str
) -> None:
    check(recorder, saved(name).path, kind, OF_STATES, NUM_PROMPTS)
