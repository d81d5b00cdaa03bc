"""Prompts in chunks, as the Triton kernels compute them, against the reference token by token in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.recurrent.base import RecurrentOps
from kernels.recurrent.reference import ReferenceOps
from kernels.recurrent_metadata import RecurrentMetadata
from tests.kernels.recurrent.operations import Chunk, DeltaRule, Operation, Scan, Tokens, new_states, run_step

pytest.importorskip("triton")

from kernels.recurrent.triton import chunks, prompts
from kernels.recurrent.triton.ops import TritonOps
from kernels.recurrent.triton.prompts import MAX_SHORT, Tuning

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of the largest number
OPERATIONS: list[Operation] = [
    DeltaRule(),
    DeltaRule(num_key_heads=3, num_heads=3, key_dim=8, value_dim=40),
    Scan(),
    Scan(num_groups=1, num_heads=3, head_dim=5, state_size=24),
    DeltaRule(num_heads=2, key_dim=24, value_dim=12, decays_rows=True),
]
every_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=repr)


class _InChunks(TritonOps):
    """Operations that compute prompts of any dtype in chunks, also of float32."""

    def _max_length(self, metadata: RecurrentMetadata, tokens: torch.Tensor) -> int:
        return MAX_SHORT


@dataclass(frozen=True)
class _Prompt:
    """A sequence of a step: its tokens, whether they are its first, and after which of them its state is saved."""

    length: int
    starts: bool = True
    saves: tuple[int, ...] = ()


def _errors(actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> list[float]:
    """Return the largest differences of outputs and states, as shares of their largest numbers; NaN is infinite."""
    pairs = zip(actual, expected, strict=True)
    return [
        float((a.double() - e).abs().nan_to_num(torch.inf).max()) / max(float(e.abs().max()), 1e-9) for a, e in pairs
    ]


def _computed(
    ops: RecurrentOps, operation: Operation, tokens: Sequence[Tokens], prompts: Sequence[_Prompt], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of a step, and all states after it; the first slot is no sequence's."""
    count = len(prompts)
    states = new_states(operation, 1 + count + sum(len(prompt.saves) for prompt in prompts)).to(dtype)
    free = iter(range(1 + count, len(states)))
    chunks = [
        Chunk(of_prompt, count - index, starts=prompt.starts, saves={save: next(free) for save in prompt.saves})
        for index, (of_prompt, prompt) in enumerate(zip(tokens, prompts, strict=True))
    ]
    return torch.cat(run_step(ops, operation, states, chunks)), states


def _step_errors(
    operation: Operation,
    prompts: Sequence[_Prompt],
    tokens: Sequence[Tokens] | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    tokens = tokens or [operation.tokens(prompt.length, 10 * i, dtype) for i, prompt in enumerate(prompts)]
    exact = [tuple(values.double() for values in of_prompt) for of_prompt in tokens]
    actual = _computed(_InChunks(), operation, tokens, prompts, torch.float32)
    return _errors(actual, _computed(ReferenceOps(), operation, exact, prompts, torch.float64))


BATCH = [_Prompt(1, starts=False), _Prompt(1), _Prompt(70, False, (0, 31, 69)), _Prompt(16, True, (3,)), _Prompt(97)]


@pytest.fixture(autouse=True)
def _on_the_host(kernel_device: torch.device) -> None:
    if kernel_device.type != "cpu":
        pytest.skip("benchmarks/gpu/parts/kernels/recurrent.py compares prompts on a GPU")


@pytest.mark.parametrize("dtype", TOLERANCES)
@every_operation
def test_a_step_of_decodes_and_prompts(operation: Operation, dtype: torch.dtype) -> None:
    assert max(_step_errors(operation, BATCH, dtype=dtype)) <= TOLERANCES[dtype]


@pytest.mark.parametrize("chunk", [64, 16, 128])
@every_operation
def test_chunks_of_other_sizes(operation: Operation, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tuning, "of", lambda *_: Tuning(chunk=chunk, block=16))
    assert max(_step_errors(operation, [_Prompt(150, False, (80,))])) <= TOLERANCES[torch.float32]


def _adversarial(operation: Operation, tokens: Tokens, decay: str, beta: str) -> Tokens:
    """Replace decays and betas by extreme ones, and make keys of the delta rule alike."""
    index = torch.arange(len(tokens[0]))[:, None]
    factor = {
        "none": torch.zeros(len(index), 1),
        "strong": torch.full((len(index), 1), 1e4),
        "some strong": torch.where(index % 7 == 3, 3e3, 0.01),
        "weak": torch.full((len(index), 1), 0.01),
        "any": torch.ones(len(index), 1),
    }[decay]
    if isinstance(operation, Scan):
        inputs, steps, *groups = tokens
        return inputs, steps * factor, *groups
    query, key, value, decays, betas = tokens
    betas = {"zero": torch.zeros_like(betas), "one": torch.ones_like(betas), "any": betas}[beta]
    if decays.dim() == 3:
        factor = factor[:, :, None]
    return query, key[:1] + 0.1 * key, value, decays * factor, betas


@pytest.mark.parametrize("decay", ["some strong", "none", "strong", "weak"])
@pytest.mark.parametrize("beta", ["one", "zero"])
@every_operation
def test_extreme_decays_and_keys_that_are_alike(operation: Operation, beta: str, decay: str) -> None:
    batch = [_Prompt(75, starts=False, saves=(40,))]
    tokens = [_adversarial(operation, operation.tokens(75, 10), decay, beta)]
    assert max(_step_errors(operation, batch, tokens)) <= 3 * TOLERANCES[torch.float32]


@st.composite
def _batches(draw: st.DrawFn) -> list[_Prompt]:
    decodes = [_Prompt(1, draw(st.booleans())) for _ in range(draw(st.integers(0, 3)))]
    lengths = draw(st.lists(st.one_of(st.integers(1, 20), st.integers(1, 140)), min_size=1, max_size=3))
    saves = [draw(st.sets(st.integers(0, length - 1), max_size=3)) for length in lengths]
    chunks = [_Prompt(n, draw(st.booleans()), tuple(sorted(own))) for n, own in zip(lengths, saves, strict=True)]
    return decodes + chunks


@settings(max_examples=5, deadline=None)
@given(
    batch=_batches(),
    operation=st.sampled_from(OPERATIONS),
    decay=st.sampled_from(["any", "none", "strong", "some strong", "weak"]),
    beta=st.sampled_from(["any", "zero", "one"]),
)
def test_any_batch(
    kernel_device: torch.device, batch: list[_Prompt], operation: Operation, decay: str, beta: str
) -> None:
    small = replace(operation, num_heads=getattr(operation, "num_key_heads", getattr(operation, "num_groups", 1)))
    tokens = [small.tokens(prompt.length, 10 * i) for i, prompt in enumerate(batch)]
    tokens = [_adversarial(small, of_prompt, decay, beta) for of_prompt in tokens]
    assert max(_step_errors(small, batch, tokens)) <= 3 * TOLERANCES[torch.float32]


def test_sizes_that_ptxas_compiles_wrongly_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_stages=1 with num_warps=4 .* take two stages"):
        Tuning(num_warps=4, num_stages=1)
    assert Tuning(num_warps=8, num_stages=1) != Tuning(num_warps=4, num_stages=2)


@pytest.mark.parametrize("kind", ["delta_rule", "row_decays", "scan"])
def test_consumers_gpus_have_one_size(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of compute capability 12.0 too, whose tensor instructions are those of 8.9: larger chunks spill registers."""
    monkeypatch.setattr(prompts.knobs.runtime, "interpret", False)

    def sizes(capability: int) -> Tuning:
        target = SimpleNamespace(get_current_target=lambda: SimpleNamespace(arch=capability))
        monkeypatch.setattr(prompts.triton.runtime.driver, "_active", target)
        return Tuning.of(kind, 128, torch.bfloat16)

    assert sizes(120) == sizes(121) == sizes(89)
    assert sizes(120) != sizes(90)


def test_states_leave_the_range_of_float16() -> None:
    operation = Scan(num_groups=1, num_heads=1)
    inputs, steps, *groups = operation.tokens(40, 10, torch.float16)
    keys, queries = (group.abs() for group in groups)
    tokens = (inputs.abs() * 1e4, steps, keys * 20, queries * 1e-4)
    states = new_states(operation, 1)
    (output,) = run_step(TritonOps(), operation, states, [Chunk(tokens, 0, starts=True)])
    assert states.max() > 65504
    assert not output.isnan().any()


@every_operation
def test_a_prompt_has_the_same_bits_alone_and_beside_others(operation: Operation) -> None:
    tokens = [operation.tokens(length, 10 * i, torch.bfloat16) for i, length in enumerate((1, 40, 70, 20))]
    states = new_states(operation, 5)
    batch = [Chunk(of_one, slot, starts=slot == 2) for slot, of_one in enumerate(tokens)]
    together = run_step(TritonOps(), operation, states, batch)[2]
    states_alone = new_states(operation, 5)
    (alone,) = run_step(TritonOps(), operation, states_alone, [batch[2]])
    assert torch.equal(alone, together)
    assert torch.equal(states_alone[2], states[2])
    assert torch.equal(states_alone[4], states[4])


@every_operation
def test_batch_invariant_prompts_are_computed_token_by_token(operation: Operation) -> None:
    """The same bits in any chunks, and others than in chunks."""
    tokens = operation.tokens(30, 10, torch.bfloat16)
    outputs = []
    for ops, sizes in ((TritonOps(batch_invariant=True), [30]), (TritonOps(batch_invariant=True), [20, 10])):
        states, first, parts = new_states(operation, 1), 0, []
        for size in sizes:
            part = tuple(values[first : first + size] for values in tokens)
            parts += run_step(ops, operation, states, [Chunk(part, 0, starts=first == 0)])
            first += size
        outputs.append(torch.cat(parts))
    assert torch.equal(*outputs)
    (in_chunks,) = run_step(TritonOps(), operation, new_states(operation, 1), [Chunk(tokens, 0, starts=True)])
    assert not torch.equal(in_chunks, outputs[0])


@every_operation
def test_padding_is_not_computed(operation: Operation) -> None:
    """The batch of a graph: decodes, a prompt, padding with all other tokens, saves that are padding."""
    tokens = operation.tokens(100, 10, torch.bfloat16)
    states = new_states(operation, 3)
    before = states.clone()
    integers: dict[str, Any] = {"dtype": torch.int32}
    metadata = RecurrentMetadata(
        cu_seqlens=torch.tensor([0, 1, 2, 42, 42, 100], **integers),
        slots=torch.tensor([2, -1, 1, -1, -1], **integers),
        starts=torch.zeros(5, **integers),
        save_tokens=torch.tensor([100, 101], **integers),
        save_slots=torch.tensor([-1, -1], **integers),
        num_decodes=2,
    )
    output = operation(TritonOps(), tokens, states, metadata)
    (expected,) = run_step(TritonOps(), operation, before, [Chunk(tuple(part[2:42] for part in tokens), 1)])
    assert torch.equal(output[2:42], expected)
    assert torch.equal(states[:2], before[:2])


# --- planted errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("whole", lambda upto, after, between, whole: (upto, after, between, whole * 0.99)),
        ("after", lambda upto, after, between, whole: (upto, after * 1.01, between, whole)),
        ("upto", lambda upto, after, between, whole: (upto * 1.01, after, between, whole)),
        ("between", lambda upto, after, between, whole: (upto, after, between * 1.01, whole)),
    ],
)
@pytest.mark.parametrize("operation", [OPERATIONS[0], OPERATIONS[2]], ids=repr)
def test_planted_errors_are_found(operation: Operation, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = prompts.delta_rule_chunks_kernel if isinstance(operation, DeltaRule) else prompts.scan_chunks_kernel
    right = chunks.chunk_decays
    monkeypatch.setitem(module.fn.__globals__, "chunk_decays", lambda *args: wrong(*right(*args)))
    tokens = [_adversarial(operation, operation.tokens(70, 10), "weak", "any")]
    assert max(_step_errors(operation, [_Prompt(70, starts=False)], tokens)) > 10 * TOLERANCES[torch.float32], name
