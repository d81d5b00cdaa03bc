"""CUDA graphs on a simulated GPU: what is captured when, what a decode launches, and what memory they take.

All other tests of this folder that do not set ``enforce_eager`` replay graphs too, and compare their answers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler_output import SchedulerOutput
from engine.worker.graphs.batch_shape import BatchShape
from tests.engine.checkpoints import build_model, save_checkpoint
from tests.gpu_rehearsal.graphs import GRAPH_BYTES
from tests.gpu_rehearsal.planting import plant
from tests.gpu_rehearsal.rehearsal import Rehearsal

FORWARD, EMBEDDED = "engine.models.decoder.decoder:Decoder.forward", "self.embed_tokens(token_ids)"
A_STEP = 9  # most launches: the copy, the replay, and what follows the graph, logits and sampling
OF_TABLES = 3  # more: the changes of the block tables
OF_OVERLAP = 1  # more: the tokens of the last step are put into the inputs


class Steps:
    """Counts an engine's launches and replays, step by step."""

    def __init__(self, gpu: Rehearsal, llm: LLM) -> None:
        self.launches: dict[tuple[int, ...], int] = {}  # by the tokens of the sequences: of the last such step
        self.replays: dict[tuple[int, ...], int] = {}
        self._llm = llm
        name = "start" if llm.engine.config.async_scheduling else "run"
        compute = getattr(llm.engine.runner, name)

        def counted(output: SchedulerOutput, *args: object) -> object:
            launches, replays = gpu.machine.num_launches, gpu.machine.num_replays
            step = compute(output, *args)
            kind = tuple(output.num_new_tokens)
            self.launches[kind] = gpu.machine.num_launches - launches
            self.replays[kind] = gpu.machine.num_replays - replays
            return step

        setattr(llm.engine.runner, name, counted)

    def generate(self, num_seqs: int, prompt_len: int = 3) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        prompts: Any = [{"prompt_token_ids": [5, 6 + i, 7] * (prompt_len // 3)} for i in range(num_seqs)]
        self._llm.generate(prompts, params, use_tqdm=False)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Models of one and of two layers."""
    models = [build_model("qwen3", num_hidden_layers=layers, max_position_embeddings=40_000) for layers in (1, 2)]
    return [Path(save_checkpoint(model, tmp_path_factory.mktemp("qwen3"))) for model in models]


def start(gpu: Rehearsal, path: Path, **options: Any) -> LLM:
    return gpu.start(str(path), dtype="bfloat16", skip_tokenizer_init=True, **options)


def shapes(llm: LLM) -> list[BatchShape]:
    return llm.engine.runner.workers.local.graphs._graphs.shapes  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("overlaps", [False, True])
def test_layers_add_no_launches_to_decodes_and_prompts(checkpoints: list[Path], gpu: Rehearsal, overlaps: bool) -> None:
    seen = []
    for path in checkpoints:
        steps = Steps(gpu, start(gpu, path, async_scheduling=overlaps))
        for num_seqs in (1, 3, 16):
            steps.generate(num_seqs)
        seen.append(steps)
    single, two = seen
    assert single.launches == two.launches
    for num_seqs in (1, 3, 16):
        prompts, decodes = (3,) * num_seqs, (1,) * num_seqs
        assert single.replays[prompts] == single.replays[decodes] == 1
        assert single.launches[decodes] <= A_STEP + OF_OVERLAP * overlaps
        assert single.launches[prompts] <= A_STEP + OF_TABLES
    assert set(single.replays.values()) == set(two.replays.values()) == {1}
    gpu.machine.check()


def test_a_mixed_step_is_replayed_up_to_a_size(
    checkpoints: list[Path], gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(gpu, start(gpu, checkpoints[0], max_num_batched_tokens=32))
    steps.generate(3, prompt_len=30)
    mixed = [kind for kind in steps.replays if 1 in kind and max(kind) > 1]
    assert mixed
    assert set(steps.replays.values()) == {1}
    assert all(steps.launches[kind] <= A_STEP + OF_TABLES for kind in mixed)
    gpu.machine.check()
    monkeypatch.setattr("engine.worker.step_graphs.StepGraphs._max_chunk_tokens", 60)
    steps = Steps(gpu, start(gpu, checkpoints[0], max_num_batched_tokens=128, enable_prefix_caching=False))
    steps.generate(1, prompt_len=60)
    steps.generate(1, prompt_len=63)
    assert (steps.replays[60,], steps.replays[63,]) == (1, 0)
    gpu.machine.check()


def test_every_size_is_captured_before_the_engine_serves(checkpoints: list[Path], gpu: Rehearsal) -> None:
    llm = start(gpu, checkpoints[0], max_num_seqs=13)
    num_bytes = gpu.machine.graph_bytes
    assert num_bytes == len(shapes(llm)) * GRAPH_BYTES  # those of the trial are gone
    steps = Steps(gpu, llm)
    for num_seqs in range(1, 14):
        steps.generate(num_seqs)
        assert steps.replays[(1,) * num_seqs] == 1
    assert gpu.machine.graph_bytes == num_bytes
    gpu.machine.check()  # no step has compiled a kernel


def test_the_graphs_memory_is_left_out_of_the_cache(checkpoints: list[Path], gpu: Rehearsal) -> None:
    options = {
        "num_blocks": None,
        "max_num_seqs": 13,
        "max_model_len": 40_000,
    }  # the cache could use more than there is
    num_blocks = {}
    for enforce_eager in (True, False):
        llm = start(gpu, checkpoints[0], enforce_eager=enforce_eager, **options)
        num_blocks[enforce_eager] = llm.engine.info.num_blocks
        num_graphs = 0 if enforce_eager else len(shapes(llm))
        bytes_per_block = llm.engine.runner.workers.local.shard.page_sizes.block  # type: ignore[attr-defined]
        del llm
    left_out = (num_blocks[True] - num_blocks[False]) * bytes_per_block
    assert abs(left_out - num_graphs * GRAPH_BYTES) <= bytes_per_block


@pytest.mark.parametrize("options", [{"enforce_eager": True}, {"tensor_parallel_size": 2}], ids=["option", "ranks"])
def test_eager_decodes(options: dict[str, Any], checkpoints: list[Path], gpu: Rehearsal) -> None:
    steps = Steps(gpu, start(gpu, checkpoints[0], **options))
    steps.generate(2)
    assert set(steps.replays.values()) == {0}
    assert gpu.machine.graph_bytes == 0
    gpu.machine.check()


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("hidden.sum().item()", "_local_scalar_dense"),
        ("torch.cuda.current_stream().synchronize()", "Stream.synchronize"),
        ("torch.zeros(3).pin_memory()", "an allocation of pinned memory"),
        ("torch.zeros(3).to(hidden.device)", "a copy from the host"),
        ("hidden.to('cpu', non_blocking=True)", "a copy to the host"),
    ],
)
def test_what_a_capture_must_not_do(
    fault: str, what: str, checkpoints: list[Path], gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = plant(monkeypatch, FORWARD, EMBEDDED, f"{fault} if torch.cuda.is_current_stream_capturing() else None")
    assert line
    with pytest.raises(ConfigError, match="not permitted when stream is capturing: " + re.escape(what)):
        start(gpu, checkpoints[0])
