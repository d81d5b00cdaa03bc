"""A draft model on a simulated GPU: no answer changes, its passes are graphs, and a step with drafts waits twice."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoints import keep_layers
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from engine.scheduling.drafting.draft_model import ModelDrafts
from engine.sequence import Sequence
from tests.engine.checkpoints import build_model, save_checkpoint
from tests.engine.models.test_speculative_generation import DraftCounter
from tests.gpu_rehearsal.graphs import GRAPH_BYTES
from tests.gpu_rehearsal.rehearsal import Rehearsal
from tests.gpu_rehearsal.scenarios import DEMO_MODEL, SCENARIOS, answers, generate, watch

LENGTH = 4  # of drafts
A_PASS = 10  # most launches: the copy, the last tokens, the replay, logits, sampling, and the copy to the host
OF_A_BATCH = 3  # more, once: what the sampler prepares


def speculation(path: str, **options: Any) -> dict[str, Any]:
    """Return the options with a draft model, which drafts as much as it may however long the steps take."""
    config = {"method": "draft_model", "model": path, "num_speculative_tokens": LENGTH}
    return {"speculative_config": config, "max_decode_slowdown": None, **options}


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A draft model that is right now and then: one layer of the demo model."""
    path = tmp_path_factory.mktemp("draft")
    keep_layers(Path(DEMO_MODEL), path, 1)
    return str(path)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Models of one and of two layers."""
    models = [build_model("qwen3", num_hidden_layers=layers, max_position_embeddings=40_000) for layers in (1, 2)]
    return [save_checkpoint(model, tmp_path_factory.mktemp("qwen3")) for model in models]


def test_no_answer_changes(
    one_layer: str, cpu_answers: dict[str, object], gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any parameter, where steps overlap; a grammar makes the host wait for each token of the drafts."""
    drafts, scenario = DraftCounter(monkeypatch), SCENARIOS["every parameter"]
    gpu.machine.max_waits = 1 + LENGTH
    llm = gpu.start(**speculation(one_layer, async_scheduling=True))
    assert answers(generate(llm, scenario)) == cpu_answers["every parameter"]
    assert 0 < drafts.num_accepted < drafts.num_drafted
    gpu.machine.check()


def test_what_drafts_for_itself_is_right(
    cpu_answers: dict[str, object], gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keys and values follow the blocks through copies and swaps, and two waits are enough without grammars."""
    drafts, scenario = DraftCounter(monkeypatch), SCENARIOS["swapped"]
    gpu.machine.max_waits = 2
    llm = gpu.start(**speculation(DEMO_MODEL, **scenario.options, enforce_eager=True))
    seen = watch(llm.engine, gpu.machine)
    for _ in range(2):
        assert answers(generate(llm, scenario)) == cpu_answers["swapped"]
    assert drafts.num_accepted == drafts.num_drafted > 20
    assert {"swap_out", "swap_in", "block_copies", "drafts"} <= set(seen.steps)
    assert seen.waits[2] == seen.steps["drafts"]
    gpu.machine.check()


class Drafting:
    """Counts the launches of an engine's whole drafts; checks that each pass is a replay, and that they wait once."""

    def __init__(self, gpu: Rehearsal, llm: LLM) -> None:
        self.launches: list[int] = []
        model: Any = llm.engine.runner.draft_model
        draft = model.draft

        def counted(lengths: Mapping[Sequence, int]) -> ModelDrafts:
            machine = gpu.machine
            num_launches, num_replays, num_waits = machine.num_launches, machine.num_replays, len(machine.waits)
            drafts: ModelDrafts = draft(lengths)
            assert machine.num_replays - num_replays == len(drafts.passes) == max(lengths.values())
            assert len(machine.waits) - num_waits == 1
            assert all(seconds > 0 for _, seconds in drafts.passes)
            if len(drafts.passes) == LENGTH:
                self.launches.append(machine.num_launches - num_launches)
            return drafts

        model.draft = counted


def test_a_pass_is_a_replay(checkpoints: list[str], gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it takes as few launches with any number of layers, and no step compiles a kernel. Its cache may be FP8."""
    drafts = DraftCounter(monkeypatch)
    gpu.machine.max_waits = 2
    options = speculation(checkpoints[1], dtype="bfloat16", kv_cache_dtype="fp8", skip_tokenizer_init=True)
    llm = gpu.start(checkpoints[1], **options)
    drafting = Drafting(gpu, llm)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts: Any = [{"prompt_token_ids": [5, 6 + index, 7]} for index in range(3)]
    llm.generate(prompts, params, use_tqdm=False)
    assert drafts.num_accepted > 0.9 * drafts.num_drafted > 30  # rounding may decide
    assert len(drafting.launches) > 3
    assert min(drafting.launches[1:]) <= LENGTH * A_PASS + OF_A_BATCH
    gpu.machine.check()


def test_the_memory_of_weights_graphs_and_cache_is_measured(checkpoints: list[str], gpu: Rehearsal) -> None:
    """The graphs' is left out of the pool, and a block holds the draft model's keys and values."""
    options: dict[str, Any] = {"num_blocks": None, "max_num_seqs": 13, "max_model_len": 40_000, "dtype": "bfloat16"}
    sizes = {}
    for enforce_eager in (True, False):
        llm = gpu.start(
            checkpoints[0],
            skip_tokenizer_init=True,
            **speculation(checkpoints[1], enforce_eager=enforce_eager, **options),
        )
        worker: Any = llm.engine.runner.workers.local  # type: ignore[attr-defined]
        sizes[enforce_eager] = llm.engine.info.num_blocks, gpu.machine.graph_bytes  # those of the trial are gone
        bytes_per_block = worker.shard.page_sizes.block
        assert len(worker.kv_cache.layers) == 3
        assert enforce_eager or worker.draft_passes.num_graphs > 5
        del llm, worker
    num_bytes = sizes[False][1]
    assert num_bytes % GRAPH_BYTES == 0
    assert abs((sizes[True][0] - sizes[False][0]) * bytes_per_block - num_bytes) <= bytes_per_block
