"""Rank processes: when one dies, all end with an error that names it, and no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import EngineDeadError, ModelLoadError
from engine.llm import LLM
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.worker.ranks import rank_process
from tests.engine.async_streams import stream
from tests.engine.worker.parallel_answers import OPTIONS, Answers, answer, check_equal
from tests.waiting import HANG_S, until

ENDLESS = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)


def rank_processes(parent: int | None = None) -> dict[int, int]:
    """Return the process ids of the ranks that ``parent``, or this process, has started, by the rank's number."""
    seen = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            argv = (directory / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has just ended
            continue
        if b"engine.worker.ranks.rank_process" in argv and int(argv[-3]) == (parent or os.getpid()):
            seen[int(argv[-5])] = int(directory.name)
    return seen


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


@pytest.mark.long
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


@pytest.mark.long
def test_a_rank_killed_in_mid_step_ends_the_engine(four: Ranks) -> None:
    def kill_in_mid_step() -> None:
        engine = four.llm.engine
        until(lambda: engine.meter.load().num_running, "the request runs")
        os.kill(four.processes[2], signal.SIGKILL)

    killer = threading.Thread(target=kill_in_mid_step)
    killer.start()
    with pytest.raises(EngineDeadError, match=r"rank 2 of 4 was killed by SIGKILL"):
        four.llm.generate({"prompt_token_ids": [5, 6, 7]}, ENDLESS, use_tqdm=False)
    killer.join()
    until(lambda: four.are_gone, "no process is left")
    assert four.llm.engine.meter.stats().num_used_blocks == 0
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
    until(lambda: is_unhealthy(two.llm.engine.runner), "its death shows")
    with pytest.raises(EngineDeadError, match=r"rank 1 of 2 was killed by signal 15; restart the engine"):
        two.llm.generate({"prompt_token_ids": [5, 6, 7]}, ENDLESS, use_tqdm=False)
    until(lambda: two.are_gone, "no process is left")


@pytest.mark.long
async def test_the_async_engine_reports_a_dead_rank(checkpoint: Callable[[str], str]) -> None:
    before = set(rank_processes().values())
    config = EngineConfig.from_options(checkpoint("llama"), OPTIONS | {"tensor_parallel_size": 2})
    engine = AsyncEngine(Engine.from_config(config))
    (pid,) = set(rank_processes().values()) - before

    async def kill_at_first_token() -> None:
        async for _ in stream(engine, EngineRequest("a", [5, 6, 7], ENDLESS)):
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(EngineDeadError, match=r"rank 1 of 2 was killed by SIGKILL"):
        await kill_at_first_token()
    with pytest.raises(EngineDeadError, match=r"rank 1 of 2"):
        engine.check_health()
    await engine.shutdown()
    assert pid not in rank_processes().values()


@pytest.mark.long
def test_a_rank_that_cannot_load_ends_the_engine_with_its_error(
    checkpoint: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is given an intact copy, so that only rank 1 stumbles."""
    import engine.worker.model_shard as module

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


@pytest.mark.parametrize(
    "end", [pytest.param("raise SystemExit('on purpose')", marks=pytest.mark.long), "import time; time.sleep(100)"]
)
def test_no_process_is_left_when_the_interpreter_ends(
    checkpoint: Callable[[str], str], end: str, tmp_path: Path
) -> None:
    """By an error in the user's script, or by SIGKILL; the script comes from stdin, so no process can import it."""
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
        assert process.wait(HANG_S) in (1, -signal.SIGKILL)
        until(lambda: not rank_processes(process.pid), "no process is left")
    until(lambda: not list(tmp_path.iterdir()), "no file is left")


class OpenSocket:
    """A poller of a socket whose other end a forked copy of rank 0's process keeps open."""

    num_polls = 0

    def register(self, fd: int, events: int) -> None:
        """Do nothing: no event comes."""

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        self.num_polls += 1
        assert self.num_polls <= 3, "the rank outlives rank 0's process"
        return []


def test_a_forked_copy_of_rank_0_does_not_keep_the_ranks_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank_0, init, directory = 4242, 1, tmp_path / "of the engine"
    directory.mkdir()
    parents, exit_codes = iter([rank_0, rank_0, init]), []
    monkeypatch.setattr(rank_process, "select", SimpleNamespace(poll=OpenSocket))
    monkeypatch.setattr(rank_process, "os", SimpleNamespace(getppid=lambda: next(parents), _exit=exit_codes.append))
    rank_process._end_with_parent(3, rank_0, str(directory))
    assert exit_codes == [0]
    assert not directory.exists()
