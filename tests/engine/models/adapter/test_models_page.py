"""docs/models.md says what the code and its tests do."""

from __future__ import annotations

import re

from engine.models.config.families.architectures import PROVEN
from engine.models.config.families.refused import REFUSED
from engine.models.config.families.table import ARCHITECTURES
from tests.engine.models.adapter.checkpoints_by_name import REFUSED_CHECKPOINTS, TEXT_CHECKPOINTS, TINY, by_name
from tests.engine.models.adapter.models_page import PAGE, own_models, render


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text() == render(), "run python -m tests.engine.models.adapter.models_page"


def test_every_checkpoint_that_is_listed_has_its_row() -> None:
    names = [name for names in TEXT_CHECKPOINTS.values() for name in names.split(", ")]
    names += [name for tiny in TINY.values() for name in tiny.published.split(", ")] + list(REFUSED_CHECKPOINTS)
    rows = by_name()
    assert [name for name in names if not re.search(rf"[|,] {re.escape(name)}( \||,)", rows)] == []


def test_nothing_is_both_served_and_refused() -> None:
    assert not PROVEN & REFUSED.keys()


def test_every_architecture_of_our_own_decoder_is_compared() -> None:
    assert own_models().keys() == ARCHITECTURES.keys()
    adapted = {
        name
        for name, family in ARCHITECTURES.items()
        if not (family.recurrent or family.has_layer_heads or family.has_latents or family.has_chunks)
    }
    adapted.add("Gemma3nForCausalLM")  # whose layers share keys and values in both
    assert ARCHITECTURES.keys() & PROVEN == adapted
