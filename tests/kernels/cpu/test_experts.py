"""The C kernels' experts against the references of their parts, and the same bits whatever the batch."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu import reference
from kernels.cpu.experts import ExpertSizes, PackedExperts, experts
from kernels.cpu.linear import WeightKind, has_int8
from kernels.experts import reference as moe_reference

HIDDEN, INNER, SHARED, NUM_EXPERTS, TOP_K = 72, 40, 24, 11, 3
PLAIN_KINDS = [kind for kind in WeightKind if not kind.is_coded]
EPS = 1e-6
# Of an element, relative to the largest one of a row. bfloat16 and int8: what is rounded between two products may be
# rounded otherwise after a sum in another order.
TOLERANCES = {WeightKind.FLOAT32: 2e-6, WeightKind.BFLOAT16: 1e-2, WeightKind.INT8: 2e-2}


class Layer:
    """Random weights of a layer's experts, packed and plain."""

    def __init__(
        self,
        kind: WeightKind,
        *,
        normalizes: bool,
        shared: bool = True,
        num_experts: int = NUM_EXPERTS,
        inner: int = INNER,
        shared_inner: int = SHARED,
        latent: int | None = None,
        gemma: bool = False,
        scales_inputs: bool = False,
    ) -> None:
        if kind is WeightKind.INT8 and not has_int8():
            pytest.skip("the processor does not multiply int8")
        generator = torch.Generator().manual_seed(3)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

        self.kind, self.normalizes, self.shared, self.latent = kind, normalizes, shared, latent
        self.scales_inputs = scales_inputs
        width = latent or HIDDEN
        self.router, self.shared_gate = random(num_experts, HIDDEN) * 3, random(1, HIDDEN) * 3
        self.gate_up, self.down = random(num_experts, 2 * inner, width), random(num_experts, width, inner)
        self.shared_gate_up, self.shared_down = random(2 * shared_inner, HIDDEN), random(HIDDEN, shared_inner)
        self.norm = random(HIDDEN) + 1
        self.latent_in, self.latent_out = random(width, HIDDEN), random(HIDDEN, width)
        self.router_norm, self.scales = (random(HIDDEN) + 1, random(num_experts).abs() + 0.5) if gemma else (None, None)

    def packed(self) -> PackedExperts:
        sizes = ExpertSizes(
            hidden_size=HIDDEN,
            num_experts=len(self.router),
            top_k=TOP_K,
            intermediate_size=self.down.shape[2],
            shared_intermediate_size=self.shared_down.shape[1] if self.shared else 0,
            normalizes_weights=self.normalizes,
            latent_size=self.latent,
            activation="silu" if self.scales is None else "gelu_tanh",
            scales_inputs=self.scales_inputs,
        )
        packed = PackedExperts(sizes, self.kind)
        if self.router_norm is not None and self.scales is not None:
            packed.set_router_norm(self.router_norm)
            packed.set_expert_scales(self.scales)
        packed.set_router_weight(self.router)
        for expert in range(len(self.router)):
            packed.set_gate_up_weight(expert, self.gate_up[expert])
            packed.set_down_weight(expert, self.down[expert])
        if self.latent:
            packed.set_latent_in_weight(self.latent_in)
            packed.set_latent_out_weight(self.latent_out)
        if self.shared:
            packed.set_shared_gate_weight(self.shared_gate)
            packed.set_shared_gate_up_weight(self.shared_gate_up)
            packed.set_shared_down_weight(self.shared_down)
        return packed

    def swiglu(self, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, up = reference.linear(x, gate_up, None, self.kind).chunk(2, dim=1)
        functional = torch.nn.functional
        activated = functional.silu(gate) if self.scales is None else functional.gelu(gate, approximate="tanh")
        return reference.linear(activated * up, down, None, self.kind)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return moe_reference.route(x @ self.router.t(), TOP_K, normalize=self.normalizes)

    def expected(self, hidden: torch.Tensor) -> torch.Tensor:
        x = reference.rms_norm(hidden, self.norm, EPS)
        router_norm = self.norm if self.router_norm is None else self.router_norm
        weights, ids = self.route(reference.rms_norm(hidden, router_norm, EPS))
        weights = weights if self.scales is None else weights * self.scales[ids]
        inputs = reference.linear(x, self.latent_in, None, self.kind) if self.latent else x
        output = torch.zeros_like(inputs)
        for token in range(len(x)):
            for weight, expert in zip(weights[token], ids[token], strict=True):
                before, after = (weight, 1.0) if self.scales_inputs else (1.0, weight)
                row = self.swiglu(before * inputs[token : token + 1], self.gate_up[expert], self.down[expert])
                output[token] += after * row[0]
        if self.latent:
            output = reference.linear(output, self.latent_out, None, self.kind)
        if self.shared:
            output += (x @ self.shared_gate.t()).sigmoid() * self.swiglu(x, self.shared_gate_up, self.shared_down)
        return output

    def check(self, hidden: torch.Tensor) -> None:
        """Compare the kernels with the references."""
        got, expected = experts(hidden, self.packed(), self.norm, EPS), self.expected(hidden)
        error = (got - expected).abs().amax(dim=1) / expected.abs().amax(dim=1)
        assert error.max() < TOLERANCES[self.kind]


def random_hidden(num_tokens: int) -> torch.Tensor:
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(num_tokens))


@pytest.mark.parametrize("kind", PLAIN_KINDS)
@pytest.mark.parametrize(("shared", "normalizes"), [(False, True), (True, False)])
@pytest.mark.parametrize("num_tokens", [1, 2, 17, 130])
def test_experts_equal_their_references(
    num_tokens: int, shared: bool, normalizes: bool, kind: WeightKind, num_threads: int
) -> None:
    Layer(kind, shared=shared, normalizes=normalizes).check(random_hidden(num_tokens))


@pytest.mark.parametrize("kind", PLAIN_KINDS)
@pytest.mark.parametrize(("inner", "shared_inner"), [(200, 0), (200, 24), (136, 136), (40, 520)])
def test_experts_wider_than_the_hidden_state_equal_their_references(
    inner: int, shared_inner: int, kind: WeightKind
) -> None:
    """Also a shared expert that is wider than all experts of a token together."""
    layer = Layer(kind, shared=shared_inner > 0, normalizes=True, inner=inner, shared_inner=shared_inner or SHARED)
    layer.check(random_hidden(33))


@pytest.mark.parametrize("kind", PLAIN_KINDS)
@pytest.mark.parametrize(("latent", "shared"), [(24, True), (36, False), (200, True)])
@pytest.mark.parametrize("num_tokens", [1, 33])
def test_experts_between_projections_equal_their_references(
    num_tokens: int, latent: int, shared: bool, kind: WeightKind, num_threads: int
) -> None:
    Layer(kind, shared=shared, normalizes=True, latent=latent).check(random_hidden(num_tokens))


@pytest.mark.parametrize("kind", PLAIN_KINDS)
@pytest.mark.parametrize("num_tokens", [1, 33])
def test_experts_with_scales_and_a_norm_of_the_router_equal_their_references(
    num_tokens: int, kind: WeightKind, num_threads: int
) -> None:
    """As Gemma 4 has them, whose experts have GELU."""
    Layer(kind, shared=False, normalizes=True, gemma=True).check(random_hidden(num_tokens))


@pytest.mark.parametrize("kind", PLAIN_KINDS)
@pytest.mark.parametrize("num_tokens", [1, 33])
def test_weights_may_multiply_what_experts_read(num_tokens: int, kind: WeightKind, num_threads: int) -> None:
    Layer(kind, normalizes=False, scales_inputs=True).check(random_hidden(num_tokens))


def test_sigmoids_that_are_rounded_to_one_do_not_hide_the_best_logit() -> None:
    layer, hidden = Layer(WeightKind.FLOAT32, shared=False, normalizes=False), random_hidden(1)
    x = reference.rms_norm(hidden, layer.norm, EPS)
    layer.router = torch.linspace(20.0, 40.0, NUM_EXPERTS)[:, None] * x / (x @ x.t())  # its logits
    packed = layer.packed()
    packed.c_experts.is_sigmoid = True
    best = sum(layer.swiglu(x, layer.gate_up[-index], layer.down[-index]) for index in range(1, TOP_K + 1))
    torch.testing.assert_close(experts(hidden, packed, layer.norm, EPS), best, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_the_last_tile_of_every_expert_may_be_incomplete(kind: WeightKind) -> None:
    """A tile has 16 rows, and each expert 17, so that there are nearly twice as many tiles as of one expert's rows."""
    num_groups = 22
    layer, hidden = Layer(kind, normalizes=True, num_experts=num_groups * TOP_K), random_hidden(17 * num_groups)
    layer.router.zero_()
    for expert in range(len(layer.router)):  # those of a group are chosen together
        layer.router[expert, expert // TOP_K] = 1 + 0.1 * (expert % TOP_K)
    for token in range(len(hidden)):
        hidden[token, token % num_groups] = 10.0
    _, ids = layer.route(reference.rms_norm(hidden, layer.norm, EPS))
    assert ids.flatten().bincount().tolist() == [17] * len(layer.router)
    layer.check(hidden)


@pytest.mark.parametrize("kind", PLAIN_KINDS)
@pytest.mark.parametrize("latent", [None, 36])
def test_a_token_gets_the_same_bits_alone_and_in_any_batch(
    latent: int | None, kind: WeightKind, num_threads: int
) -> None:
    """The largest batch is more than the kernels compute at once."""
    layer, hidden = Layer(kind, shared=True, normalizes=True, latent=latent), random_hidden(1500)
    packed = layer.packed()
    whole = experts(hidden, packed, layer.norm, EPS)
    for count in (1, 5, 16, 40, 300):
        part = slice(1500 - count, 1500)
        assert torch.equal(experts(hidden[part], packed, layer.norm, EPS), whole[part])
    alone = torch.cat([experts(hidden[i : i + 1], packed, layer.norm, EPS) for i in range(50)])
    assert torch.equal(alone, whole[:50])
    order = torch.randperm(1500, generator=torch.Generator().manual_seed(0))
    assert torch.equal(experts(hidden[order], packed, layer.norm, EPS), whole[order])


def test_of_equal_logits_the_first_experts_are_chosen() -> None:
    layer, hidden = Layer(WeightKind.FLOAT32, shared=False, normalizes=True, num_experts=40), random_hidden(20)
    direction = layer.router[0].clone()
    layer.router.zero_()
    layer.router[[5, 18, 30, 37]] = direction  # equal logits, in other vectors of 16
    x = reference.rms_norm(hidden, layer.norm, EPS)
    expected = torch.zeros_like(x)
    for token in range(len(x)):
        for expert in (5, 18, 30) if x[token] @ direction > 0 else (0, 1, 2):
            expected[token] += layer.swiglu(x[token : token + 1], layer.gate_up[expert], layer.down[expert])[0] / TOP_K
    torch.testing.assert_close(experts(hidden, layer.packed(), layer.norm, EPS), expected, rtol=1e-4, atol=1e-5)


def test_no_token_is_no_work() -> None:
    layer = Layer(WeightKind.FLOAT32, shared=True, normalizes=True)
    assert experts(torch.empty(0, HIDDEN), layer.packed(), layer.norm, EPS).shape == (0, HIDDEN)


@pytest.mark.parametrize("latent", [None, 36])
def test_a_nan_stays_in_its_own_token(latent: int | None) -> None:
    layer, hidden = Layer(WeightKind.FLOAT32, shared=True, normalizes=True, latent=latent), random_hidden(40)
    clean = experts(hidden, layer.packed(), layer.norm, EPS)
    hidden[7, 3] = torch.nan
    spoilt = experts(hidden, layer.packed(), layer.norm, EPS)
    others = torch.arange(40) != 7
    assert spoilt[7].isnan().all()
    assert torch.equal(spoilt[others], clean[others])
