"""Steps of every kind on a GPU: each waits once, and answers what the CPU answers."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.sampling.token_rows import bytes_of_histories
from engine.worker.model_shard import ModelShard
from tests.gpu_rehearsal.device_tensor import DeviceTensor
from tests.gpu_rehearsal.rehearsal import Rehearsal
from tests.gpu_rehearsal.scenarios import SCENARIOS, VOCAB_SIZE, answers, generate, watch

KINDS = {
    "every parameter": {"prefill", "mixed", "decode", "a grammar", "beams", "block_copies", "prompt log-probabilities"},
    "one at a time": {"prefill", "decode"},
    "flat": {"prefill", "decode"},
    "drafts": {"prefill", "drafts", "prompt log-probabilities"},
    "swapped": {"swap_out", "swap_in", "block_copies", "beams"},
    "two ranks": {"swap_out", "swap_in", "block_copies", "beams", "a grammar", "prompt log-probabilities"},
}


@pytest.mark.parametrize("name", KINDS)
def test_a_scenario(name: str, cpu_answers: dict[str, object], gpu: Rehearsal) -> None:
    scenario = SCENARIOS[name]
    gpu.machine.max_waits = scenario.max_waits
    llm = gpu.start(**scenario.options)
    assert llm.engine.info.device == "cuda:0"
    assert llm.engine.info.attention_backend == "triton"
    seen = watch(llm.engine, gpu.machine)
    outputs = generate(llm, scenario)
    assert not KINDS[name] - set(seen.steps), f"the scenario made only {seen.steps}"
    assert max(seen.waits) == scenario.max_waits
    assert seen.kinds_of_waits == {"Event.synchronize"}  # none that spins
    assert answers(outputs) == cpu_answers[name]
    gpu.machine.check()


def test_batch_invariant_linears_answer_as_the_cpu_does(cpu_answers: dict[str, object], gpu: Rehearsal) -> None:
    scenario = SCENARIOS["every parameter"]
    gpu.machine.max_waits = scenario.max_waits
    llm = gpu.start(batch_invariant=True, **scenario.options)
    assert answers(generate(llm, scenario)) == cpu_answers["every parameter"]
    assert gpu.launches.counts["linear_kernel"]
    gpu.machine.check()


def test_flash_attn_answers_as_triton_does(gpu_with_flash_attn: Rehearsal) -> None:
    """Both compute attention in float64 here, so bfloat16 tokens are equal too."""
    gpu, by_backend = gpu_with_flash_attn, {}
    scenario = SCENARIOS["flash_attn"]
    for name in ("auto", "flash_attn", "triton"):
        llm = gpu.start(attention_backend=name, **scenario.options)
        by_backend[llm.engine.info.attention_backend] = answers(generate(llm, scenario))
    gpu.machine.check()
    assert by_backend["flash_attn_3"] == by_backend["flash_attn"] == by_backend["triton"]
    assert gpu.launches.counts["prefill_kernel"]


def test_the_size_of_the_cache_is_measured(gpu: Rehearsal) -> None:
    llm = gpu.start(num_blocks=None, max_num_seqs=4)
    assert 0 < llm.engine.info.num_blocks <= 4 * 1024 // 16
    generate(llm, SCENARIOS["one at a time"])
    gpu.machine.check()


def test_the_histories_of_penalties_are_in_the_measured_peak(gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    """They outlive the step that samples, so the largest step is computed beside them."""
    forward, taken = ModelShard.forward, list[int]()

    def tensors_of_bytes() -> list[Any]:
        return [item for item in gc.get_objects() if type(item) is DeviceTensor and item.dtype == torch.uint8]

    of_other_tests = tensors_of_bytes()  # held here, so that no new one has the identity of one of them
    others = {id(tensor) for tensor in of_other_tests}

    def watched(shard: ModelShard, *args: Any) -> torch.Tensor:
        taken.append(sum(tensor.nbytes for tensor in tensors_of_bytes() if id(tensor) not in others))
        return forward(shard, *args)

    monkeypatch.setattr(ModelShard, "forward", watched)
    gpu.start(max_num_seqs=10, enforce_eager=True)
    assert taken[0] == bytes_of_histories(10, VOCAB_SIZE)
    assert not any(taken[1:])  # other warm-ups measure nothing


def test_a_cache_that_the_gpu_cannot_hold(gpu: Rehearsal) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        gpu.start(num_blocks=None, kv_cache_memory="4GiB")


def test_steps_have_8192_tokens_unless_the_option_is_set(gpu: Rehearsal) -> None:
    llm = gpu.start(max_num_batched_tokens=None, enforce_eager=True)
    assert llm.engine.config.max_num_batched_tokens == llm.engine.scheduler.max_num_batched_tokens == 8192


def test_swapped_blocks_are_unpinned_at_the_end(gpu: Rehearsal) -> None:
    llm = gpu.start(**SCENARIOS["swapped"].options)
    assert gpu.machine.host_memory.num_registered == 1
    llm.engine.runner.close()
    del llm
    gc.collect()
    assert gpu.machine.host_memory.num_registered == 0
