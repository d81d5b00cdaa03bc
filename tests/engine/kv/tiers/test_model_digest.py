"""The digest by which engines find each other's pages: it covers all that keys and values depend on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import EngineConfig, EngineInfo
from engine.kv.tiers.model_digest import model_digest
from engine.kv.tiers.page_format import PageFormat, PageKind

INFO = EngineInfo(
    model="model",
    block_size=16,
    num_blocks=20,
    num_host_blocks=8,
    max_model_len=64,
    vocab_size=100,
    dtype="bfloat16",
    device="cuda:0",
    attention_backend="triton",
    eos_token_ids=(),
    default_sampling={},
)


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return EngineConfig(model=str(tmp_path))


def test_engines_with_caches_of_other_dtypes_exchange_no_pages(config: EngineConfig) -> None:
    """Pages of FP8 may have as many bytes as others: those of 32 tokens, and of 16."""
    fp8 = replace(INFO, kv_cache_dtype="fp8")
    digests = [model_digest(config, info) for info in (INFO, fp8)]
    formats = [PageFormat(digest, 16, (PageKind("blocks", 4096),)) for digest in digests]
    assert formats[0].digest != formats[1].digest


def test_scales_are_a_part_of_the_weights_and_so_of_the_digest(config: EngineConfig) -> None:
    before = model_digest(config, INFO)
    (Path(config.model) / "model.safetensors").write_bytes(b"scales!")
    assert model_digest(config, INFO) != before
