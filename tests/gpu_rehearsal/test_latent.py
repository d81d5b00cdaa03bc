"""Models with latent attention, dense and sparse, on a simulated GPU: the CPU's answers, waits, launches, graphs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu.parts.kernels import expanded as expanded_check
from benchmarks.gpu.parts.kernels import latent as check
from benchmarks.gpu.sizes import TINY
from benchmarks.gpu.timing.floors import Limits
from engine.errors import ConfigError
from engine.models.decoder import expanded_latents, latent_attention
from engine.models.decoder.expanded_latents import LatentPart
from kernels.attention.base import AttentionInputs
from kernels.attention.triton import indexer, sparse
from kernels.attention_metadata import AttentionMetadata
from tests.engine.models.decoder.latent.latent_families import LATENT_FAMILIES, save_latent_model
from tests.gpu_rehearsal import test_compilations as compilations
from tests.gpu_rehearsal.family_models import EAGER, GRAPHS, SCENARIO, TWO_RANKS, Models, check_steps, start
from tests.gpu_rehearsal.kernel_contracts import ContractError
from tests.gpu_rehearsal.machine import RehearsalError
from tests.gpu_rehearsal.planting import plant
from tests.gpu_rehearsal.rehearsal import Rehearsal
from tests.gpu_rehearsal.scenarios import PARAMS, VOCAB_SIZE, Scenario, answers, generate, watch
from tests.gpu_rehearsal.test_graphs import A_STEP, Steps
from tests.gpu_rehearsal.test_launches_a_step import launches_of_a_decode

DENSE = {"prefill_kernel", "split_decode_kernel"}
SPARSE = {"index_scores_kernel", "choose_kernel", "sparse_kernel"}
KERNELS = {"deepseek-v3": DENSE, "glm-5.2": SPARSE}  # whose second layer reads what the first one has chosen
PROMPTS = Scenario([PARAMS["greedy"]] * 2, [20, 5])
PUBLISHED: dict[str, Any] = {  # sizes of DeepSeek, in one layer
    "num_hidden_layers": 1,
    "max_position_embeddings": 16_384,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 64,
}
A_LAYER = {"youtu": 13, "glm-5": 42}  # launches of a layer, its feed-forward included


def _save(name: str, path: Path, **changes: Any) -> str:
    return save_latent_model(name, path, **({"vocab_size": VOCAB_SIZE} | changes))[1]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(_save, tmp_path_factory)


@pytest.fixture
def case(request: pytest.FixtureRequest, models: Models) -> tuple[str, str, Any]:
    """Return a model's name, its path and the CPU's answers."""
    path = models.path(request.param)
    return request.param, path, models.expected(path, SCENARIO)


@pytest.mark.parametrize("case", KERNELS, indirect=True)
def test_answers_are_those_of_the_cpu(case: tuple[str, str, Any], gpu: Rehearsal) -> None:
    name, path, expected = case
    check_steps(gpu, path, expected, GRAPHS)
    attention = (DENSE | SPARSE) & set(gpu.launches.counts)
    assert attention == KERNELS[name]
    assert gpu.launches.counts["rotate_and_store_latents_kernel"]


@pytest.mark.exhaustive("what CI runs for a family with dense and one with sparse attention, for all of them")
@pytest.mark.parametrize("options", [GRAPHS, EAGER, TWO_RANKS], ids=["graphs", "eager", "two ranks"])
@pytest.mark.parametrize("case", LATENT_FAMILIES, indirect=True)
def test_answers_of_every_family(case: tuple[str, str, Any], options: dict[str, Any], gpu: Rehearsal) -> None:
    check_steps(gpu, *case[1:], options)


# --- long prefills ---------------------------------------------------------------------------------------------------

LONG = Scenario([PARAMS[name] for name in ("greedy", "drawn", "logprobs", "greedy")], [30, 150, 100, 75])
LONG_OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 256, **EAGER}
AT_ONCE: dict[str, Any] = {"index_topk": 256}  # an indexer chooses all tokens
EXPANDED = {"deepseek-v3": {}, "mistral-4": {}, "glm-5": AT_ONCE}


@pytest.fixture
def long_case(request: pytest.FixtureRequest, models: Models) -> tuple[str, Any]:
    """Return a model's path and the CPU's answers to long prompts."""
    path = models.path(request.param, **EXPANDED[request.param])
    return path, models.expected(path, LONG)


@pytest.mark.parametrize(
    ("long_case", "options"), [*((name, {}) for name in EXPANDED), ("deepseek-v3", TWO_RANKS)], indirect=["long_case"]
)
def test_long_prefills_are_expanded(
    long_case: tuple[str, Any], options: dict[str, Any], gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 71 queries on with these sizes; the second time with a part of each prompt from the cache."""
    path, expected = long_case
    batches: list[tuple[int, int]] = []  # sequences, heads
    attend = latent_attention.attend_expanded

    def watched(part: LatentPart, layer: AttentionInputs, *arguments: Any) -> None:
        batches.append((part.metadata.num_seqs, layer.num_heads))
        attend(part, layer, *arguments)

    monkeypatch.setattr(latent_attention, "attend_expanded", watched)
    llm = start(gpu, path, **LONG_OPTIONS, **options)
    assert batches, "the warm-up has not measured an expanded step"
    batches.clear()
    seen = watch(llm.engine, gpu.machine)
    assert answers(generate(llm, LONG)) == expected
    assert len(batches) > 2
    assert {heads for _, heads in batches} == {4 // options.get("tensor_parallel_size", 1)}
    assert max(count for count, _ in batches) > 1
    assert answers(generate(llm, LONG)) == expected
    assert {"mixed", "decode"} <= set(seen.steps)
    assert set(seen.waits) == {1}
    gpu.machine.check()


@pytest.mark.parametrize("long_case", ["deepseek-v3"], indirect=True)
def test_graphs_hold_no_expanded_prefill(
    long_case: tuple[str, Any], gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = long_case
    llm = start(gpu, path, **(LONG_OPTIONS | GRAPHS | {"enforce_eager": False}))
    monkeypatch.setattr(latent_attention, "attend_expanded", None)
    assert answers(generate(llm, LONG)) == expected
    assert gpu.machine.num_replays


# --- launches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", A_LAYER)
def test_launches_of_a_decode(name: str, models: Models, gpu: Rehearsal) -> None:
    no_experts = {"first_k_dense_replace": 2, "mlp_layer_types": None} if name == "glm-5" else {}
    paths = [models.path(name, num_hidden_layers=count, **no_experts) for count in (1, 2)]
    seen = []
    for path in paths:
        steps = Steps(gpu, start(gpu, path, dtype="bfloat16", **GRAPHS))
        steps.generate(3)
        assert steps.replays[1, 1, 1] == 1
        seen.append(steps.launches[1, 1, 1])
    assert seen[0] == seen[1] <= A_STEP
    single, two = (launches_of_a_decode(gpu, start(gpu, path, dtype="bfloat16", **EAGER), 3) for path in paths)
    assert two - single <= A_LAYER[name], f"a layer makes {two - single} launches"
    gpu.machine.check()


@pytest.mark.parametrize("name", ["youtu", "deepseek-v3.2"])
def test_no_step_compiles(name: str, models: Models, gpu: Rehearsal) -> None:
    gpu.launches.computes = False
    llm = compilations.start(gpu, models.path(name, **PUBLISHED))
    seen = watch(llm.engine, gpu.machine)
    for lengths in ([1], [2], [17], [300], [1200], [4200], [1] * 17, [5, 700, 1], [20] * 48, [3000, 4100]):
        compilations.run(llm, lengths)
    gpu.machine.check()
    assert seen.steps["decode"] > 20
    assert seen.steps["mixed"]


# --- planted faults --------------------------------------------------------------------------------------------------

COMPLETED = "kernels.layer_ops.triton.ops:TritonOps.rotate_and_store_latents", "rank = norm.weight.shape[0]"
STRIDES = "kernels.attention.triton.backend:_cache_strides", "slot_stride, head_stride ="
ATTENDED = "kernels.attention.triton.backend:TritonBackend.forward", "output = inputs.query.new_empty("
SCORED = "kernels.attention.triton.indexer:_scores", "tile = _TILE"
CHOSEN = "kernels.attention.triton.indexer:topk_slots_triton", "positions, sequences = _PLACES.get("
READ = "kernels.attention.triton.sparse:sparse_attention_triton", "query, slots ="
GATHERED = "engine.models.decoder.expanded_latents:attend_expanded", "gathered, rest = _gather("
PLACED = "engine.models.decoder.expanded_latents:_in_workspace", "own = part.metadata.block_tables"
LAUNCHED = "kernels.attention.triton.backend:_launch_prefills", "rows, rope_cache ="
WAITS = "waits for the GPU|not permitted when stream is capturing"


def mapped(change: str) -> str:
    return f"cache = LatentCache(cache.latents, cache.slot_mapping.{change})"


@pytest.mark.parametrize(
    ("place", "fault", "problem"),
    [
        (COMPLETED, "cache.slot_mapping.max().item()", WAITS),
        (COMPLETED, mapped("int()"), "slot_mapping is torch.int32"),
        (COMPLETED, mapped("add(10**6)"), "slot_mapping leaves the"),
        (COMPLETED, mapped("new_empty(0)"), "slot_mapping has shape"),
        (COMPLETED, "rotation.positions.add_(10**6)", "positions leaves the table"),
        (COMPLETED, "latent = latent.half()", "latent is torch.float16"),
        (COMPLETED, "rotated = rotated[:, :, : rope_dim - 2]", "constants .* do not match rotated"),
        (STRIDES, "return slot_stride, head_stride", "kv_head_stride is"),
        (STRIDES, "slot_stride += 1", "not the stride of the cache's slots"),
        (ATTENDED, "inputs = replace(inputs, value_cache=inputs.value_cache.clone())", "value_cache has shape"),
        (ATTENDED, "output = output[..., :-1]", "output has shape"),
    ],
)
def test_a_planted_fault(
    place: tuple[str, str], fault: str, problem: str, models: Models, gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, *place, fault)
    with pytest.raises((ContractError, RehearsalError, ConfigError), match=problem):
        run(gpu, models.path("youtu", num_hidden_layers=1))


@pytest.mark.parametrize(
    ("place", "fault", "problem"),
    [
        (SCORED, "weights = weights.half()", "weights is torch.float16"),
        (SCORED, "positions = positions.int()", "positions is torch.int32"),
        (SCORED, "scores = scores[:, :-1]", "scores has shape|scores is not contiguous"),
        (SCORED, "query = query[:, ::1].transpose(0, 1).contiguous().transpose(0, 1)[:, :4]", "constants|weights has"),
        (CHOSEN, "metadata.seq_lens.max().item()", WAITS),
        (CHOSEN, "positions = positions + 10**6", "positions leaves the"),
        (CHOSEN, "sequences = sequences + 10**6", "sequences leaves the"),
        (CHOSEN, "slots = slots.long()", "slots is torch.int64"),
        (READ, "slots.max().item()", WAITS),
        (READ, "slots = slots.long()", "topk_slots is torch.int64"),
        (READ, "slots = slots + 10**6", "topk_slots leaves the"),
        (READ, "slots = slots.flip(1)", "topk_slots leaves the .* then -1"),
        (READ, "query = query.half()", "latents is torch.float32"),
    ],
)
def test_a_planted_fault_of_sparse_attention(
    place: tuple[str, str], fault: str, problem: str, models: Models, gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, *place, fault)
    # Another module has imported it by name.
    monkeypatch.setattr("kernels.attention.triton.backend.sparse_attention_triton", sparse.sparse_attention_triton)
    with pytest.raises((ContractError, RehearsalError, ConfigError), match=problem):
        run(gpu, models.path("glm-5", num_hidden_layers=1))


@pytest.mark.parametrize(
    ("place", "fault", "problem"),
    [
        (GATHERED, "part.block_ids.max().item()", WAITS),
        (GATHERED, "gathered = gathered[..., :-2]", "key_cache has shape"),
        (PLACED, "tables += 10**6", "block_tables names a block outside"),
        (PLACED, "tables = tables[:, :-1]", "has a block table for"),
        (LAUNCHED, "rope_cache = rope_cache if rope_cache is None else rope_cache[..., :-2]", "rope_cache has shape"),
    ],
)
def test_a_planted_fault_of_expanded_latents(
    place: tuple[str, str], fault: str, problem: str, models: Models, gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, *place, fault)
    monkeypatch.setattr(latent_attention, "attend_expanded", expanded_latents.attend_expanded)
    with pytest.raises((ContractError, RehearsalError, ConfigError), match=problem):
        run(gpu, models.path("youtu", num_hidden_layers=1), LONG, **LONG_OPTIONS)


def run(gpu: Rehearsal, path: str, scenario: Scenario = PROMPTS, **options: Any) -> None:
    """Answer prompts, and check the steps."""
    generate(start(gpu, path, max_num_seqs=2, **options), scenario, max_tokens=2)
    gpu.machine.check()


@pytest.mark.parametrize("case", ["glm-5.2"], indirect=True)
def test_positions_that_a_graph_does_not_follow(
    case: tuple[str, str, Any], gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are computed before the capture, which so holds the positions of that time."""
    places, before = indexer._places, {}

    def uncaptured(metadata: AttentionMetadata, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not torch.cuda.is_current_stream_capturing():
            before[num_tokens] = places(metadata, num_tokens)
        return before[num_tokens]

    monkeypatch.setattr(indexer, "_places", uncaptured)
    assert answers(generate(start(gpu, case[1], **GRAPHS), SCENARIO)) != case[2]


# --- the check of a GPU -----------------------------------------------------------------------------------------------


def test_the_part_of_the_check(gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    """It launches every kernel of latent attention, and finds no fault."""
    generator, faults = torch.Generator, list[str]()
    monkeypatch.setattr(torch, "Generator", lambda device=None: generator())  # that of a GPU asks the driver
    monkeypatch.setattr(check, "serving_cases", lambda context: [])
    monkeypatch.setattr(check, "captured", lambda launch, device: launch)
    monkeypatch.setattr(check, "median_seconds", lambda launch, device: launch() is None or 1.0)
    part: Any = SimpleNamespace(
        device=torch.device("cuda", 0), on_gpu=True, sizes=TINY, limits=Limits(copy_gb_s=1.0, bf16_tflop_s=1.0)
    )
    part.fault, part.record = faults.append, lambda *_: None
    check.run(part)
    assert not faults
    assert set(gpu.launches.counts) >= DENSE | SPARSE


def test_the_part_that_compares_expanded_latents(gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    generator, faults, figures = torch.Generator, list[str](), dict[str, Any]()
    monkeypatch.setattr(torch, "Generator", lambda device=None: generator())
    monkeypatch.setattr(expanded_check, "captured", lambda launch, device: launch)
    monkeypatch.setattr(expanded_check, "median_seconds", lambda launch, device: launch() is None or 1.0)
    part: Any = SimpleNamespace(
        device=torch.device("cuda", 0), on_gpu=True, sizes=TINY, limits=Limits(copy_gb_s=1.0, bf16_tflop_s=1.0)
    )
    part.fault, part.record = faults.append, figures.__setitem__
    expanded_check.run(part)
    assert not faults
    assert 0 < figures["error, torch.float32"] < 0.5
    assert 0 < figures["error, torch.bfloat16"] < 1.0
    assert len(figures["summary"]) == 4
