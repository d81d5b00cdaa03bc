"""Checkpoints that tensor-parallel ranks share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine.checkpoints import build_model, save_checkpoint
from tests.engine.models.decoder.dense_families import DENSE_FAMILIES, save_dense_model
from tests.engine.worker.parallel_answers import KV_HEADS, VOCAB_SIZE


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Saves each family once, with head counts that four ranks can share."""
    saved: dict[str, str] = {}

    def save(family: str) -> str:
        if family not in saved:
            if family in DENSE_FAMILIES:
                saved[family] = save_dense_model(family, tmp_path_factory.mktemp(family))[1]
                return saved[family]
            heads = {"num_attention_heads": 8, "num_key_value_heads": KV_HEADS[family], "hidden_size": 64}
            model = build_model(family, vocab_size=VOCAB_SIZE, **heads)
            saved[family] = save_checkpoint(model, tmp_path_factory.mktemp(family))
        return saved[family]

    return save
