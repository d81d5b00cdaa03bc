"""The limit of a workload: computed by hand for a small model, and near the quoted figures for Qwen3-0.6B."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.limits.model_shape import ModelShape
from benchmarks.limits.rates import Rates
from benchmarks.limits.roofline import Roofline
from benchmarks.workloads import Request, Workload, make

QWEN3_06B = ModelShape(1024, 3072, 28, 16, 8, 128, 151936)
QUOTED = Rates(44.0, {1: 44.0, 4: 171.0, 8: 245.0, 16: 349.0, 64: 411.0, 256: 444.0})  # 2 cores with AVX512-BF16
TINY = ModelShape(2, 3, 1, 1, 1, 2, 5)


def test_sizes_of_a_known_model() -> None:
    assert QWEN3_06B.layer_parameters == 28 * (1024 * 4096 + 2048 * 1024 + 3 * 1024 * 3072)
    assert QWEN3_06B.layer_parameters + QWEN3_06B.head_parameters == pytest.approx(596e6, rel=0.001)
    assert QWEN3_06B.kv_bytes_per_token == 112 * 1024


@pytest.mark.parametrize(("name", "quoted"), [("w1", 37.0), ("w16", 137.0), ("wshare", 85.0)])
def test_limits_are_near_the_quoted_ones_for_these_rates(name: str, quoted: float) -> None:
    """The quoted limits leave attention out, and for w1 the prompt too, which is 7% of w1."""
    limit = Roofline(QWEN3_06B, QUOTED).limit(make(name))
    assert limit.linear_tokens_per_s == pytest.approx(quoted, rel=0.08)
    assert 0.85 * limit.linear_tokens_per_s < limit.tokens_per_s < limit.linear_tokens_per_s


def test_one_stream_can_only_read_its_weights() -> None:
    limit = Roofline(QWEN3_06B, QUOTED).limit(make("w1"))
    assert limit.decode_s / 63 == pytest.approx(2 * 596e6 / 44e9, rel=0.001)


def test_rates_between_the_measured_rows_are_linear_and_constant_beyond() -> None:
    assert [QUOTED.gflop_s_at(rows) for rows in (1, 4, 6, 12, 256, 2048)] == [44.0, 171.0, 208.0, 297.0, 444.0, 444.0]


def test_a_linear_takes_the_longer_of_reading_and_computing() -> None:
    rates = Rates(1.0, {1: 100.0, 8: 100.0})
    assert rates.linear_seconds(1_000_000_000, 1) == 2.0
    assert rates.linear_seconds(50_000_000_000, 8) == pytest.approx(100.0)
    assert Rates(1000.0, {1: 100.0, 8: 100.0}).linear_seconds(50_000_000_000, 8) == pytest.approx(8.0)


def test_every_step_is_counted() -> None:
    rates = Rates(1e-9, {1: 1e9})  # a byte a second, and arithmetic that takes no time
    workload = Workload("two", [Request([1, 2, 3, 4], 3), Request([5, 6], 2)])
    limit = Roofline(TINY, rates, max_num_batched_tokens=4).limit(workload)
    layer, head = 2 * TINY.layer_parameters, 2 * TINY.head_parameters
    assert limit.prefill_s == pytest.approx(2 * layer + head)  # 4 and 2 tokens of prompts
    assert limit.decode_s == pytest.approx(2 * (layer + head))
    assert limit.kv_s == pytest.approx(TINY.kv_bytes_per_token * ((5 + 3) + 6))
    assert limit.tokens_per_s == pytest.approx(5 / (limit.prefill_s + limit.decode_s + limit.kv_s))


def test_a_shared_prefix_counts_once() -> None:
    rates = Rates(1e-9, {1: 1e9})
    alike = Workload("alike", [Request([1, 2, 3, 4], 2), Request([1, 2, 3, 5], 2)])
    limit = Roofline(TINY, rates, max_num_batched_tokens=2).limit(alike)
    assert limit.prefill_s == pytest.approx(2 * (3 * TINY.layer_parameters + TINY.head_parameters))  # 5 tokens
    assert limit.kv_s == pytest.approx(TINY.kv_bytes_per_token * (3 + 2 * 2))


def test_a_share_is_of_the_whole_limit() -> None:
    roofline, workload = Roofline(QWEN3_06B, QUOTED), make("w16")
    assert roofline.share(workload, roofline.limit(workload).tokens_per_s / 2) == pytest.approx(0.5)


def test_rates_survive_json() -> None:
    assert Rates.from_json(json.loads(json.dumps(asdict(QUOTED)))) == QUOTED


def test_the_shape_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    config = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 32}))
    assert ModelShape.from_checkpoint(tmp_path) == ModelShape(8, 16, 2, 4, 4, 2, 32)


def test_of_experts_only_those_that_compute_a_token_count(tmp_path: Path) -> None:
    config = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 5}
    (tmp_path / "config.json").write_text(json.dumps(config | experts | {"vocab_size": 32}))
    assert ModelShape.from_checkpoint(tmp_path).intermediate_size == 15
