"""EngineConfig: options are checked once, unknown ones refused, and messages name the value and the remedy."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from kernels.attention.registry import BACKENDS

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


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
        ({"attention_backend": "trition"}, "attention_backend='trition' is unknown; choose .* auto, cpu, .*triton"),
        ({"attention_backend": None}, "attention_backend=None is unknown; choose"),
        ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization=1.5 .*in \(0, 1\]"),
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
        ({"served_model_name": ""}, "served_model_name='' must be a name"),
        ({"max_queued_requests": 0}, "max_queued_requests=0 .*at least 1"),
        ({"max_queued_prefill_tokens": 1.5}, "max_queued_prefill_tokens=1.5 .*at least 1"),
        ({"step_timeout_s": 0}, "step_timeout_s=0 .*above 0"),
        ({"step_timeout_s": float("inf")}, "step_timeout_s=inf"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"speculative_config": "ngram"}, "speculative_config='ngram' must be a map; give, say, {'method': 'ngram'"),
        ({"speculative_config": {}}, "speculative_config={} lacks method; give, say"),
        ({"speculative_config": {"method": "ngram"}}, "lacks num_speculative_tokens; give, say"),
        (
            {"speculative_config": {"method": "eagle", "num_speculative_tokens": 1}},
            "speculative_config.method='eagle' is unknown; choose one of ngram, suffix",
        ),
        (
            {"speculative_config": NGRAM | {"num_speculative_tokens": 0}},
            "num_speculative_tokens=0 .* at most 128",
        ),
        ({"speculative_config": NGRAM | {"num_speculative_tokens": True}}, "num_speculative_tokens=True .*; give"),
        (
            {"speculative_config": NGRAM | {"prompt_lookup_max": 2.5}},
            "prompt_lookup_max=2.5 .*; give an integer of at least 1 and at most 64",
        ),
        ({"speculative_config": NGRAM | {"prompt_lookup_min": None}}, "prompt_lookup_min=None .*; give"),
        (
            {"speculative_config": NGRAM | {"prompt_lookup_min": 3, "prompt_lookup_max": 2}},
            "prompt_lookup_min=3 exceeds prompt_lookup_max=2; lower it",
        ),
        (
            {"speculative_config": NGRAM | {"prompt_lookup_mn": 3}},
            "'prompt_lookup_mn'; did you mean 'prompt_lookup_min'",
        ),
        (
            {"speculative_config": {"method": "suffix", "prompt_lookup_min": 3}},
            "prompt_lookup_min=3 is an option of method 'ngram', not of 'suffix'; remove it",
        ),
        (
            {"speculative_config": NGRAM | {"suffix_decoding_max_cached_requests": 9}},
            "suffix_decoding_max_cached_requests=9 is an option of method 'suffix', not of 'ngram'",
        ),
        (
            {"speculative_config": {"method": "suffix", "suffix_decoding_max_tree_depth": 500}},
            "suffix_decoding_max_tree_depth=500 .* at most 128",
        ),
        (
            {"speculative_config": {"method": "suffix", "suffix_decoding_min_token_prob": 1.5}},
            r"suffix_decoding_min_token_prob=1.5 .*in \[0, 1\]",
        ),
        ({"speculative_config": {"method": ["suffix"]}}, r"lacks num_speculative_tokens"),
        ({"speculative_config": NGRAM | {"method": ["suffix"]}}, r"method=\['suffix'\] is unknown; choose"),
        ({"speculative_config": NGRAM | {"frobnicate": 3}}, "'frobnicate'; known options: method, num_speculative"),
    ],
)
def test_a_bad_option_is_refused(options: dict[Any, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options("model", options)


@pytest.mark.parametrize(
    ("text", "size"), [(1024, 1024), ("1024", 1024), ("512MiB", 2**29), ("1.5 GiB", 3 * 2**29), ("2gb", 2 * 10**9)]
)
def test_memory_sizes(text: int | str, size: int) -> None:
    assert EngineConfig(model="m", kv_cache_memory=text).kv_cache_memory == size


@pytest.mark.parametrize("name", ["auto", *BACKENDS])
def test_every_attention_backend_of_the_table_can_be_configured(name: str) -> None:
    assert EngineConfig(model="m", attention_backend=name).attention_backend == name


def test_a_config_is_checked_without_torch() -> None:
    program = (
        "import sys; from engine.config import EngineConfig; EngineConfig(model='m', attention_backend='triton'); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_step_has_more_tokens_on_a_gpu_unless_the_option_is_set() -> None:
    for device_type, num_tokens in (("cpu", 2048), ("cuda", 8192)):
        assert EngineConfig(model="m").on_device(device_type).tokens_per_step == num_tokens
        assert EngineConfig(model="m", max_num_batched_tokens=100).on_device(device_type).tokens_per_step == 100
    assert EngineConfig(model="m").tokens_per_step == 2048


def test_config_is_frozen() -> None:
    with pytest.raises(AttributeError):
        EngineConfig(model="m").dtype = "float32"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({}, (3, 5)),
        ({"prompt_lookup_max": 2}, (2, 2)),
        ({"prompt_lookup_max": 9}, (3, 9)),
        ({"prompt_lookup_min": 7}, (7, 7)),
        ({"prompt_lookup_min": 1, "prompt_lookup_max": 4}, (1, 4)),
    ],
)
def test_default_lengths_of_ngrams(options: dict[str, int], lengths: tuple[int, int]) -> None:
    speculation = EngineConfig.from_options("model", {"speculative_config": NGRAM | options}).speculation
    assert speculation is not None
    assert (speculation.prompt_lookup_min, speculation.prompt_lookup_max) == lengths
    assert speculation.num_speculative_tokens == 4


@pytest.mark.parametrize(("options", "number"), [({}, 24), ({"suffix_decoding_max_tree_depth": 9}, 9)])
def test_suffix_decoding_needs_no_number_of_tokens(options: dict[str, int], number: int) -> None:
    speculation = EngineConfig(model="m", speculative_config={"method": "suffix", **options}).speculation
    assert speculation is not None
    assert speculation.num_speculative_tokens == number


def test_speculative_decoding_is_off_by_default() -> None:
    assert EngineConfig(model="m").speculation is None
