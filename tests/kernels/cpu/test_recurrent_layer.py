"""Layers with a recurrence in C, alone and beside attention, against torch's operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from kernels.attention_metadata import AttentionMetadata
from kernels.cpu import reference
from kernels.cpu.layer import LayerShape, PackedLayer
from kernels.cpu.linear import WeightKind, has_int8
from kernels.cpu.recurrent_layer import PackedRecurrent, RecurrentKind, RecurrentSizes
from kernels.cpu.scratch import Scratch
from kernels.cpu.step import CpuStep, all_layers, mixer_half, mlp_half
from kernels.recurrent.reference import ReferenceOps
from kernels.recurrent_metadata import RecurrentMetadata

PLAIN_KINDS = [kind for kind in WeightKind if not kind.is_coded]
HIDDEN = 48
EPS = 1e-6
CONV = RecurrentSizes(
    kind=RecurrentKind.SHORT_CONV, hidden_size=HIDDEN, num_heads=1, head_dim=HIDDEN, conv_width=3, in_bias=True
)
DELTA = RecurrentSizes(
    kind=RecurrentKind.GATED_DELTA,
    hidden_size=HIDDEN,
    num_heads=4,
    num_groups=2,
    head_dim=24,
    state_size=16,
    conv_width=4,
    norm_group=24,
    norm_eps=EPS,
)
KIMI = RecurrentSizes(
    kind=RecurrentKind.KIMI_DELTA,
    hidden_size=HIDDEN,
    num_heads=3,
    num_groups=3,
    head_dim=24,
    state_size=24,
    conv_width=4,
    norm_group=24,
    has_sigmoid=True,
    norm_eps=EPS,
)
MAMBA = RecurrentSizes(
    kind=RecurrentKind.MAMBA,
    hidden_size=HIDDEN,
    num_heads=4,
    num_groups=2,
    head_dim=12,
    state_size=16,
    conv_width=4,
    norm_group=24,
    norm_eps=EPS,
    gates_first=True,
    step_limits=(0.4, 1.1),
    out_bias=True,
)
SIZES = {
    "LFM2": CONV,
    "Qwen3-Next": DELTA,
    "OLMo Hybrid": replace(DELTA, largest_beta=2.0),
    "wide heads": replace(DELTA, num_heads=2, num_groups=1, head_dim=72, norm_group=72),  # several slices, one partial
    "decodes in place": replace(DELTA, num_heads=2, num_groups=1, head_dim=128, norm_group=128),
    "narrow convolution": replace(DELTA, conv_width=2),
    "wide convolution": replace(DELTA, conv_width=6),
    "Kimi Linear": KIMI,
    "Granite 4": MAMBA,
    "Falcon-H1, norm before the gate": replace(MAMBA, gates_first=False, step_limits=(0.0, float("inf"))),
    "Falcon-H1, no norm": replace(MAMBA, step_limits=(0.0, float("inf"))),
}
NO_NORM = ("LFM2", "Falcon-H1, no norm")
SHAPE = LayerShape(
    hidden_size=HIDDEN,
    num_heads=0,
    num_kv_heads=0,
    head_dim=0,
    intermediate_size=0,
    window=None,
    norm_eps=EPS,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
)
WITH_ATTENTION = replace(SHAPE, num_heads=2, num_kv_heads=1, head_dim=16)
LENGTHS = [1, 5, 3]  # a decode, a sequence that begins, a chunk
NUM_TOKENS = sum(LENGTHS)
BLOCK_SIZE = 16


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def metadata() -> RecurrentMetadata:
    return RecurrentMetadata(
        cu_seqlens=integers(0, 1, 6, 9),
        slots=integers(3, 0, 2),
        starts=integers(0, 1, 0),
        save_tokens=integers(2),
        save_slots=integers(1),
        num_decodes=1,
    )


class Weights:
    """Random weights of one layer with a recurrence, and what they compute."""

    def __init__(self, name: str) -> None:
        self.sizes, self.has_norm = SIZES[name], name not in NO_NORM
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

        sizes = self.sizes
        self.input, self.input_bias = random(sizes.input_width, HIDDEN), random(sizes.input_width)
        self.output, self.output_bias = random(HIDDEN, sizes.inner_size), random(HIDDEN)
        self.conv, self.conv_bias = random(sizes.channels, 1, sizes.conv_width), random(sizes.channels)
        self.step_bias, self.decay, self.skip = (random(sizes.num_heads) for _ in range(3))
        if sizes.kind is RecurrentKind.KIMI_DELTA:
            self.step_bias = random(sizes.inner_size)
            self.steps, self.gates = (random(sizes.inner_size, sizes.head_dim) for _ in range(2))
        norm_width = sizes.inner_size if sizes.kind is RecurrentKind.MAMBA else sizes.head_dim
        self.input_norm, self.norm = random(HIDDEN) + 1, random(norm_width) + 1
        self.qkv, self.attention_output = random(64, HIDDEN), random(HIDDEN, 32)

    @property
    def has_conv_bias(self) -> bool:
        return self.sizes.kind in (RecurrentKind.SHORT_CONV, RecurrentKind.MAMBA)

    def packed_recurrent(self, kind: WeightKind = WeightKind.FLOAT32) -> PackedRecurrent:
        packed = PackedRecurrent(self.sizes, kind)
        packed.input.set_weight(self.input)
        packed.output.set_weight(self.output)
        if self.sizes.in_bias:
            packed.input.set_bias(self.input_bias)
        if self.sizes.out_bias:
            packed.output.set_bias(self.output_bias)
        packed.set_conv_weight(self.conv)
        if self.has_conv_bias:
            packed.set_conv_bias(self.conv_bias)
        if self.sizes.kind is not RecurrentKind.SHORT_CONV:
            packed.set_step_bias(self.step_bias)
            packed.set_decay(self.decay)
            packed.set_skip(self.skip)
        if packed.steps is not None and packed.gates is not None:
            packed.steps.set_weight(self.steps)
            packed.gates.set_weight(self.gates)
        if self.has_norm:
            packed.set_norm(self.norm)
        return packed

    def packed(self, shape: LayerShape = SHAPE) -> PackedLayer:
        layer = PackedLayer(shape, WeightKind.FLOAT32, torch.float32)
        layer.set_norm("input_norm", self.input_norm)
        layer.set_recurrent(self.packed_recurrent())
        if shape.num_heads:
            layer.qkv.set_weight(self.qkv)
            layer.output.set_weight(self.attention_output)
        return layer

    def new_states(self) -> tuple[torch.Tensor, ...]:
        """Return states of four slots that hold something already."""
        sizes, generator = self.sizes, torch.Generator().manual_seed(1)
        conv = torch.randn(4, sizes.conv_width - 1, sizes.channels, generator=generator)
        if sizes.kind is RecurrentKind.SHORT_CONV:
            return (conv,)
        inner = (sizes.state_size, sizes.head_dim)
        if sizes.kind is RecurrentKind.MAMBA:
            inner = inner[::-1]
        return conv, torch.randn(4, sizes.num_heads, *inner, generator=generator)

    def expected(self, hidden: torch.Tensor, states: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return what the layer adds to its input, and update the states."""
        sizes = self.sizes
        normed = reference.rms_norm(hidden, self.input_norm, EPS)
        projected = F.linear(normed, self.input, self.input_bias if sizes.in_bias else None)
        mixed = _MIX[sizes.kind](self, projected, states)
        return F.linear(mixed, self.output, self.output_bias if sizes.out_bias else None)

    def convolved(self, inputs: torch.Tensor, state: torch.Tensor, *, silu: bool) -> torch.Tensor:
        bias = self.conv_bias if self.has_conv_bias else None
        return ReferenceOps().causal_conv(inputs, self.conv[:, 0], bias, state, metadata(), silu=silu)

    def gated(self, mixed: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        if not self.has_norm:
            return mixed * F.silu(gate)
        groups = (len(mixed), -1, self.sizes.norm_group)
        weight = self.norm.repeat(self.sizes.inner_size // len(self.norm))
        if self.sizes.gates_first:
            return F.rms_norm((mixed * F.silu(gate)).view(groups), groups[2:], eps=EPS).flatten(1) * weight
        activated = gate.sigmoid() if self.sizes.has_sigmoid else F.silu(gate)
        return F.rms_norm(mixed.view(groups), groups[2:], eps=EPS).flatten(1) * weight * activated


def _short_conv(weights: Weights, projected: torch.Tensor, states: tuple[torch.Tensor, ...]) -> torch.Tensor:
    before, after, inputs = projected.chunk(3, dim=1)
    return after * weights.convolved(before * inputs, states[0], silu=False)


def _gated_delta(weights: Weights, projected: torch.Tensor, states: tuple[torch.Tensor, ...]) -> torch.Tensor:
    sizes = weights.sizes
    key_width = sizes.num_groups * sizes.state_size
    qkv, gate, beta, step = projected.split([sizes.channels, sizes.inner_size, sizes.num_heads, sizes.num_heads], dim=1)
    qkv = weights.convolved(qkv, states[0], silu=True)
    query, key, value = qkv.split([key_width, key_width, sizes.inner_size], dim=1)
    mixed = ReferenceOps().gated_delta_rule(
        query.unflatten(1, (sizes.num_groups, sizes.state_size)),
        key.unflatten(1, (sizes.num_groups, sizes.state_size)),
        value.unflatten(1, (sizes.num_heads, sizes.head_dim)),
        -weights.decay.exp() * F.softplus(step + weights.step_bias),
        sizes.largest_beta * beta.sigmoid(),
        states[1],
        metadata(),
    )
    return weights.gated(mixed.flatten(1), gate)


def _kimi_delta(weights: Weights, projected: torch.Tensor, states: tuple[torch.Tensor, ...]) -> torch.Tensor:
    sizes = weights.sizes
    heads = (-1, sizes.num_heads, sizes.head_dim)
    qkv, beta, of_steps, of_gates = projected.split(
        [sizes.channels, sizes.num_heads, sizes.head_dim, sizes.head_dim], dim=1
    )
    query, key, value = (part.reshape(heads) for part in weights.convolved(qkv, states[0], silu=True).chunk(3, dim=1))
    steps = F.softplus(of_steps @ weights.steps.t() + weights.step_bias).view(heads)
    mixed = ReferenceOps().gated_delta_rule(
        query, key, value, -weights.decay.exp()[:, None] * steps, beta.sigmoid(), states[1], metadata()
    )
    return weights.gated(mixed.flatten(1), of_gates @ weights.gates.t())


def _mamba(weights: Weights, projected: torch.Tensor, states: tuple[torch.Tensor, ...]) -> torch.Tensor:
    sizes = weights.sizes
    group_width = sizes.num_groups * sizes.state_size
    gate, inputs, steps = projected.split([sizes.inner_size, sizes.channels, sizes.num_heads], dim=1)
    inputs = weights.convolved(inputs, states[0], silu=True)
    values, keys, queries = inputs.split([sizes.inner_size, group_width, group_width], dim=1)
    mixed = ReferenceOps().selective_scan(
        values.unflatten(1, (sizes.num_heads, sizes.head_dim)),
        F.softplus(steps + weights.step_bias).clamp(*sizes.step_limits),
        -weights.decay.exp(),
        keys.unflatten(1, (sizes.num_groups, sizes.state_size)),
        queries.unflatten(1, (sizes.num_groups, sizes.state_size)),
        weights.skip,
        states[1],
        metadata(),
    )
    return weights.gated(mixed.flatten(1), gate)


_MIX: dict[RecurrentKind, Callable[[Weights, torch.Tensor, tuple[torch.Tensor, ...]], torch.Tensor]] = {
    RecurrentKind.SHORT_CONV: _short_conv,
    RecurrentKind.GATED_DELTA: _gated_delta,
    RecurrentKind.MAMBA: _mamba,
    RecurrentKind.KIMI_DELTA: _kimi_delta,
}


def new_hidden() -> torch.Tensor:
    return torch.randn(NUM_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2))


def new_kv_cache() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(3, BLOCK_SIZE, 1, 16), torch.zeros(3, BLOCK_SIZE, 1, 16)


def cpu_step(hidden: torch.Tensor, addend: torch.Tensor | None = None) -> CpuStep:
    """Return the step of LENGTHS; its sequences' contexts are those lengths as far as attention knows."""
    lengths = torch.tensor(LENGTHS)
    attention = AttentionMetadata(
        slot_mapping=torch.cat([BLOCK_SIZE * index + torch.arange(n) for index, n in enumerate(LENGTHS)]),
        cu_seqlens_q=F.pad(lengths.cumsum(0), (1, 0)).int(),
        seq_lens=lengths.int(),
        block_tables=torch.arange(3, dtype=torch.int32)[:, None],
        num_decodes=1,
        max_query_len=5,
        max_seq_len=5,
    )
    scratch = Scratch(
        WeightKind.FLOAT32, width=256, outputs=768, attention_width=32, cache_dtype=torch.float32, mixed_width=256
    )
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    return CpuStep(hidden, positions, attention, BLOCK_SIZE, scratch, addend, metadata())


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SIZES)
def test_a_recurrent_layer_is_that_of_torch(name: str) -> None:
    weights, hidden = Weights(name), new_hidden()
    states, expected_states = weights.new_states(), weights.new_states()
    expected = hidden + weights.expected(hidden, expected_states)
    mixer_half(weights.packed(), cpu_step(hidden), [states])
    assert_close(hidden, expected)
    for state, expected_state in zip(states, expected_states, strict=True):
        assert_close(state, expected_state)


@pytest.mark.parametrize("with_addend", [False, True])
def test_attention_beside_a_recurrent_layer_reads_the_same_input(with_addend: bool) -> None:
    weights, hidden = Weights("Falcon-H1, no norm"), new_hidden()
    attention = PackedLayer(WITH_ATTENTION, WeightKind.FLOAT32, torch.float32)
    attention.set_norm("input_norm", weights.input_norm)
    attention.qkv.set_weight(weights.qkv)
    attention.output.set_weight(weights.attention_output)
    attended = hidden.clone()
    mixer_half(attention, cpu_step(attended), [new_kv_cache()])
    expected = attended + weights.expected(hidden, weights.new_states())
    addend = torch.full_like(hidden, torch.nan) if with_addend else None
    before = hidden.clone()
    caches = [new_kv_cache(), weights.new_states()]
    mixer_half(weights.packed(WITH_ATTENTION), cpu_step(hidden, addend), caches)
    if addend is not None:
        assert torch.equal(hidden, before)
        hidden = hidden + addend
    assert_close(hidden, expected)


def test_a_layer_without_a_half_leaves_it_out() -> None:
    weights, hidden = Weights("Qwen3-Next"), new_hidden()
    before = hidden.clone()
    mlp_half(weights.packed(), cpu_step(hidden))
    mixer_half(PackedLayer(SHAPE, WeightKind.FLOAT32, torch.float32), cpu_step(hidden), [])
    assert torch.equal(hidden, before)


def test_all_layers_take_each_its_own_caches() -> None:
    names = ["Qwen3-Next", "Falcon-H1, no norm", "LFM2"]
    weights = [Weights(name) for name in names]
    layers = [weights[0].packed(), weights[1].packed(WITH_ATTENTION), weights[2].packed()]
    caches = [
        [weights[0].new_states()],
        [new_kv_cache(), weights[1].new_states()],
        [weights[2].new_states()],
    ]
    by_halves, at_once = new_hidden(), new_hidden()
    for layer, own in zip(layers, caches, strict=True):
        mixer_half(layer, cpu_step(by_halves), [tuple(map(torch.clone, cache)) for cache in own])
    all_layers(layers, cpu_step(at_once), [cache for own in caches for cache in own])
    assert torch.equal(at_once, by_halves)


@pytest.mark.parametrize("name", ["Qwen3-Next", "Kimi Linear"])
@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_every_kind_of_weights_is_close_to_float32(kind: WeightKind, name: str) -> None:
    if kind is WeightKind.INT8 and not has_int8():
        pytest.skip("no int8 on this machine")
    weights, hidden = Weights(name), new_hidden()
    expected = hidden + weights.expected(hidden, weights.new_states())
    layer = weights.packed()
    layer.set_recurrent(weights.packed_recurrent(kind))
    mixer_half(layer, cpu_step(hidden), [weights.new_states()])
    torch.testing.assert_close(hidden, expected, atol=0.1, rtol=0.05)
