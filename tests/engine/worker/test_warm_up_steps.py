"""The shapes of the warm-up's steps, which decide what is compiled and measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.worker.warm_up_steps import largest_step, one_sequence

CPU = torch.device("cpu")


@pytest.mark.parametrize(("seq_len", "num_blocks"), [(1, 1), (16, 1), (17, 2), (33, 3)])
def test_a_context_has_the_block_table_of_its_length(seq_len: int, num_blocks: int) -> None:
    step = one_sequence(1, seq_len, block_size=16, device=CPU)
    assert step.metadata.block_tables.tolist() == [[0] * num_blocks]
    assert step.positions.tolist() == [seq_len - 1]
    assert step.metadata.slot_mapping.tolist() == [(seq_len - 1) % 16]


def test_the_largest_step_is_whole_prompts_and_a_rest() -> None:
    config = EngineConfig(model="m", max_num_batched_tokens=50, max_num_seqs=7)
    step = largest_step(config, max_model_len=20, block_size=16, num_prompt_logits=64, device=CPU)
    assert step.metadata.seq_lens.tolist() == [20, 20, 10]
    assert step.metadata.cu_seqlens_q.tolist() == [0, 20, 40, 50]
    assert step.metadata.block_tables.tolist() == [[0, 0]] * 3
    assert (step.metadata.num_decodes, step.metadata.max_query_len, step.metadata.max_seq_len) == (0, 20, 20)
    assert (len(step.logit_indices), len(step.prompt_logit_indices)) == (7, 50)


def test_the_largest_step_has_memory_for_the_longest_contexts() -> None:
    config = EngineConfig(model="m", max_num_batched_tokens=50)
    metadata = largest_step(config, max_model_len=100, block_size=16, num_prompt_logits=64, device=CPU).metadata
    assert metadata.seq_lens.tolist() == [50]
    assert metadata.block_tables.tolist() == [[0] * 7]
    assert (metadata.max_query_len, metadata.max_seq_len) == (50, 100)


def test_only_a_step_that_expands_latents_knows_lengths() -> None:
    """Else they are absorbed, which takes more memory for what attention returns."""
    config = EngineConfig(model="m", max_num_batched_tokens=50)
    options: dict[str, Any] = {"max_model_len": 20, "block_size": 16, "num_prompt_logits": 0, "device": CPU}
    assert largest_step(config, **options).metadata.host_lens == ()
    expanded = largest_step(config, **options, expands_latents=True).metadata
    assert expanded.host_lens == ((20, 20), (20, 20), (10, 10))
