"""A decoder layer in C, half by half, against the references of its parts."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import reference as attention_reference
from kernels.attention.base import AttentionInputs
from kernels.attention_metadata import AttentionMetadata
from kernels.cpu import reference
from kernels.cpu.layer import LayerShape, PackedLayer
from kernels.cpu.linear import PackedLinear, WeightKind
from kernels.cpu.scratch import Scratch
from kernels.cpu.step import CpuStep, all_layers, attention_half, logits, mlp_half
from kernels.reference import store_kvcache

SHAPE = LayerShape(
    hidden_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=40,
    sliding_window=None,
    norm_eps=1e-6,
    qkv_bias=True,
    output_bias=False,
    mlp_bias=False,
)
BLOCK_SIZE = 4
NUM_TOKENS = 7
TOLERANCE = 1e-4


class Weights:
    """Random weights of one layer."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

        hidden, inner, heads = SHAPE.hidden_size, SHAPE.intermediate_size, SHAPE.num_heads * SHAPE.head_dim
        num_qkv = heads + 2 * SHAPE.num_kv_heads * SHAPE.head_dim
        self.qkv, self.qkv_bias, self.output = random(num_qkv, hidden), random(num_qkv), random(hidden, heads)
        self.gate, self.up, self.down = random(inner, hidden), random(inner, hidden), random(hidden, inner)
        self.input_norm, self.post_attention_norm = random(hidden) + 1, random(hidden) + 1
        self.query_norm, self.key_norm = random(SHAPE.head_dim) + 1, random(SHAPE.head_dim) + 1

    def packed(self) -> PackedLayer:
        layer = PackedLayer(SHAPE, WeightKind.FLOAT32, torch.float32)
        layer.qkv.set_weight(self.qkv)
        layer.qkv.set_bias(self.qkv_bias)
        layer.output.set_weight(self.output)
        layer.set_gate_up_weight(torch.cat((self.gate, self.up)))
        layer.down.set_weight(torch.nn.functional.pad(self.down, (0, layer.down.in_features - self.down.shape[1])))
        layer.set_norm("input_norm", self.input_norm)
        layer.set_norm("post_attention_norm", self.post_attention_norm)
        layer.set_norm("query_norm", self.query_norm)
        layer.set_norm("key_norm", self.key_norm)
        return layer


class Step:
    """A prefill of one sequence whose blocks are out of order, and its expected results."""

    def __init__(self, weights: Weights) -> None:
        generator = torch.Generator().manual_seed(1)
        self.weights = weights
        self.hidden = torch.randn(NUM_TOKENS, SHAPE.hidden_size, generator=generator)
        self.positions = torch.arange(NUM_TOKENS)
        self.rope = torch.rand(NUM_TOKENS, 2, SHAPE.head_dim // 2, generator=generator)
        table = torch.tensor([[2, 0]], dtype=torch.int32)
        self.metadata = AttentionMetadata(
            slot_mapping=table[0, self.positions // BLOCK_SIZE].long() * BLOCK_SIZE + self.positions % BLOCK_SIZE,
            cu_seqlens_q=torch.tensor([0, NUM_TOKENS], dtype=torch.int32),
            seq_lens=torch.tensor([NUM_TOKENS], dtype=torch.int32),
            block_tables=table,
            max_query_len=NUM_TOKENS,
            max_seq_len=NUM_TOKENS,
        )
        self.caches = self.new_caches()
        self.scratch = Scratch(WeightKind.FLOAT32, width=64, outputs=128, attention_width=64, cache_dtype=torch.float32)

    def new_caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (3, BLOCK_SIZE, SHAPE.num_kv_heads, SHAPE.head_dim)
        return torch.zeros(shape), torch.zeros(shape)

    def for_kernels(self, hidden: torch.Tensor, addend: torch.Tensor | None = None) -> CpuStep:
        return CpuStep(hidden, self.positions, self.rope, self.metadata, BLOCK_SIZE, self.scratch, addend)

    def expected_attention(self, caches: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        w, heads = self.weights, (SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.num_kv_heads)
        normed = reference.rms_norm(self.hidden, w.input_norm, SHAPE.norm_eps)
        qkv = reference.linear(normed, w.qkv, w.qkv_bias, WeightKind.FLOAT32)
        query, key, value = qkv.view(NUM_TOKENS, -1, SHAPE.head_dim).split(heads, dim=1)
        query = reference.rotate(reference.rms_norm(query, w.query_norm, SHAPE.norm_eps), self.rope, self.positions)
        key = reference.rotate(reference.rms_norm(key, w.key_norm, SHAPE.norm_eps), self.rope, self.positions)
        store_kvcache(key, value, *caches, self.metadata.slot_mapping)
        inputs = AttentionInputs(query, *caches, self.metadata, scale=SHAPE.head_dim**-0.5)
        attended = attention_reference.attention(inputs).flatten(1)
        return reference.linear(attended, w.output, None, WeightKind.FLOAT32)

    def expected_mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        w = self.weights
        normed = reference.rms_norm(hidden, w.post_attention_norm, SHAPE.norm_eps)
        return reference.swiglu(normed, w.gate, w.up, w.down)


@pytest.fixture
def step() -> Step:
    return Step(Weights())


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_attention_half_equals_its_references_and_stores_keys_and_values(step: Step) -> None:
    hidden, caches = step.hidden.clone(), step.new_caches()
    attention_half(step.weights.packed(), step.for_kernels(hidden), *caches)
    expected_caches = step.new_caches()
    assert_close(hidden, step.hidden + step.expected_attention(expected_caches))
    for cache, expected in zip(caches, expected_caches, strict=True):
        assert_close(cache, expected)


def test_mlp_half_equals_its_references(step: Step) -> None:
    hidden = step.hidden.clone()
    mlp_half(step.weights.packed(), step.for_kernels(hidden))
    assert_close(hidden, step.hidden + step.expected_mlp(step.hidden))


def test_an_addend_leaves_the_hidden_states_alone(step: Step) -> None:
    hidden, addend = step.hidden.clone(), torch.empty_like(step.hidden)
    mlp_half(step.weights.packed(), step.for_kernels(hidden, addend))
    assert torch.equal(hidden, step.hidden)
    assert_close(addend, step.expected_mlp(step.hidden))


def test_all_layers_equal_their_halves(step: Step) -> None:
    layers = [step.weights.packed(), step.weights.packed()]
    at_once, by_halves = step.hidden.clone(), step.hidden.clone()
    all_layers(layers, step.for_kernels(at_once), [step.new_caches(), step.new_caches()])
    for layer in layers:
        attention_half(layer, step.for_kernels(by_halves), *step.new_caches())
        mlp_half(layer, step.for_kernels(by_halves))
    assert torch.equal(at_once, by_halves)


def test_logits_equal_a_norm_and_a_linear_layer(step: Step) -> None:
    norm, weight = torch.rand(SHAPE.hidden_size) + 0.5, torch.randn(100, SHAPE.hidden_size)
    head = PackedLinear(WeightKind.FLOAT32, SHAPE.hidden_size, 100)
    head.set_weight(weight)
    output = torch.empty(NUM_TOKENS, 100)
    logits(output, step.hidden, norm, SHAPE.norm_eps, head, step.scratch)
    normed = reference.rms_norm(step.hidden, norm, SHAPE.norm_eps)
    assert_close(output, reference.linear(normed, weight, None, WeightKind.FLOAT32))
