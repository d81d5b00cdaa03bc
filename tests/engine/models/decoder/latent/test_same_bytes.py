"""With the C kernels, models with latents give the same bytes in any batch, in chunks, after a swap or a migration."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kernels.cpu.library import library
from kernels.cpu.linear import has_int8
from tests.engine.models.decoder.saved_models import Saved
from tests.engine.models.decoder.test_same_bytes import FEW_SETTINGS, NUM_PROMPTS, SETTINGS, LogitsRecorder, check

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

OTHERS = ("deepseek-v2", "glm-4.7-flash", "minicpm3", "mistral-4")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> LogitsRecorder:
    return LogitsRecorder(monkeypatch)


@pytest.mark.parametrize("kind", ["bfloat16", pytest.param("float32", marks=pytest.mark.long)])
def test_a_few_answers(recorder: LogitsRecorder, saved: Callable[[str], Saved], kind: str) -> None:
    check(
        recorder, saved("deepseek-v3").path, kind, ("all at once, three threads", "chunks of 17", "migrated, warm"), 8
    )


@pytest.mark.long
def test_forty_answers(recorder: LogitsRecorder, saved: Callable[[str], Saved]) -> None:
    check(recorder, saved("deepseek-v3").path, "bfloat16", FEW_SETTINGS, 40)


@pytest.mark.exhaustive("more prompts, families and weights in every setting")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", OTHERS)
def test_two_hundred_answers_in_every_setting(
    recorder: LogitsRecorder, saved: Callable[[str], Saved], name: str, kind: str
) -> None:
    if kind == "int8" and not has_int8():
        pytest.skip("the processor does not multiply int8")
    check(recorder, saved(name).path, kind, list(SETTINGS), NUM_PROMPTS)
