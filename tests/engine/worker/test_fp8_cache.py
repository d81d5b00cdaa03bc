"""Where `kv_cache_dtype: fp8` is refused, with what to do. tests/gpu_rehearsal/test_fp8_cache.py has where it works."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.worker.model_shard import ModelShard
from tests.engine.conftest import SavedModel


@pytest.mark.parametrize("value", ["fp8", "fp8_e4m3"])
def test_a_cpu_has_no_cache_in_fp8(qwen3: SavedModel, value: str) -> None:
    problem = f"kv_cache_dtype='{value}' runs on GPUs, and the device is cpu; leave it out"
    with pytest.raises(ConfigError, match=problem):
        ModelShard(EngineConfig(model=qwen3.path, device="cpu", kv_cache_dtype=value), 0)


@pytest.mark.parametrize("value", ["fp8_e5m2", "int8", None])
def test_other_dtypes_are_unknown(value: str | None) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype=.*auto, fp8, fp8_e4m3"):
        EngineConfig.from_options("model", {"kv_cache_dtype": value})
