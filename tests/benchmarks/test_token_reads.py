"""What a token reads is counted from a checkpoint of each kind of cache, and compared with arithmetic by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoints import write_checkpoint
from benchmarks.limits.token_reads import TokenReads

TINY: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 2100}
HEAD = 2100 * 8
DENSE = {"model_type": "qwen3", "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 4}
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
ATTENTION = 8 * 8 + 2 * 4 * 8 + 8 * 8 + 2 * 4  # queries, keys and values, output, the norms of queries and keys
NORMS = 2 * 8


def reads(directory: Path, shape: dict[str, Any]) -> TokenReads:
    write_checkpoint(directory, TINY | shape)
    return TokenReads.of(directory)


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_dense_model_reads_its_head_once_and_keys_and_values(tmp_path: Path, is_tied: bool) -> None:
    counted = reads(tmp_path, DENSE | {"tie_word_embeddings": is_tied})
    assert counted.weights == 2 * (ATTENTION + NORMS + 3 * 8 * 16) + 8 + HEAD
    assert counted.bytes_at(10, 1, 2) == counted.weights + 2 * 10 * (2 * 4 * 2)
    assert counted.bytes_at(0, 2, 2) == 2 * counted.weights


def test_of_experts_the_chosen_ones_are_read(tmp_path: Path) -> None:
    counted = reads(tmp_path, DENSE | EXPERTS)
    assert counted.weights == 2 * (ATTENTION + NORMS + 4 * 8 + 2 * 3 * 8 * 6) + 8 + HEAD


def test_states_are_read_whatever_the_context_is(tmp_path: Path) -> None:
    sizes = {"linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 4}
    shape = DENSE | sizes | {"model_type": "qwen3_5_text", "linear_value_head_dim": 4, "head_dim": 8}
    counted = reads(tmp_path, shape | {"layer_types": ["linear_attention", "full_attention"]})
    state = 4 * (4 * 4 + 3 * 4 * 3)  # of the recurrence, and of the convolution, which sees three earlier tokens
    assert counted.bytes_at(0, 0, 2) == state
    assert counted.bytes_at(100, 0, 2) == state + 100 * 2 * 8 * 2


@pytest.mark.parametrize("is_tied", [True, False])
def test_an_embedding_of_another_name_is_looked_up(tmp_path: Path, is_tied: bool) -> None:
    sizes = {"num_heads": 2, "head_dim": 8, "state_size": 4, "n_groups": 1, "num_hidden_layers": 1}
    counted = reads(tmp_path, sizes | {"model_type": "mamba2", "tie_word_embeddings": is_tied})
    assert HEAD < counted.weights < 1.2 * HEAD


def test_windows_end_and_shared_keys_and_values_are_read_again(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    shape = {"model_type": "gemma4_text", "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 16}
    sizes = {"num_key_value_heads": 1, "head_dim": 4, "global_head_dim": 4, "hidden_size_per_layer_input": 2}
    counted = reads(tmp_path, shape | sizes | {"layer_types": types, "vocab_size_per_layer_input": 2100})
    assert counted.bytes_at(10, 0, 2) == 4 * 10 * 2 * 4 * 2
    assert counted.bytes_at(100, 0, 2) == 2 * (100 + 16) * 2 * 4 * 2
    assert counted.weights < 2 * HEAD  # a row of the layers' embeddings, which have 2100 * 4 * 2 numbers


def test_a_latent_is_read_once(tmp_path: Path) -> None:
    rope = {"qk_rope_head_dim": 2, "kv_lora_rank": 6, "q_lora_rank": 4, "v_head_dim": 4, "qk_nope_head_dim": 2}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 4, "num_hidden_layers": 2}
    counted = reads(tmp_path, rope | experts | {"model_type": "glm4_moe_lite", "num_key_value_heads": 2})
    assert counted.bytes_at(10, 0, 2) == 2 * 10 * 8 * 2
