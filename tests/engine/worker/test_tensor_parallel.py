"""Ranks that share a model compute what one rank computes; here the ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv.pool_sizes import PoolSizes
from engine.llm import LLM
from engine.models.checkpoint.checkpoint import open_checkpoint
from engine.models.checkpoint.sharding import shard_of, vocab_range
from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.model_config import ModelConfig
from engine.models.decoder.decoder import Decoder
from engine.sampling_params import SamplingParams
from engine.worker.model_worker import ModelWorker
from engine.worker.ranks.rank_hosts import RankHosts
from tests.engine.checkpoints import EXPERT_FAMILIES, FAMILIES, build_model
from tests.engine.models.decoder.dense_families import DENSE_FAMILIES
from tests.engine.worker.parallel_answers import KV_HEADS, OPTIONS, answer, check_equal, make_prompts
from tests.waiting import HANG_S


class ThreadRanks:
    """RemoteRanks without processes, which take seconds to start: each rank is a thread with a worker of its own."""

    def __init__(self, config: EngineConfig, hosts: RankHosts, abort: Callable[[], None]) -> None:
        self.hosts = hosts
        self.calls: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(1, config.tensor_parallel_size)]
        self.replies: list[SimpleQueue[Any]] = [SimpleQueue() for _ in self.calls]
        self.workers = [ModelWorker(config, number) for number in range(1, config.tensor_parallel_size)]
        self.threads = [
            threading.Thread(target=self._serve, args=(index,), daemon=True) for index in range(len(self.calls))
        ]
        for thread in self.threads:
            thread.start()

    def _serve(self, index: int) -> None:
        while (call := self.calls[index].get()) is not None:
            method, args, wants_reply = call
            result = getattr(self.workers[index], method)(*args)
            if wants_reply:
                self.replies[index].put(result)

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def check_health(self) -> None:
        """Threads of this process do not die alone."""

    def send(self, message: object) -> None:
        for calls in self.calls:
            calls.put(message)

    def receive(self) -> list[Any]:
        return [replies.get(timeout=HANG_S) for replies in self.replies]

    def close(self) -> None:
        self.send(None)
        for thread in self.threads:
            thread.join()
        self.hosts.close()


@pytest.fixture
def rank_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.worker.worker_pool.RemoteRanks", ThreadRanks)


SHARED_BY_RANKS = [*sorted(FAMILIES), *sorted(EXPERT_FAMILIES)]
SHARED_BY_RANKS += [name for name in DENSE_FAMILIES if not name.startswith("olmo")]  # whose norms are over all heads


IN_MAKE_TEST = ("qwen3", "qwen3_moe", "mistral", "gemma2")


@pytest.mark.usefixtures("rank_threads")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in IN_MAKE_TEST else pytest.mark.long) for name in SHARED_BY_RANKS],
)
def test_two_and_four_ranks_answer_like_one(name: str, checkpoint: Callable[[str], str]) -> None:
    expected = answer(LLM(checkpoint(name), **OPTIONS))
    for size in (2, 4):
        llm = LLM(checkpoint(name), tensor_parallel_size=size, **OPTIONS)
        check_equal(answer(llm), expected)
        llm.engine.close()


@pytest.mark.usefixtures("rank_threads")
@pytest.mark.parametrize("name", sorted(EXPERT_FAMILIES))
def test_two_ranks_of_torch_s_experts_answer_like_one(
    name: str, checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where other kernels compute the experts."""
    monkeypatch.setattr("engine.models.decoder.loader.cpu_kernels_can_run", lambda *_: False)
    expected = answer(LLM(checkpoint(name), **OPTIONS))
    llm = LLM(checkpoint(name), tensor_parallel_size=2, **OPTIONS)
    assert isinstance(llm.engine.runner.workers.local.shard.model, Decoder)  # type: ignore[attr-defined]
    check_equal(answer(llm), expected)
    llm.engine.close()


@pytest.mark.usefixtures("rank_threads")
def test_ranks_that_compute_prompt_logits_in_slices_stay_in_step(checkpoint: Callable[[str], str]) -> None:
    """Each slice is a collective of all ranks, also in steps that sample nothing."""
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in make_prompts()]
    params = [SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=(None, 0, 3)[i % 3]) for i in range(16)]
    logprobs = []
    for size in (1, 2):
        options = OPTIONS | {"max_num_batched_tokens": 200, "tensor_parallel_size": size}
        llm = LLM(checkpoint("llama"), **options)
        logprobs.append([output.prompt_logprobs for output in llm.generate(prompts, params, use_tqdm=False)])
        llm.engine.close()
    for got, expected in zip(*logprobs, strict=True):
        for position, other in zip(got or [], expected or [], strict=True):
            assert list(position or {}) == list(other or {})
            values = [logprob.logprob for logprob in (other or {}).values()]
            assert [logprob.logprob for logprob in (position or {}).values()] == pytest.approx(values, abs=1e-4)


@pytest.mark.usefixtures("rank_threads")
def test_ranks_share_the_memory_of_the_kv_cache(checkpoint: Callable[[str], str]) -> None:
    """Each holds its own KV heads of every block; where heads are replicated, there is room for fewer blocks."""
    blocks = {}
    for name in ("llama", "qwen3"):  # 4 and 2 KV heads
        for size in (1, 2, 4):
            options = OPTIONS | {"kv_cache_memory": "1MiB", "swap_space_gib": 2**-10}
            llm = LLM(checkpoint(name), tensor_parallel_size=size, **options)
            worker = llm.engine.runner.workers.local  # type: ignore[attr-defined]
            assert worker.kv_cache.layers[0][0].shape[:3] == (
                llm.engine.info.num_blocks,
                16,
                max(1, KV_HEADS[name] // size),
            )
            blocks[name, size] = llm.engine.info.num_blocks
            assert worker.kv_cache.blocks.num_host_pages == llm.engine.info.num_host_blocks == blocks[name, size]
            llm.engine.close()
    assert blocks["llama", 1] == blocks["llama", 2] == blocks["llama", 4]
    assert blocks["qwen3", 1] == blocks["qwen3", 2] == 2 * blocks["qwen3", 4]


@pytest.mark.usefixtures("rank_threads")
@pytest.mark.parametrize("fewest", [0, 1])
def test_every_rank_has_as_many_blocks_as_fit_on_all(
    fewest: int, checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelWorker, "measure_pools", lambda worker: PoolSizes(30 if worker.rank == fewest else 40))
    llm = LLM(checkpoint("qwen3"), tensor_parallel_size=2, **OPTIONS)
    pool: Any = llm.engine.runner.workers  # type: ignore[attr-defined]
    assert [worker.kv_cache.num_tokens for worker in (pool.local, *pool._ranks.workers)] == [30 * 16] * 2
    assert llm.engine.info.num_blocks == 30
    llm.engine.close()


@pytest.mark.parametrize("name", sorted(FAMILIES))
@pytest.mark.parametrize("size", [2, 4])
def test_the_ranks_parts_make_up_every_tensor(name: str, size: int, checkpoint: Callable[[str], str]) -> None:
    weights = load_file(Path(checkpoint(name)) / "model.safetensors")
    config = ModelConfig.from_hf(load_hf_config(checkpoint(name)))
    with open_checkpoint(checkpoint(name)) as stored:
        for tensor_name, tensor in weights.items():
            shards = [shard_of(tensor_name, config, rank, size) for rank in range(size)]
            stored.require(tensor_name, list(tensor.shape))
            parts = [stored.read(tensor_name, shard) for shard in shards]
            if shards[0] is None:  # norms, and the biases that are added once
                assert all(torch.equal(part, tensor) for part in parts)
                continue
            if tensor_name.split(".")[-2] in ("k_proj", "v_proj"):  # where heads are replicated, one of each copy
                parts = parts[:: max(1, size // config.num_kv_heads)]
            assert torch.equal(torch.cat(parts, dim=shards[0].dim), tensor), tensor_name
        assert stored.names == sorted(weights)


def test_a_vocabulary_that_leaves_a_rank_nothing_is_padded() -> None:
    assert [vocab_range(5, rank, 4) for rank in range(4)] == [(0, 2), (2, 2), (4, 2), (6, 2)]


def shape(**changes: int) -> ModelConfig:
    return ModelConfig.from_hf(build_model("llama", **changes).config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, "tensor_parallel_size=4 does not divide.* 6 attention"),
        ({"num_attention_heads": 24, "num_key_value_heads": 3}, "tensor_parallel_size=4 does not divide.* 3 KV heads"),
        ({"num_attention_heads": 24, "num_key_value_heads": 6}, "tensor_parallel_size=4 does not divide.* 6 KV heads"),
        ({"num_attention_heads": 8, "intermediate_size": 98}, "does not divide.* 98 feed-forward features"),
    ],
)
def test_a_size_that_does_not_divide_the_model_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shape(**({"hidden_size": 48 * 4} | changes)).shard(4)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[[str], str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="tensor_parallel_size=4 exceeds the 2 GPUs"):
        ModelWorker(EngineConfig(model=checkpoint("llama"), device="cuda", tensor_parallel_size=4))
