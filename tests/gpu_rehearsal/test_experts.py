"""Models with experts on a simulated GPU: the CPU's answers, one wait and few launches a step, and no compilation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu.parts.kernels import experts as check
from benchmarks.gpu.sizes import TINY
from benchmarks.gpu.timing.floors import Limits
from engine.errors import ConfigError
from engine.llm import LLM
from tests.engine.checkpoints import build_model, save_checkpoint
from tests.gpu_rehearsal.kernel_contracts import ContractError
from tests.gpu_rehearsal.machine import RehearsalError
from tests.gpu_rehearsal.planting import plant
from tests.gpu_rehearsal.rehearsal import Rehearsal
from tests.gpu_rehearsal.scenarios import OPTIONS, PARAMS, VOCAB_SIZE, Scenario, answers, generate, watch
from tests.gpu_rehearsal.test_graphs import A_STEP, Steps
from tests.gpu_rehearsal.test_launches_a_step import launches_of_a_decode

# Launches: 7 as of any layer, the router's product, the choice and its tiles, two products, the sum of the experts.
# With more than 64 tokens the choice and the tiles are two.
A_LAYER = 12
SHAPE = {"num_hidden_layers": 2, "vocab_size": VOCAB_SIZE}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": SHAPE | {"mlp_only_layers": []},
    "qwen2_moe": SHAPE,  # with a shared expert, after a dense layer
    "mixtral": SHAPE,
}
# Steps of one token, of several, and of more than the 64 that one kernel routes.
SCENARIO = Scenario([PARAMS[name] for name in ("greedy", "drawn", "logprobs", "three answers")], [30, 1, 150, 17])


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the directories of the checkpoints by family, and of Qwen3-MoE with one layer."""
    models = {family: build_model(family, **options) for family, options in MIXTURES.items()}
    models["one layer"] = build_model("qwen3_moe", **(MIXTURES["qwen3_moe"] | {"num_hidden_layers": 1}))
    return {name: save_checkpoint(model, tmp_path_factory.mktemp("experts")) for name, model in models.items()}


@pytest.fixture(scope="module")
def expected(paths: dict[str, str]) -> dict[str, Any]:
    """Return the CPU's answers; made before a test simulates the GPU."""
    options = {**OPTIONS, "device": "cpu", "skip_tokenizer_init": True}
    return {family: answers(generate(LLM(paths[family], **options), SCENARIO)) for family in MIXTURES}


def start(gpu: Rehearsal, path: str, **options: Any) -> LLM:
    return gpu.start(path, skip_tokenizer_init=True, **options)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_moe", {}),
        ("qwen3_moe", {"enforce_eager": True}),
        ("qwen3_moe", {"batch_invariant": True}),
        ("qwen2_moe", {}),
        ("qwen2_moe", {"tensor_parallel_size": 2}),
        ("mixtral", {}),
    ],
)
def test_answers_are_those_of_the_cpu(
    family: str, options: dict[str, Any], paths: dict[str, str], expected: dict[str, Any], gpu: Rehearsal
) -> None:
    llm = start(gpu, paths[family], **options)
    seen = watch(llm.engine, gpu.machine)
    assert answers(generate(llm, SCENARIO)) == expected[family]
    assert {"mixed", "decode"} <= set(seen.steps)
    assert set(seen.waits) == {1}
    assert {"route_kernel", "group_kernel", "grouped_linear_kernel", "combine_kernel"} <= set(gpu.launches.counts)
    gpu.machine.check()  # no step has waited otherwise, or compiled a kernel


def test_launches_of_an_eager_decode(paths: dict[str, str], gpu: Rehearsal) -> None:
    llms = [start(gpu, paths[name], dtype="bfloat16", enforce_eager=True) for name in ("one layer", "qwen3_moe")]
    for num_seqs in (1, 4):
        single, two = (launches_of_a_decode(gpu, llm, num_seqs) for llm in llms)
        assert two - single <= A_LAYER, f"a layer makes {two - single} launches"
        assert two <= 10 * 2 + 20
    gpu.machine.check()


def test_a_graph_holds_the_experts(paths: dict[str, str], gpu: Rehearsal) -> None:
    seen = []
    for name in ("one layer", "qwen3_moe"):
        steps = Steps(gpu, start(gpu, paths[name], dtype="bfloat16"))
        for num_seqs in (3, 16):
            steps.generate(num_seqs)
            assert steps.replays[(1,) * num_seqs] == 1
        seen.append(steps.launches[1, 1, 1])
    assert seen[0] == seen[1] <= A_STEP
    gpu.machine.check()


@pytest.mark.parametrize("options", [{"enforce_eager": True}, {"tensor_parallel_size": 2}])
@pytest.mark.parametrize("backend", ["flash_attn", "flash_attn_3"])
def test_a_backend_that_warms_up_nothing(
    backend: str, options: dict[str, Any], paths: dict[str, str], gpu_with_flash_attn: Rehearsal
) -> None:
    """The largest step has compiled what a decode launches."""
    gpu = gpu_with_flash_attn
    llm = start(
        gpu, paths["qwen3_moe"], dtype="bfloat16", attention_backend=backend, block_size=256, num_blocks=32, **options
    )
    generate(llm, SCENARIO)
    assert gpu.launches.counts["group_kernel"]
    gpu.machine.check()


def run(gpu: Rehearsal, path: str) -> None:
    """Answer the scenario, and check the steps."""
    generate(start(gpu, path), SCENARIO)
    gpu.machine.check()


ROUTES, ROUTED = "kernels.experts.triton.routing:route_triton", "routes = Routes.empty("
EXPERTS, CHOSEN = "kernels.experts.triton.experts:experts_triton", "routes = route_triton("


@pytest.mark.parametrize(
    ("target", "after", "fault", "problem"),
    [
        (ROUTES, ROUTED, "logits = logits[:, ::1].t().contiguous().t()", "is not the stride of the logits"),
        (ROUTES, ROUTED, "object.__setattr__(routes, 'tile_experts', routes.tile_experts[1:])", "tiles, and there may"),
        (ROUTES, ROUTED, "object.__setattr__(routes, 'ids', routes.ids.long())", "ids is torch.int64"),
        (EXPERTS, CHOSEN, "routes.pairs.add_(10**6)", "pairs leaves"),
        (EXPERTS, CHOSEN, "routes.tile_experts.add_(50)", "a tile is of expert"),
        (EXPERTS, CHOSEN, "down = down.half()", "weights is torch.float16"),
        (EXPERTS, CHOSEN, "object.__setattr__(routes, 'weights', routes.weights.half())", "weights is torch.float16"),
        (EXPERTS, CHOSEN, "routes.num_pairs.sum().item()", "waits for the GPU|not permitted when stream is capturing"),
    ],
)
def test_a_planted_fault(
    target: str,
    after: str,
    fault: str,
    problem: str,
    paths: dict[str, str],
    gpu: Rehearsal,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch, target, after, fault)
    if target == ROUTES:  # which another module has imported by name
        from kernels.experts.triton import experts as experts_triton
        from kernels.experts.triton import routing as experts_routing_triton

        monkeypatch.setattr(experts_triton, "route_triton", experts_routing_triton.route_triton)
    with pytest.raises((ContractError, RehearsalError, ConfigError), match=problem):
        run(gpu, paths["one layer"])


def test_the_check_for_gpus(gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device=None: generator())  # that of a GPU asks the driver
    monkeypatch.setattr(check, "TIMED", (1, 100))
    monkeypatch.setattr(check, "median_seconds", lambda launch, device: launch() or 1.0)
    faults: list[str] = []
    figures: dict[str, Any] = {}
    part: Any = SimpleNamespace(
        device=torch.device("cuda", 0), on_gpu=True, sizes=TINY, limits=Limits(copy_gb_s=1.0, bf16_tflop_s=1.0)
    )
    part.record, part.fault = figures.__setitem__, faults.append
    check.run(part)
    assert not faults
    assert {f"{num_tokens} tokens" for num_tokens in check.TIMED} < set(figures)
    assert {"route_kernel", "group_kernel", "grouped_linear_kernel", "combine_kernel"} == set(gpu.launches.counts)
