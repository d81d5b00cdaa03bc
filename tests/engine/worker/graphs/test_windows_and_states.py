"""Replayed decodes of models with pages of windows, and with recurrent layers, compute what eager ones compute."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.kv.block_tables import BlockTables, TableChanges
from engine.kv.page_maps import PageMap
from engine.llm import LLM
from engine.worker.graphs.batch_graphs import BatchGraphs
from engine.worker.graphs.static_inputs import MAX_CHANGES, StaticInputs
from engine.worker.step_graphs import StepGraphs
from engine.worker.step_plan import ModelInput, RecurrentPlan, WindowPlan
from tests.engine.checkpoints import build_model, save_checkpoint
from tests.engine.models.decoder.gemma.gemma_families import save_gemma_model
from tests.engine.models.decoder.recurrent.recurrent_families import save_recurrent_model
from tests.engine.worker.graphs.checked_steps import Checks, generate
from tests.engine.worker.graphs.conftest import OPTIONS
from tests.engine.worker.graphs.recorded_graphs import RecordingDevice

WINDOWS = "windows"  # of 12 tokens, in the second of two layers
# A convolution alone, the gated delta rule, Mamba 2 alone, and with attention in the same layer.
HEADS = "gemma-4-e4b"  # layers of two sizes of heads, of which the last share keys and values
RECURRENT = ["lfm2", "qwen3.5", "mamba2", "falcon-h1"]
OF_WINDOWS = {"padding", "changed tables", "block_copies", "changed pages", "page copies"}
OF_STATES = {"padding", "state_copies"}


@pytest.fixture(scope="module")
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Each model in turn."""
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == WINDOWS:
        return save_checkpoint(build_model("qwen2", sliding_window=12), directory)
    if request.param == HEADS:
        return save_gemma_model(HEADS, directory)[1]
    return save_recurrent_model(request.param, directory)[1]


def start(path: str, **options: Any) -> LLM:
    return LLM(path, **(OPTIONS | options))


FEW = [WINDOWS, "lfm2"]
FURTHER = pytest.mark.exhaustive("replays of further families; CI has one of each kind of cache")
MORE = [pytest.param(name, marks=FURTHER) for name in RECURRENT if name not in FEW]
LONG = [pytest.param(HEADS, marks=pytest.mark.long)]


@pytest.mark.parametrize("path", [*FEW, *LONG, *MORE], indirect=True)
def test_poisoned_replays(path: str, device: RecordingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = start(path, max_num_seqs=4)
    checks = Checks(llm, device, monkeypatch)
    for num_requests in (1, 2, 6):
        generate(llm, num_requests, num_requests)
    cache = checks.worker.kv_cache
    assert {shape.num_decodes for shape in checks.shapes if not shape.num_chunks} == {1, 2, 4}
    assert any(shape.num_chunks for shape in checks.shapes)
    assert bool(cache.windows) != bool(cache.sizes.num_slots)
    assert set(checks.kinds) >= (OF_WINDOWS if cache.windows else OF_STATES)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(name, marks=pytest.mark.exhaustive("in CI test_poisoned_replays compares the same steps' logits"))
        for name in (WINDOWS, *RECURRENT)
    ],
    indirect=True,
)
def test_answers_are_those_of_eager_steps(path: str, device: RecordingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = generate(start(path), seed=5)
    assert device.num_replays > 20
    assert generate(start(path, async_scheduling=True), seed=5) == answers
    num_replays = device.num_replays
    monkeypatch.setattr(StepGraphs, "are_used", False)
    assert generate(start(path), seed=5) == answers
    assert device.num_replays == num_replays


@pytest.mark.parametrize("path", FEW, indirect=True)
@pytest.mark.usefixtures("device")
def test_a_gpu_has_graphs_for_windows_and_states(path: str) -> None:
    llm: Any = start(path, max_num_seqs=1, num_blocks=2, max_model_len=8, max_num_batched_tokens=8)
    shard = llm.engine.runner.workers.local.shard
    shard.device = torch.device("cuda")
    assert StepGraphs(shard).why_eager is None


@pytest.mark.parametrize(
    ("num_changes", "num_saves", "is_captured"),
    [(0, 0, True), (2 + MAX_CHANGES, 0, True), (3 + MAX_CHANGES, 0, False), (0, 1, False)],
)
@torch.inference_mode()
def test_steps_that_have_a_graph(num_changes: int, num_saves: int, is_captured: bool) -> None:
    """Changes of a page map fit the slab, and a graph saves no state."""

    def forward(batch: ModelInput) -> torch.Tensor:
        return batch.token_ids[:, None].float()

    cpu = torch.device("cpu")
    page_maps = [PageMap(MAX_CHANGES + 5, cpu)]
    graphs = BatchGraphs(RecordingDevice(), forward, BlockTables(2, 3, cpu), 4, page_maps, has_states=True)
    graphs.capture()
    zeros = np.zeros(2, dtype=np.int32)
    changed = np.arange(num_changes, dtype=np.int32)
    plan: Any = SimpleNamespace(
        token_ids=np.array([8, 9]),
        positions=np.array([3, 4]),
        slot_mapping=np.array([5, 6]),
        seq_lens=np.array([4, 5], dtype=np.int32),
        table_rows=np.array([0, 1]),
        table_changes=TableChanges(np.array([0]), np.array([7], dtype=np.int32)),
        logit_indices=np.array([0, 1]),
        prompt_logit_indices=np.empty(0, dtype=np.int64),
        num_decodes=2,
        windows=[WindowPlan(np.array([1, 2]), changed.astype(np.int64), changed[::-1])],
        recurrent=RecurrentPlan(np.array([4, 3], dtype=np.int32), zeros[:2], zeros[:num_saves], zeros[:num_saves]),
    )
    graph = graphs.find(plan)
    assert (graph is not None) == is_captured
    if graph is not None:
        assert graph.inputs.load(plan).tolist() == [0, 1]
        batch = graph.inputs.model_input()
        assert batch.recurrent is not None
        assert (batch.windows[0].slot_mapping.tolist(), batch.recurrent.slots.tolist()) == ([1, 2], [4, 3])
        assert batch.windows[0].block_tables[0].tolist() == [num_changes - 8 if num_changes else -1, -1, -1]


Change = Callable[[StaticInputs, ModelInput], ModelInput]


def _none(inputs: StaticInputs, batch: ModelInput) -> ModelInput:
    return batch


def _slots_of_blocks(inputs: StaticInputs, batch: ModelInput) -> ModelInput:
    slots = batch.metadata.slot_mapping
    return replace(batch, windows=tuple(replace(window, slot_mapping=slots) for window in batch.windows))


def _tables_of_blocks(inputs: StaticInputs, batch: ModelInput) -> ModelInput:
    tables = batch.metadata.block_tables
    return replace(batch, windows=tuple(replace(window, block_tables=tables) for window in batch.windows))


def _state_of_padding(inputs: StaticInputs, batch: ModelInput) -> ModelInput:
    assert batch.recurrent is not None
    return replace(batch, recurrent=replace(batch.recurrent, slots=batch.recurrent.slots.clamp(min=0)))


def _states_of_no_step(inputs: StaticInputs, batch: ModelInput) -> ModelInput:
    assert batch.recurrent is not None
    return replace(batch, recurrent=replace(batch.recurrent, slots=torch.full_like(batch.recurrent.slots, -1)))


def _new_sequences(inputs: StaticInputs, batch: ModelInput) -> ModelInput:
    assert batch.recurrent is not None
    return replace(batch, recurrent=replace(batch.recurrent, starts=batch.recurrent.starts + 1))


OF_PAGES, OF_SLOTS = [_slots_of_blocks, _tables_of_blocks], [_state_of_padding, _states_of_no_step, _new_sequences]
PLANTED = [(WINDOWS, OF_PAGES[0]), ("qwen3.5", OF_SLOTS[0])]
FURTHER_FAULTS = [
    pytest.param(path, change, marks=pytest.mark.exhaustive("more faults of the same kinds, and none"))
    for path, changes in ((WINDOWS, (_none, *OF_PAGES[1:])), ("qwen3.5", (_none, *OF_SLOTS[1:])))
    for change in changes
]
FOUND = "not close|out of bounds"  # a block that is not a page


@pytest.mark.long
@pytest.mark.parametrize(("path", "change"), [*PLANTED, *FURTHER_FAULTS], indirect=["path"])
def test_a_planted_fault(path: str, change: Change, device: RecordingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with the pages of blocks or with the states of other sequences are found by the checks above."""
    model_input = StaticInputs.model_input
    monkeypatch.setattr(StaticInputs, "model_input", lambda inputs: change(inputs, model_input(inputs)))
    with nullcontext() if change is _none else pytest.raises((AssertionError, IndexError), match=FOUND):
        llm = start(path, max_num_seqs=4)
        Checks(llm, device, monkeypatch)
        generate(llm, seed=1, num_requests=9)


@pytest.mark.long
@pytest.mark.parametrize("path", [WINDOWS], indirect=True)
def test_changes_of_page_maps_that_are_lost(
    path: str, device: RecordingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = StaticInputs._write_changes

    def write_tables_alone(inputs: StaticInputs, start: int, counts: list[int]) -> None:
        write(inputs, start, [counts[0], 0])

    monkeypatch.setattr(StaticInputs, "_write_changes", write_tables_alone)
    llm = start(path, max_num_seqs=4)
    Checks(llm, device, monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        generate(llm, seed=1, num_requests=9)
