"""EngineConfig: options are checked once, unknown ones refused, and messages name the value and the remedy."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import EngineConfig, parse_memory
from engine.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seq": 4}, "'max_num_seq'; did you mean 'max_num_seqs'"),
        ({"frobnicate": 1}, "'frobnicate'; known options: dtype"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 .*at least 1"),
        ({"max_num_seqs": True}, "max_num_seqs=True"),
        ({"block_size": -1}, "block_size=-1"),
        ({"dtype": "int3"}, "dtype='int3'.*choose one of"),
        ({"device": "tpu"}, "device='tpu'.*choose auto, cpu"),
        ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization=1.5 must lie in \(0, 1\]"),
        ({"kv_cache_memory": "lots"}, "kv_cache_memory='lots'.*'512MiB'"),
        ({"kv_cache_memory": 0}, "kv_cache_memory=0"),
        ({"kv_cache_memory": 1.5}, "kv_cache_memory=1.5"),
        ({"kv_cache_memory": "9" * 400}, "kv_cache_memory="),
        ({"model": "another"}, "unknown engine option 'model'"),
        ({1: 2}, "'1'; known options"),
        ({"swap_space_gib": float("nan")}, "swap_space_gib=nan"),
        ({"swap_space_gib": -1}, "swap_space_gib=-1"),
        ({"long_prefill_threshold": -1}, "long_prefill_threshold=-1"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 .*at least 1"),
        ({"tensor_parallel_size": 2, "device": "cuda:1"}, "device='cuda:1' names one GPU, but tensor_parallel_size=2"),
        ({"use_tqdm_on_load": 1}, "use_tqdm_on_load=1 must be true or false"),
        ({"enforce_eager": "yes"}, "enforce_eager='yes' must be true or false"),
        ({"max_queued_requests": 0}, "max_queued_requests=0 .*at least 1"),
        ({"max_queued_prefill_tokens": 1.5}, "max_queued_prefill_tokens=1.5 .*at least 1"),
        ({"step_timeout_s": 0}, "step_timeout_s=0 .*above 0"),
        ({"step_timeout_s": float("inf")}, "step_timeout_s=inf"),
        ({"seed": 1.5}, "seed=1.5"),
    ],
)
def test_a_bad_option_is_refused(options: dict[Any, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options("model", options)


@pytest.mark.parametrize(
    ("text", "size"), [(1024, 1024), ("1024", 1024), ("512MiB", 2**29), ("1.5 GiB", 3 * 2**29), ("2gb", 2 * 10**9)]
)
def test_memory_sizes(text: int | str, size: int) -> None:
    assert parse_memory(text, "kv_cache_memory") == size


def test_config_is_frozen() -> None:
    with pytest.raises(AttributeError):
        EngineConfig(model="m").dtype = "float32"  # type: ignore[misc]
