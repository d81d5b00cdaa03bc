"""A decoder layer in C, half by half, against the references of its parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.attention import reference as attention_reference
from kernels.attention.base import AttentionInputs
from kernels.attention.window import Chunk
from kernels.attention_metadata import AttentionMetadata
from kernels.cache.reference import store_kvcache
from kernels.cpu import reference
from kernels.cpu.experts import ExpertSizes, PackedExperts
from kernels.cpu.layer import LayerShape, NormName, PackedLayer
from kernels.cpu.linear import PackedLinear, WeightKind
from kernels.cpu.scratch import Scratch
from kernels.cpu.step import CpuStep, add_attention, add_mlp, add_own_input, all_layers, logits, mixer_half, mlp_half

SHAPE = LayerShape(
    hidden_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=40,
    window=None,
    norm_eps=1e-6,
    qkv_bias=True,
    output_bias=False,
    mlp_bias=False,
)
SHAPES = {
    "Qwen3": SHAPE,
    "Gemma 2": replace(SHAPE, scale=0.3, softcap=1.5, activation="gelu_tanh", window=3),
    "Granite": replace(SHAPE, scale=0.3, residual_multiplier=0.7),
    "OLMo 2": replace(SHAPE, norms_all_heads=True),
    "Qwen3-Next": replace(SHAPE, gates_attention=True),
    "Nemotron": replace(SHAPE, has_mlp_gate=False),
    "Llama 4": replace(SHAPE, window=Chunk(3)),
    "Gemma 4": replace(SHAPE, scale=1.0, norms_values=True, activation="gelu_tanh"),
}
WITH_OUTPUT_NORMS = (SHAPES["Gemma 2"], SHAPES["Gemma 4"], SHAPES["OLMo 2"])
WITHOUT_INPUT_NORMS = (SHAPES["OLMo 2"],)
WITH_GROWTH = (SHAPES["Llama 4"],)  # of queries
BLOCK_SIZE = 4
NUM_TOKENS = 7
TOLERANCE = 1e-4


class Weights:
    """Random weights of one layer; absent norms are None."""

    def __init__(self, shape: LayerShape) -> None:
        self.shape = shape
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

        hidden, inner, heads = SHAPE.hidden_size, SHAPE.intermediate_size, SHAPE.num_heads * SHAPE.head_dim
        num_qkv = heads * (1 + shape.gates_attention) + 2 * SHAPE.num_kv_heads * SHAPE.head_dim
        self.qkv, self.qkv_bias, self.output = random(num_qkv, hidden), random(num_qkv), random(hidden, heads)
        self.gate, self.up, self.down = random(inner, hidden), random(inner, hidden), random(hidden, inner)
        query_heads, kv_heads = (SHAPE.num_heads, SHAPE.num_kv_heads) if shape.norms_all_heads else (1, 1)
        self.norms: dict[NormName, torch.Tensor] = {
            "query_norm": random(query_heads * SHAPE.head_dim) + 1,
            "key_norm": random(kv_heads * SHAPE.head_dim) + 1,
        }
        if shape not in WITHOUT_INPUT_NORMS:
            self.norms |= {"input_norm": random(hidden) + 1, "post_attention_norm": random(hidden) + 1}
        if shape in WITH_OUTPUT_NORMS:
            self.norms |= {"attention_output_norm": random(hidden) + 1, "mlp_output_norm": random(hidden) + 1}
        self.rope = torch.rand(NUM_TOKENS, 2, SHAPE.head_dim // 2, generator=generator)
        self.growth = (
            1 + torch.rand(NUM_TOKENS, generator=generator) if shape in WITH_GROWTH else torch.ones(NUM_TOKENS)
        )

    def norm(self, name: NormName, x: torch.Tensor) -> torch.Tensor:
        """Apply a norm, if the layer has it."""
        return reference.rms_norm(x, self.norms[name], SHAPE.norm_eps) if name in self.norms else x

    def packed(self) -> PackedLayer:
        layer = PackedLayer(self.shape, WeightKind.FLOAT32, torch.float32)
        layer.qkv.set_weight(self.qkv)
        layer.qkv.set_bias(self.qkv_bias)
        layer.output.set_weight(self.output)
        if self.shape.has_mlp_gate:
            layer.set_gate_up_weight(torch.cat((self.gate, self.up)))
        else:
            layer.gate_up.set_weight(self.up)
        layer.down.set_weight(torch.nn.functional.pad(self.down, (0, layer.down.in_features - self.down.shape[1])))
        for name, weight in self.norms.items():
            layer.set_norm(name, weight)
        layer.set_rope(self.rope)
        if self.shape in WITH_GROWTH:
            layer.set_growth(self.growth)
        return layer


class Step:
    """A prefill of one sequence whose blocks are out of order, and its expected results."""

    def __init__(self, weights: Weights) -> None:
        generator = torch.Generator().manual_seed(1)
        self.weights = weights
        self.hidden = torch.randn(NUM_TOKENS, SHAPE.hidden_size, generator=generator)
        self.positions = torch.arange(NUM_TOKENS)
        table = torch.tensor([[2, 0]], dtype=torch.int32)
        self.metadata = AttentionMetadata(
            slot_mapping=table[0, self.positions // BLOCK_SIZE].long() * BLOCK_SIZE + self.positions % BLOCK_SIZE,
            cu_seqlens_q=torch.tensor([0, NUM_TOKENS], dtype=torch.int32),
            seq_lens=torch.tensor([NUM_TOKENS], dtype=torch.int32),
            block_tables=table,
            num_decodes=0,
            max_query_len=NUM_TOKENS,
            max_seq_len=NUM_TOKENS,
        )
        self.caches = self.new_caches()
        self.scratch = Scratch(
            WeightKind.FLOAT32, width=64, outputs=192, attention_width=64, cache_dtype=torch.float32, mixed_width=48
        )

    def new_caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (3, BLOCK_SIZE, SHAPE.num_kv_heads, SHAPE.head_dim)
        return torch.zeros(shape), torch.zeros(shape)

    def for_kernels(self, hidden: torch.Tensor, addend: torch.Tensor | None = None) -> CpuStep:
        return CpuStep(hidden, self.positions, self.metadata, BLOCK_SIZE, self.scratch, addend)

    def expected_attention(self, caches: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return what the attention half adds, and store keys and values in ``caches``."""
        w, shape = self.weights, self.weights.shape
        qkv = reference.linear(w.norm("input_norm", self.hidden), w.qkv, w.qkv_bias, WeightKind.FLOAT32)
        kv_size = shape.num_kv_heads * shape.head_dim
        query_size = shape.num_heads * shape.head_dim
        gate, qkv = qkv.split((qkv.shape[1] - query_size - 2 * kv_size, query_size + 2 * kv_size), dim=1)
        query, key, value = qkv.split((query_size, kv_size, kv_size), dim=1)
        query, key = self._rotated("query_norm", query), self._rotated("key_norm", key)
        query = query * w.growth[:, None, None]
        value = self._heads(value)
        if shape.norms_values:
            value = reference.rms_norm(value, torch.ones(shape.head_dim), shape.norm_eps)
        store_kvcache(key, value, *caches, self.metadata.slot_mapping)
        scale = shape.head_dim**-0.5 if shape.scale is None else shape.scale
        inputs = AttentionInputs(query, *caches, self.metadata, scale, shape.window, shape.softcap)
        attended = attention_reference.attention(inputs).flatten(1)
        if shape.gates_attention:
            attended = attended * gate.sigmoid()
        output = reference.linear(attended, w.output, None, WeightKind.FLOAT32)
        return shape.residual_multiplier * w.norm("attention_output_norm", output)

    def _rotated(self, name: NormName, x: torch.Tensor) -> torch.Tensor:
        normed = self.weights.norm(name, x if self.weights.shape.norms_all_heads else self._heads(x))
        return reference.rotate(self._heads(normed), self.weights.rope, self.positions)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(NUM_TOKENS, -1, SHAPE.head_dim)

    def expected_mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the feed-forward half adds."""
        w, shape = self.weights, self.weights.shape
        normed = w.norm("post_attention_norm", hidden)
        if shape.has_mlp_gate:
            output = reference.gated(normed, w.gate, w.up, w.down, shape.activation)
        else:
            output = torch.relu(normed @ w.up.t()).square() @ w.down.t()
        return shape.residual_multiplier * w.norm("mlp_output_norm", output)


@pytest.fixture(params=SHAPES)
def step(request: pytest.FixtureRequest) -> Step:
    return Step(Weights(SHAPES[request.param]))


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_attention_half_equals_its_references_and_stores_keys_and_values(step: Step) -> None:
    hidden, caches = step.hidden.clone(), step.new_caches()
    mixer_half(step.weights.packed(), step.for_kernels(hidden), [caches])
    expected_caches = step.new_caches()
    assert_close(hidden, step.hidden + step.expected_attention(expected_caches))
    for cache, expected in zip(caches, expected_caches, strict=True):
        assert_close(cache, expected)


def test_mlp_half_equals_its_references(step: Step) -> None:
    hidden = step.hidden.clone()
    mlp_half(step.weights.packed(), step.for_kernels(hidden))
    assert_close(hidden, step.hidden + step.expected_mlp(step.hidden))


def test_an_addend_is_added_by_the_caller(step: Step) -> None:
    """As with tensor-parallel ranks, which sum their addends before."""
    layer, hidden, addend = step.weights.packed(), step.hidden.clone(), torch.empty_like(step.hidden)
    mixer_half(layer, step.for_kernels(hidden, addend), [step.new_caches()])
    assert torch.equal(hidden, step.hidden)
    add_attention(layer, hidden, addend)
    assert_close(hidden, step.hidden + step.expected_attention(step.new_caches()))
    hidden = step.hidden.clone()
    mlp_half(layer, step.for_kernels(hidden, addend))
    assert torch.equal(hidden, step.hidden)
    add_mlp(layer, hidden, addend)
    assert_close(hidden, step.hidden + step.expected_mlp(step.hidden))


def test_a_layer_that_only_reads_its_cache_has_queries_alone() -> None:
    """What it reads was written by a layer with the same keys and values."""
    step = Step(Weights(SHAPE))
    caches, expected_caches, hidden = step.new_caches(), step.new_caches(), step.hidden.clone()
    mixer_half(step.weights.packed(), step.for_kernels(step.hidden.clone()), [caches])
    reader = PackedLayer(replace(SHAPE, stores=False), WeightKind.FLOAT32, torch.float32)
    query_size = SHAPE.num_heads * SHAPE.head_dim
    assert reader.qkv.out_features == query_size
    reader.qkv.set_weight(step.weights.qkv[:query_size])
    reader.qkv.set_bias(step.weights.qkv_bias[:query_size])
    reader.output.set_weight(step.weights.output)
    for name, weight in step.weights.norms.items():
        reader.set_norm(name, weight)
    reader.set_rope(step.weights.rope)
    written = [part.clone() for part in caches]
    mixer_half(reader, step.for_kernels(hidden), [caches])
    assert_close(hidden, step.hidden + step.expected_attention(expected_caches))
    for part, before in zip(caches, written, strict=True):
        assert torch.equal(part, before)


@pytest.mark.parametrize("has_addend", [False, True])
def test_the_hidden_states_are_scaled_after_the_feed_forward(has_addend: bool) -> None:
    """Also where ranks sum before."""
    for shape in (SHAPE, SHAPES["Gemma 4"]):
        step = Step(Weights(shape))
        layer, hidden, addend = step.weights.packed(), step.hidden.clone(), torch.empty_like(step.hidden)
        layer.set_output_scale(0.3)
        mlp_half(layer, step.for_kernels(hidden, addend if has_addend else None))
        if has_addend:
            add_mlp(layer, hidden, addend)
        assert_close(hidden, 0.3 * (step.hidden + step.expected_mlp(step.hidden)))


def _experts(hidden: torch.Tensor) -> tuple[PackedExperts, torch.Tensor, torch.Tensor]:
    """Return two experts, the weights of their norm, and what they compute: both of them, as far as the router says."""
    generator, width, inner = torch.Generator().manual_seed(3), SHAPE.hidden_size, 32
    sizes = ExpertSizes(
        hidden_size=width, num_experts=2, top_k=2, intermediate_size=inner, shared_intermediate_size=0,
        normalizes_weights=True, activation="gelu_tanh",
    )  # fmt: skip
    packed, norm = PackedExperts(sizes, WeightKind.FLOAT32), torch.rand(width, generator=generator)
    router, x = torch.randn(2, width, generator=generator), reference.rms_norm(hidden, norm, SHAPE.norm_eps)
    packed.set_router_weight(router)
    weights, expected = (x @ router.t()).softmax(dim=1), torch.zeros_like(hidden)
    for expert in range(2):
        gate, up = torch.randn(2, inner, width, generator=generator) * width**-0.5
        down = torch.randn(width, inner, generator=generator) * inner**-0.5
        packed.set_gate_up_weight(expert, torch.cat((gate, up)))
        packed.set_down_weight(expert, down)
        expected += weights[:, expert : expert + 1] * reference.gated(x, gate, up, down, "gelu_tanh")
    return packed, norm, expected


@pytest.mark.parametrize("has_addend", [False, True])
def test_a_dense_feed_forward_and_experts_are_normed_apart_and_together(has_addend: bool) -> None:
    """Also where ranks sum before."""
    step = Step(Weights(SHAPES["Gemma 4"]))
    sum_norm = step.weights.norms.pop("mlp_output_norm")
    packed, experts_norm, of_experts = _experts(step.hidden)
    generator = torch.Generator().manual_seed(4)
    dense_output_norm, experts_output_norm = torch.rand(2, SHAPE.hidden_size, generator=generator)
    layer, hidden, addend = step.weights.packed(), step.hidden.clone(), torch.empty(2, *step.hidden.shape)
    layer.set_experts(packed)
    layer.set_norm("experts_norm", experts_norm)
    layer.set_norm("dense_output_norm", dense_output_norm)
    layer.set_norm("experts_output_norm", experts_output_norm)
    layer.set_norm("mlp_output_norm", sum_norm)
    layer.set_output_scale(0.3)
    mlp_half(layer, step.for_kernels(hidden, addend if has_addend else None))
    dense = step.expected_mlp(step.hidden)
    if has_addend:
        assert torch.equal(hidden, step.hidden)
        assert_close(addend, torch.stack((dense, of_experts)))
        add_mlp(layer, hidden, addend)
    eps = SHAPE.norm_eps
    both = reference.rms_norm(dense, dense_output_norm, eps) + reference.rms_norm(of_experts, experts_output_norm, eps)
    assert_close(hidden, 0.3 * (step.hidden + reference.rms_norm(both, sum_norm, eps)))


def test_a_layers_own_input_is_gated_projected_and_normalized() -> None:
    step, width, count = Step(Weights(SHAPE)), 32, 3
    generator = torch.Generator().manual_seed(2)
    gate, projection = torch.randn(width, 48, generator=generator), torch.randn(48, width, generator=generator)
    inputs, norm = torch.randn(count, NUM_TOKENS, width, generator=generator), torch.rand(48, generator=generator)
    layer = PackedLayer(replace(SHAPE, own_width=width, own_index=1), WeightKind.FLOAT32, torch.float32)
    assert layer.own_gate is not None
    assert layer.own_projection is not None
    layer.own_gate.set_weight(gate)
    layer.own_projection.set_weight(projection)
    layer.set_norm("own_output_norm", norm)
    layer.set_output_scale(0.3)
    hidden = step.hidden.clone()
    args = (step.positions, step.metadata, BLOCK_SIZE, step.scratch)
    add_own_input(layer, CpuStep(hidden, *args, own_inputs=inputs))
    gated = torch.nn.functional.gelu(step.hidden @ gate.t(), approximate="tanh") * inputs[1]
    added = reference.rms_norm(gated @ projection.t(), norm, SHAPE.norm_eps)
    assert_close(hidden, 0.3 * (step.hidden + added))


def test_a_layer_without_rope_rotates_nothing() -> None:
    step = Step(Weights(SHAPE))
    layer, hidden = step.weights.packed(), step.hidden.clone()
    layer.c_layer.rope = None
    step.weights.rope[:, 0], step.weights.rope[:, 1] = 1.0, 0.0
    mixer_half(layer, step.for_kernels(hidden), [step.new_caches()])
    assert_close(hidden, step.hidden + step.expected_attention(step.new_caches()))


def test_all_layers_equal_their_halves(step: Step) -> None:
    layers = [step.weights.packed(), step.weights.packed()]
    at_once, by_halves = step.hidden.clone(), step.hidden.clone()
    all_layers(layers, step.for_kernels(at_once), [step.new_caches(), step.new_caches()])
    for layer in layers:
        mixer_half(layer, step.for_kernels(by_halves), [step.new_caches()])
        mlp_half(layer, step.for_kernels(by_halves))
    assert torch.equal(at_once, by_halves)


@pytest.mark.parametrize("softcap", [None, 2.5])
def test_logits_equal_a_norm_and_a_linear_layer(softcap: float | None) -> None:
    step = Step(Weights(SHAPE))
    norm, weight = torch.rand(SHAPE.hidden_size) + 0.5, torch.randn(100, SHAPE.hidden_size)
    head = PackedLinear(WeightKind.FLOAT32, SHAPE.hidden_size, 100)
    head.set_weight(weight)
    output = torch.empty(NUM_TOKENS, 100)
    logits(output, step.hidden, norm, SHAPE.norm_eps, head, step.scratch, softcap)
    normed = reference.rms_norm(step.hidden, norm, SHAPE.norm_eps)
    expected = reference.linear(normed, weight, None, WeightKind.FLOAT32)
    assert_close(output, expected if softcap is None else reference.cap(expected, softcap))


@pytest.mark.parametrize("magnitude", [1e-6, 1e-3, 0.29, 0.31, 1.0, 5.0, 40.0, 1e4])
def test_soft_caps_are_as_exact_as_those_of_torch(magnitude: float) -> None:
    """Also of small scores, where e^2x - 1 would lose digits, and of large ones, where e^2x is infinite."""
    hidden, head = torch.eye(16), PackedLinear(WeightKind.FLOAT32, 16, 33)
    weight = torch.linspace(-magnitude, magnitude, 33 * 16).view(33, 16)
    head.set_weight(weight)
    output = torch.empty(16, 33)
    scratch = Scratch(WeightKind.FLOAT32, width=16, outputs=33, attention_width=16, cache_dtype=torch.float32)
    logits(output, hidden, torch.full((16,), 0.25), 0.0, head, scratch, 1.0)  # whose norm is the hidden state's own
    torch.testing.assert_close(output, weight.t().double().tanh().float(), rtol=5e-7, atol=0)
