"""Ranks that share a model answer as one does; when one dies, all end with an error that names it, and none stays."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineDeadError, ModelLoadError
from engine.llm import LLM
from engine.models.checkpoint import open_checkpoint
from engine.models.config import ModelConfig, load_hf_config
from engine.models.sharding import shard_of, vocab_range
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.worker.model_worker import ModelWorker
from tests.engine.checkpoints import FAMILIES, build_model, save_checkpoint

VOCAB_SIZE = 383  # divided by neither 2 nor 4
KV_HEADS = {"qwen3": 2, "qwen2": 4, "llama": 4, "mistral": 2}  # two are fewer than four ranks
OPTIONS: dict[str, Any] = {
    "max_decode_slowdown": None,  # batches that depend on nothing that is measured: logits are compared row by row
    "dtype": "float32",
    "device": "cpu",
    "skip_tokenizer_init": True,
    "kv_cache_memory": "16MiB",
    "max_num_batched_tokens": 64,  # less than most prompts: they are computed in chunks
    "block_size": 16,
}
ENDLESS = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Saves each family once, with head counts that four ranks can share."""
    saved: dict[str, str] = {}

    def save(family: str) -> str:
        if family not in saved:
            heads = {"num_attention_heads": 8, "num_key_value_heads": KV_HEADS[family], "hidden_size": 64}
            model = build_model(family, vocab_size=VOCAB_SIZE, **heads)
            saved[family] = save_checkpoint(model, tmp_path_factory.mktemp(family))
        return saved[family]

    return save


def make_prompts() -> list[list[int]]:
    rng = random.Random(3)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(70)]
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(count)] for count in (1, 2, 15, 16, 17, 63, 64, 65, 150)]
    return prompts + [[*shared, token] for token in range(3, 9)] + [shared]


@dataclass
class Answers:
    token_ids: list[list[int]]
    logits: torch.Tensor
    num_cached_tokens: int


def answer(llm: LLM) -> Answers:
    """Answer the prompts greedily, and keep the logits that the tokens come from."""
    workers: Any = llm.engine.runner.workers  # type: ignore[attr-defined]
    execute, logits = workers.execute, []

    def keeping(*args: Any) -> torch.Tensor | None:
        result: torch.Tensor | None = execute(*args)
        if result is not None:
            logits.append(result.clone())  # the sampler may write to it
        return result

    workers.execute = keeping
    try:
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in make_prompts()]
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True), use_tqdm=False)
    finally:
        del workers.execute
    token_ids = [output.outputs[0].token_ids for output in outputs]
    return Answers(token_ids, torch.cat(logits), sum(output.num_cached_tokens for output in outputs))


def check_equal(got: Answers, expected: Answers) -> None:
    error = (got.logits - expected.logits).abs().max() / expected.logits.abs().max()
    print(f"largest error of the logits, relative to the largest logit: {error:.1e}")
    assert got.token_ids == expected.token_ids
    assert error < 1e-5
    assert got.num_cached_tokens == expected.num_cached_tokens > 0


# --- the arithmetic, with ranks that are threads --------------------------------------------------------------------


class ThreadRanks:
    """RemoteRanks without processes, which take seconds to start: each rank is a thread with a worker of its own."""

    def __init__(self, config: EngineConfig, abort: Callable[[], None]) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.rendezvous = os.path.join(self.directory.name, "store")
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

    def send(self, message: object) -> None:
        for calls in self.calls:
            calls.put(message)

    def receive(self) -> list[Any]:
        return [replies.get(timeout=30) for replies in self.replies]

    def close(self) -> None:
        self.send(None)
        for thread in self.threads:
            thread.join()
        self.directory.cleanup()


@pytest.fixture
def rank_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.worker.worker_pool.RemoteRanks", ThreadRanks)


@pytest.mark.usefixtures("rank_threads")
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_two_and_four_ranks_answer_like_one(name: str, checkpoint: Callable[[str], str]) -> None:
    expected = answer(LLM(checkpoint(name), **OPTIONS))
    for size in (2, 4):
        llm = LLM(checkpoint(name), tensor_parallel_size=size, **OPTIONS)
        check_equal(answer(llm), expected)
        llm.engine.close()


@pytest.mark.usefixtures("rank_threads")
def test_ranks_that_compute_prompt_logits_in_slices_stay_in_step(checkpoint: Callable[[str], str]) -> None:
    """Each slice is a collective of all ranks, also in steps that sample nothing."""
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in make_prompts()]
    params = [SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=(None, 0, 3)[i % 3]) for i in range(16)]
    told = []
    for size in (1, 2):
        options = OPTIONS | {"max_num_batched_tokens": 200, "tensor_parallel_size": size}
        llm = LLM(checkpoint("llama"), **options)
        told.append([one.prompt_logprobs for one in llm.generate(prompts, params, use_tqdm=False)])
        llm.engine.close()
    for got, expected in zip(*told, strict=True):
        for one, other in zip(got or [], expected or [], strict=True):
            assert list(one or {}) == list(other or {})
            values = [found.logprob for found in (other or {}).values()]
            assert [found.logprob for found in (one or {}).values()] == pytest.approx(values, abs=1e-4)


@pytest.mark.usefixtures("rank_threads")
def test_ranks_share_the_memory_of_the_kv_cache(checkpoint: Callable[[str], str]) -> None:
    """Each holds its own KV heads of every block; where heads are replicated, there is room for fewer blocks."""
    blocks = {}
    for name in ("llama", "mistral"):  # 4 and 2 KV heads
        for size in (1, 2, 4):
            llm = LLM(checkpoint(name), tensor_parallel_size=size, **(OPTIONS | {"kv_cache_memory": "1MiB"}))
            worker = llm.engine.runner.workers.local  # type: ignore[attr-defined]
            assert worker.kv_cache.layers[0][0].shape[:3] == (
                llm.engine.info.num_blocks,
                16,
                max(1, KV_HEADS[name] // size),
            )
            blocks[name, size] = llm.engine.info.num_blocks
            llm.engine.close()
    assert blocks["llama", 1] == blocks["llama", 2] == blocks["llama", 4]
    assert blocks["mistral", 1] == blocks["mistral", 2] == 2 * blocks["mistral", 4]


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


# --- the processes --------------------------------------------------------------------------------------------------


def rank_processes(parent: int | None = None) -> dict[int, int]:
    """Return the process ids of the ranks that ``parent``, or this process, has started, by the rank's number."""
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            argv = (directory / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has just ended
            continue
        if b"engine.worker.rank" in argv and int(argv[-3]) == (parent or os.getpid()):
            found[int(argv[-5])] = int(directory.name)
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@dataclass
class Ranks:
    """An engine whose ranks are processes, and their ids by number."""

    llm: LLM
    processes: dict[int, int]

    @classmethod
    def start(cls, path: str, size: int) -> Ranks:
        before = set(rank_processes().values())
        llm = LLM(path, tensor_parallel_size=size, **OPTIONS)
        processes = {number: pid for number, pid in rank_processes().items() if pid not in before}
        assert sorted(processes) == list(range(1, size))
        return cls(llm, processes)

    @property
    def are_gone(self) -> bool:
        return not set(self.processes.values()) & set(rank_processes().values())


@pytest.fixture(scope="module")
def two(checkpoint: Callable[[str], str]) -> Iterator[Ranks]:
    ranks = Ranks.start(checkpoint("qwen3"), 2)
    yield ranks
    ranks.llm.engine.close()
    assert ranks.are_gone


@pytest.fixture(scope="module")
def four(checkpoint: Callable[[str], str]) -> Iterator[Ranks]:
    ranks = Ranks.start(checkpoint("qwen3"), 4)
    yield ranks
    ranks.llm.engine.close()
    assert ranks.are_gone


def test_two_engines_at_once_do_not_collide(two: Ranks, four: Ranks, checkpoint: Callable[[str], str]) -> None:
    """nano-vllm's ranks met at port 2333 and in one shared memory: a second engine found the first one's."""
    expected = answer(LLM(checkpoint("qwen3"), **OPTIONS))
    answers: dict[int, Answers] = {}

    def run(ranks: Ranks) -> None:
        answers[len(ranks.processes) + 1] = answer(ranks.llm)

    threads = [threading.Thread(target=run, args=(ranks,)) for ranks in (two, four)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check_equal(answers[2], expected)
    check_equal(answers[4], expected)


def test_a_rank_killed_in_mid_step_ends_the_engine(four: Ranks) -> None:
    def kill_soon() -> None:
        time.sleep(0.5)
        os.kill(four.processes[2], signal.SIGKILL)

    killer = threading.Thread(target=kill_soon)
    killer.start()
    started = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"rank 2 of 4 was killed by SIGKILL"):
        four.llm.generate({"prompt_token_ids": [5, 6, 7]}, ENDLESS, use_tqdm=False)
    assert time.monotonic() - started < 10
    killer.join()
    wait_until(lambda: four.are_gone)
    assert four.llm.engine.stats().num_used_blocks == 0
    with pytest.raises(EngineDeadError, match=r"rank 2 of 4"):  # and from now on
        four.llm.generate({"prompt_token_ids": [5, 6, 7]}, ENDLESS, use_tqdm=False)


def is_unhealthy(runner: Any) -> bool:
    try:
        runner.check_health()
    except EngineDeadError:
        return True
    return False


def test_a_rank_killed_while_idle_shows_at_once_and_ends_the_engine_at_the_next_step(two: Ranks) -> None:
    assert not is_unhealthy(two.llm.engine.runner)
    os.kill(two.processes[1], signal.SIGTERM)
    started = time.monotonic()
    wait_until(lambda: is_unhealthy(two.llm.engine.runner))
    with pytest.raises(EngineDeadError, match=r"rank 1 of 2 was killed by signal 15; restart the engine"):
        two.llm.generate({"prompt_token_ids": [5, 6, 7]}, ENDLESS, use_tqdm=False)
    assert time.monotonic() - started < 10
    wait_until(lambda: two.are_gone)


async def test_the_async_engine_reports_a_dead_rank(checkpoint: Callable[[str], str]) -> None:
    before = set(rank_processes().values())
    config = EngineConfig.from_options(checkpoint("llama"), OPTIONS | {"tensor_parallel_size": 2})
    engine = AsyncEngine.from_config(config)
    (pid,) = set(rank_processes().values()) - before

    async def kill_at_first_token() -> None:
        async for _ in engine.generate(EngineRequest("a", [5, 6, 7], ENDLESS)):
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(EngineDeadError, match=r"rank 1 of 2 was killed by SIGKILL"):
        await kill_at_first_token()
    with pytest.raises(EngineDeadError, match=r"rank 1 of 2"):
        engine.check_health()
    await engine.shutdown()
    assert pid not in rank_processes().values()


def test_a_rank_that_cannot_load_ends_the_engine_with_its_error(
    checkpoint: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is given an intact copy, so that only rank 1 stumbles."""
    import engine.worker.model_worker as module

    load, intact = module.load_decoder, checkpoint("llama")
    weights = load_file(Path(intact) / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((Path(intact) / "config.json").read_text())
    monkeypatch.setattr(module, "load_decoder", lambda path, *args, **options: load(intact, *args, **options))
    before = set(rank_processes().values())
    with pytest.raises(ModelLoadError, match=r"lacks the tensor 'model\.norm\.weight'"):
        LLM(str(tmp_path), tensor_parallel_size=2, **OPTIONS)
    assert set(rank_processes().values()) == before


SCRIPT = """
from engine.llm import LLM
from engine.sampling_params import SamplingParams
llm = LLM({path!r}, tensor_parallel_size=2, **{options!r})
llm.generate({{"prompt_token_ids": [5, 6, 7]}}, SamplingParams(max_tokens=3), use_tqdm=False)
print("ready", flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["raise SystemExit('on purpose')", "import time; time.sleep(100)"])
def test_no_process_is_left_when_the_interpreter_ends(
    checkpoint: Callable[[str], str], end: str, tmp_path: Path
) -> None:
    """By an error of the user's script, or by SIGKILL; the script comes from stdin, so nobody can import it again."""
    program = SCRIPT.format(path=checkpoint("qwen3"), options=OPTIONS, end=end)
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(program)
        process.stdin.close()
        assert process.stdout.readline() == "ready\n"
        if "sleep" in end:
            assert sorted(rank_processes(process.pid)) == [1]
            process.kill()
        assert process.wait(30) in (1, -signal.SIGKILL)
        wait_until(lambda: not rank_processes(process.pid))
    wait_until(lambda: not list(tmp_path.iterdir()))
