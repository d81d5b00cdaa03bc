"""Models with recurrent layers on a simulated GPU: the CPU's answers, one wait a step, states that graphs follow."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu.parts.kernels import recurrent as check
from benchmarks.gpu.sizes import TINY
from benchmarks.gpu.timing.floors import Limits
from engine.errors import ConfigError, ModelLoadError
from engine.kv.page_maps import PageMap
from engine.llm import LLM
from tests.engine.checkpoints import build_model, save_checkpoint
from tests.engine.models.decoder.recurrent.recurrent_families import (
    RECURRENT_FAMILIES,
    build_recurrent_model,
    save_as_published,
)
from tests.gpu_rehearsal.family_models import EAGER, GRAPHS, SCENARIO, TWO_RANKS, Models, check_steps, start
from tests.gpu_rehearsal.kernel_contracts import ContractError
from tests.gpu_rehearsal.machine import RehearsalError
from tests.gpu_rehearsal.planting import plant
from tests.gpu_rehearsal.rehearsal import Rehearsal
from tests.gpu_rehearsal.scenarios import OPTIONS, PARAMS, VOCAB_SIZE, Scenario, answers, generate, watch
from tests.gpu_rehearsal.test_graphs import A_STEP, Steps
from tests.gpu_rehearsal.test_launches_a_step import launches_of_a_decode

KERNELS = {  # by the model of each kind of recurrence that CI runs: with experts, and attention in another layer
    "lfm2-moe": set(),
    "qwen3-next": {"delta_rule_kernel"},
    "nemotron-3-nano": {"scan_kernel"},
}
CHUNKED = {
    "qwen3-next": "delta_rule_chunks_kernel",
    "kimi-linear": "row_decays_chunks_kernel",
    "nemotron-3-nano": "scan_chunks_kernel",
}
NOT_SHARED = ("olmo-hybrid", "olmo-hybrid-rope")  # by ranks
DRAFTS: dict[str, Any] = {
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    "max_decode_slowdown": None,
}
PROMPTS = Scenario([PARAMS["greedy"]] * 2, [20, 5])
DRAFTED = Scenario([PARAMS[name] for name in ("greedy", "greedy", "drawn")], [64, 40], repeats=True)
LAYERS = {
    "lfm2": ["conv"] * 2,
    "qwen3.5": ["full_attention", "linear_attention", "linear_attention"],  # without attention it has no RoPE
    "mamba2": ["linear_attention"] * 2,
}
A_LAYER = {"lfm2": 16, "qwen3.5": 28, "mamba2": 27}  # launches of a recurrent layer, its feed-forward included
EVERY_OTHER = "what CI runs for a family of each recurrence, for all of them"


def _save(name: str, path: Path, **changes: Any) -> str:
    return save_as_published(build_recurrent_model(name, **({"vocab_size": VOCAB_SIZE} | changes)), path)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(_save, tmp_path_factory)


# The CPU's answers are made before a test simulates the GPU.
@pytest.fixture
def case(request: pytest.FixtureRequest, models: Models) -> tuple[str, str, Any]:
    """Return a model's name, its path and the CPU's answers."""
    path = models.path(request.param)
    return request.param, path, models.expected(path, SCENARIO)


@pytest.mark.parametrize("case", KERNELS, indirect=True)
def test_answers_are_those_of_the_cpu(case: tuple[str, str, Any], gpu: Rehearsal) -> None:
    name, path, expected = case
    check_steps(gpu, path, expected, GRAPHS)
    kernels = {"conv_sequence_kernel", "conv_other_tokens_kernel"} | KERNELS[name]
    assert kernels <= set(gpu.launches.counts)


@pytest.mark.parametrize("case", ["qwen3-next"], indirect=True)
def test_answers_without_graphs(case: tuple[str, str, Any], gpu: Rehearsal) -> None:
    check_steps(gpu, *case[1:], EAGER)


@pytest.mark.parametrize("options", [GRAPHS, EAGER], ids=["graphs", "eager"])
@pytest.mark.parametrize("case", ["qwen3-next"], indirect=True)
def test_answers_with_overlap(case: tuple[str, str, Any], options: dict[str, Any], gpu: Rehearsal) -> None:
    _, path, expected = case
    llm = start(gpu, path, async_scheduling=True, **options)
    for _ in range(2):
        assert answers(generate(llm, SCENARIO)) == expected
    assert bool(gpu.machine.num_replays) == (options == GRAPHS)
    gpu.machine.check()


@pytest.mark.parametrize("options", [GRAPHS, EAGER], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", CHUNKED)
def test_prompts_in_chunks(name: str, options: dict[str, Any], models: Models, gpu: Rehearsal) -> None:
    """In 16 bits, whose answers may differ from the CPU's: every launch keeps its contract, and no result is NaN."""
    outputs = generate(start(gpu, models.path(name), dtype="bfloat16", **options), SCENARIO)
    assert "abort" not in {answer.finish_reason for output in outputs for answer in output.outputs}
    assert {CHUNKED[name], "carry_states_kernel"} <= set(gpu.launches.counts)
    gpu.machine.check()


@pytest.mark.exhaustive(EVERY_OTHER)
@pytest.mark.parametrize("options", [GRAPHS, EAGER, TWO_RANKS], ids=["graphs", "eager", "two ranks"])
@pytest.mark.parametrize("case", list(RECURRENT_FAMILIES), indirect=True)
def test_answers_of_every_family(case: tuple[str, str, Any], options: dict[str, Any], gpu: Rehearsal) -> None:
    name, path, expected = case
    if name == "granite-4-h-moe" and options == TWO_RANKS:
        with pytest.raises(ConfigError, match="does not divide the model's 1 groups"):
            start(gpu, path, **options)
    elif name in NOT_SHARED and options == TWO_RANKS:
        with pytest.raises(ModelLoadError, match="tensor_parallel_size over 1 is not supported"):
            start(gpu, path, **options)
    elif name == "granite-4":  # it has no recurrent layer
        assert answers(generate(start(gpu, path, **options), SCENARIO)) == expected
        gpu.machine.check()
    else:
        check_steps(gpu, path, expected, options)


@pytest.fixture
def drafted(models: Models) -> tuple[str, Any]:
    path = models.path("mamba2", vocab_size=32, num_hidden_layers=1)  # few words, so that they repeat
    return path, models.expected(path, DRAFTED)


def test_rejected_drafts_leave_no_trace_in_states(drafted: tuple[str, Any], gpu: Rehearsal) -> None:
    path, expected = drafted
    llm = start(gpu, path, **GRAPHS, **DRAFTS)
    seen = watch(llm.engine, gpu.machine)
    assert answers(generate(llm, DRAFTED)) == expected
    assert seen.steps["drafts"]
    gpu.machine.check()


# --- launches --------------------------------------------------------------------------------------------------------


@pytest.fixture(
    params=["qwen3.5", *(pytest.param(name, marks=pytest.mark.exhaustive(EVERY_OTHER)) for name in ("lfm2", "mamba2"))]
)
def one_and_two(request: pytest.FixtureRequest, models: Models) -> tuple[str, list[str]]:
    """Return models of one and of two recurrent layers."""
    name, layers = request.param, LAYERS[request.param]
    changes: list[dict[str, Any]] = [{"num_hidden_layers": len(layers) - 1}, {"num_hidden_layers": len(layers)}]
    if name != "mamba2":  # whose config has no types of layers
        changes = [change | {"layer_types": layers[: change["num_hidden_layers"]]} for change in changes]
    return name, [models.path(name, **change) for change in changes]


def test_launches_of_a_decode(one_and_two: tuple[str, list[str]], gpu: Rehearsal) -> None:
    """A replay is one launch, however many layers it has; a layer without graphs makes few."""
    name, paths = one_and_two
    seen = []
    for path in paths:
        steps = Steps(gpu, start(gpu, path, dtype="bfloat16", max_num_seqs=4))
        steps.generate(3)
        assert steps.replays[1, 1, 1] == 1
        seen.append(steps.launches[1, 1, 1])
    assert seen[0] == seen[1] <= A_STEP
    single, two = (launches_of_a_decode(gpu, start(gpu, path, dtype="bfloat16", **EAGER), 3) for path in paths)
    assert two - single <= A_LAYER[name], f"a layer makes {two - single} launches"
    gpu.machine.check()


# --- planted faults --------------------------------------------------------------------------------------------------

OPS = "kernels.recurrent.triton.ops:TritonOps."
CONV, CONV_LINE = OPS + "causal_conv", "num_tokens, channels = inputs.shape"
DELTA, DELTA_LINE = OPS + "gated_delta_rule", "output = value.new_empty"
SCAN, SCAN_LINE = OPS + "selective_scan", "output = inputs.new_empty"
WAITS = "waits for the GPU|not permitted when stream is capturing"


def run(gpu: Rehearsal, path: str, **options: Any) -> None:
    """Answer short prompts, and check the steps."""
    generate(start(gpu, path, max_num_seqs=2, **options), PROMPTS, max_tokens=2)
    gpu.machine.check()


def changed(name: str, expression: str) -> str:
    return f"object.__setattr__(metadata, {name!r}, metadata.{expression})"


@pytest.mark.parametrize(
    ("target", "after", "fault", "problem"),
    [
        (CONV, CONV_LINE, "metadata.slots.sum().item()", WAITS),
        (CONV, CONV_LINE, "metadata.slots.cpu()", WAITS),
        (DELTA, DELTA_LINE, "state = state if int(metadata.slots[0]) else state", WAITS),
        (SCAN, SCAN_LINE, "state[metadata.slots[metadata.slots >= 0].long()]", WAITS),
        (CONV, CONV_LINE, changed("slots", "slots.long()"), "slots is torch.int64"),
        (CONV, CONV_LINE, changed("slots", "slots.add(10**6)"), "slots .* leaves the"),
        (CONV, CONV_LINE, changed("slots", "slots.clamp(min=0)"), "two sequences share a slot"),
        (CONV, CONV_LINE, changed("starts", "starts.bool()"), "starts is torch.bool"),
        (CONV, CONV_LINE, changed("cu_seqlens", "cu_seqlens[:-1]"), "cu_seqlens has shape"),
        (CONV, CONV_LINE, changed("save_tokens", "save_tokens.add(10**6)"), "save_tokens .* leaves the"),
        (
            CONV,
            CONV_LINE,
            changed("save_slots", "slots[: len(metadata.save_slots)]"),
            "save_slots .* (meets|must have)",
        ),
        (CONV, CONV_LINE, "inputs = inputs.t().contiguous().t()", None),  # refused by the operation itself
        (CONV, CONV_LINE, "state = state.half()", "state is torch.float16"),
        (DELTA, DELTA_LINE, "decay = decay.half()", "decay is torch.float16"),
        (DELTA, DELTA_LINE, "state = state[:, :, :, :-1].contiguous()", "state has shape"),
        (DELTA, DELTA_LINE, "key = key[:, :1]", "is not the stride of key|constants .* are not|key has shape"),
        (SCAN, SCAN_LINE, "queries = queries.double()", "queries is torch.float64"),
        (SCAN, SCAN_LINE, "skip = skip.repeat(2)[::2]", "skip is not contiguous"),
    ],
)
def test_a_planted_fault(
    target: str,
    after: str,
    fault: str,
    problem: str | None,
    models: Models,
    gpu: Rehearsal,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = models.path("qwen3.5") if target == DELTA else models.path("mamba2", num_hidden_layers=1)
    plant(monkeypatch, target, after, fault)
    with pytest.raises((ContractError, RehearsalError, ConfigError, AssertionError), match=problem):
        run(gpu, path, enforce_eager="slots" not in fault)


def test_slots_that_a_graph_does_not_follow(models: Models, gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph reads a copy that was made before its capture: every sequence is padding."""
    target = "engine.worker.graphs.static_inputs:StaticInputs._recurrent_metadata"
    plant(monkeypatch, target, "starts, save_tokens, save_slots = torch.zeros_like(slots)", "slots = slots.clone()")
    outputs = generate(start(gpu, models.path("mamba2", num_hidden_layers=1), max_num_seqs=2), PROMPTS)
    assert {answer.finish_reason for output in outputs for answer in output.outputs} == {"abort"}  # NaN


# --- windows with pages of their own ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """Return a model whose second layer has a window, and the CPU's answers."""
    model = build_model("qwen2", num_hidden_layers=2, sliding_window=40, vocab_size=VOCAB_SIZE)
    path = save_checkpoint(model, tmp_path_factory.mktemp("windows"))
    return path, answers(generate(LLM(path, **{**OPTIONS, "device": "cpu", "skip_tokenizer_init": True}), SCENARIO))


def test_a_graph_follows_the_pages_of_windows(windows: tuple[str, Any], gpu: Rehearsal) -> None:
    llm = start(gpu, windows[0], **GRAPHS)
    assert llm.engine.info.windows
    assert answers(generate(llm, SCENARIO)) == windows[1]
    gpu.machine.check()


def test_a_page_map_that_a_graph_does_not_follow(
    windows: tuple[str, Any], gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked up before the capture, which so holds the pages of that time."""
    look_up, before = PageMap.look_up, {}

    def uncaptured(page_map: PageMap, block_tables: torch.Tensor) -> torch.Tensor:
        key = id(page_map), block_tables.shape
        if key not in before or not torch.cuda.is_current_stream_capturing():
            before[key] = look_up(page_map, block_tables)
        return before[key]

    monkeypatch.setattr(PageMap, "look_up", uncaptured)
    assert answers(generate(start(gpu, windows[0], **GRAPHS), SCENARIO)) != windows[1]


# --- the check for GPUs ----------------------------------------------------------------------------------------------


def test_the_check_for_gpus(gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device=None: generator())  # that of a GPU asks the driver
    monkeypatch.setattr(check, "median_seconds", lambda launch, device: launch() or 1.0)
    monkeypatch.setattr(check, "TOLERANCES", {torch.bfloat16: 1e-2, torch.float32: 1e-4})
    monkeypatch.setattr(check, "_check_bits", lambda *_: None)  # of torch, which computes the kernels' results here
    faults: list[str] = []
    figures: dict[str, Any] = {}
    part: Any = SimpleNamespace(
        device=torch.device("cuda", 0), on_gpu=True, sizes=TINY, limits=Limits(copy_gb_s=1.0, bf16_tflop_s=1.0)
    )
    part.record, part.fault = figures.__setitem__, faults.append
    check.run(part)
    assert not faults
    assert figures["implementation"] == "TritonOps"
    assert set(gpu.launches.counts) == {
        *("conv_sequence_kernel", "conv_other_tokens_kernel", "delta_rule_kernel", "scan_kernel"),
        *("delta_rule_chunks_kernel", "row_decays_chunks_kernel", "scan_chunks_kernel", "carry_states_kernel"),
    }
