"""With the C kernels, models with latents give the same bytes in any batch, in chunks, after a swap or a migration.

All families in float32 and bfloat16 are in test_same_bytes_of_families.py beside this folder.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kernels.cpu.library import library
from kernels.cpu.linear import has_int8
from tests.engine.models.decoder.saved_models import Saved
from tests.engine.models.decoder.test_same_bytes import FEW_SETTINGS, NUM_PROMPTS, SETTINGS, LogitsRecorder, check

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

FAMILIES = ("deepseek-v2", "glm-4.7-flash", "minicpm3", "mistral-4", "glm-5.2")


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


@pytest.mark.exhaustive("more prompts and families in every setting")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FAMILIES)
def test_two_hundred_answers_of_int8_in_every_setting(
    recorder: LogitsRecorder, saved: Callable[[str], Saved], name: str
) -> None:
    if not has_int8():
        pytest.skip("the processor does not multiply int8")
    check(recorder, saved(name).path, "int8", list(SETTINGS), NUM_PROMPTS)
