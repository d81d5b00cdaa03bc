"""Packed linear layers against the reference, in every type of weight."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu import reference
from kernels.cpu.linear import LANES, PackedLinear, WeightKind, has_int8, has_tiles, linear, put_lanes

# Relative to the largest result. float32 sums in another order; so does bfloat16, whose products are exact; an element
# halfway between two int8 steps may be rounded to either.
PLAIN_KINDS = [kind for kind in WeightKind if not kind.is_coded]
TOLERANCES = {WeightKind.FLOAT32: 2e-6, WeightKind.BFLOAT16: 1e-4, WeightKind.INT8: 2e-3}


def check(num_rows: int, in_features: int, out_features: int, kind: WeightKind, *, has_bias: bool = False) -> None:
    if kind is WeightKind.INT8 and not has_int8():
        pytest.skip("this processor has no instruction for int8")
    generator = torch.Generator().manual_seed(num_rows * 7919 + in_features * 31 + out_features)
    x = torch.randn(num_rows, in_features, generator=generator)
    weight = torch.randn(out_features, in_features, generator=generator) * in_features**-0.5
    bias = torch.randn(out_features, generator=generator) if has_bias else None
    packed = PackedLinear(kind, in_features, out_features, has_bias=has_bias)
    packed.set_weight(weight)
    if bias is not None:
        packed.set_bias(bias)
    wanted = reference.linear(x, weight, bias, kind)
    worst = max(1.0, float(wanted.abs().amax())) if num_rows else 1.0
    assert torch.allclose(linear(x, packed), wanted, rtol=0, atol=TOLERANCES[kind] * worst)


@pytest.fixture
def _tiles() -> Iterator[None]:
    if not has_tiles():
        pytest.skip("this processor has no tiles")
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("scale", [1.0, 1e-19, 1e19])  # products are denormal with the second, infinite with the third
@pytest.mark.parametrize(
    ("num_rows", "in_features"), [(1, 96), (2, 64), (15, 32), (16, 1), (17, 31), (33, 33), (49, 190), (80, 2048)]
)
def test_tiles_add_in_the_order_of_the_reference(num_rows: int, in_features: int, scale: float) -> None:
    x, weight = torch.randn(num_rows, in_features) * scale, torch.randn(70, in_features) * scale
    packed = PackedLinear(WeightKind.BFLOAT16, in_features, 70)
    packed.set_weight(weight)
    assert torch.equal(linear(x, packed).nan_to_num(7.0), reference.tiled_linear(x, weight).nan_to_num(7.0))


@pytest.mark.usefixtures("_tiles")
def test_tiles_are_shared_with_torch() -> None:
    """Torch's products configure and release the same thread's tiles."""
    x, weight = torch.randn(64, 512), torch.randn(512, 512)
    packed = PackedLinear(WeightKind.BFLOAT16, 512, 512)
    packed.set_weight(weight)
    ours, theirs = linear(x, packed), x.bfloat16() @ weight.bfloat16().t()
    for num_rows in (64, 1, 40, 64):
        assert torch.equal(linear(x[:num_rows], packed), ours[:num_rows])
        assert torch.equal(x.bfloat16() @ weight.bfloat16().t(), theirs)


@pytest.mark.parametrize("kind", PLAIN_KINDS)
@pytest.mark.parametrize("num_rows", range(1, 18))
def test_every_number_of_rows_in_a_tile(num_rows: int, kind: WeightKind) -> None:
    check(num_rows, 96, 160, kind)


@pytest.mark.parametrize("kind", PLAIN_KINDS)
@pytest.mark.parametrize("num_rows", [0, 255, 256, 257, 272, 273, 511, 513, 1000])
def test_several_blocks_of_rows(num_rows: int, kind: WeightKind) -> None:
    check(num_rows, 96, 200, kind)


@pytest.mark.parametrize("kind", PLAIN_KINDS)
@pytest.mark.parametrize(("in_features", "out_features"), [(1, 1), (3, 5), (30, 17), (33, 64), (128, 1000), (5, 2049)])
def test_odd_sizes(in_features: int, out_features: int, kind: WeightKind) -> None:
    check(20, in_features, out_features, kind, has_bias=True)


@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_every_number_of_threads(num_threads: int, kind: WeightKind) -> None:
    check(37, 512, 3000, kind, has_bias=True)


@pytest.mark.parametrize("kind", PLAIN_KINDS)
@pytest.mark.parametrize(("in_features", "out_features"), [(96, 200), (257, 64)])
def test_a_row_has_the_same_bits_in_any_number_of_rows(in_features: int, out_features: int, kind: WeightKind) -> None:
    if kind is WeightKind.INT8 and not has_int8():
        pytest.skip("this processor has no instruction for int8")
    x = torch.randn(300, in_features)
    packed = PackedLinear(kind, in_features, out_features, has_bias=True)
    packed.set_weight(torch.randn(out_features, in_features))
    packed.set_bias(torch.randn(out_features))
    alone = torch.cat([linear(row, packed) for row in x.split(1)])
    for num_rows in (*range(2, 41), 100, 300):
        assert torch.equal(linear(x[:num_rows], packed), alone[:num_rows]), f"{num_rows} rows differ"
    assert torch.equal(linear(x[7:], packed), alone[7:])  # at another index of their tiles


def test_two_interleaved_matrices_have_their_own_biases() -> None:
    """Their panels of 16 outputs alternate, as those of an MLP's gate and up projections do."""
    x, weights, biases = torch.randn(5, 96), torch.randn(2, 48, 96), torch.randn(2, 48)
    packed = PackedLinear(WeightKind.FLOAT32, 96, 96, has_bias=True)
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        packed.set_weight(weight, every=2, offset=index)
        packed.set_bias(bias, every=2, offset=index)
    panels = linear(x, packed).view(5, 3, 2, 16)
    for index in range(2):
        wanted = reference.linear(x, weights[index], biases[index], WeightKind.FLOAT32)
        assert torch.allclose(panels[:, :, index].reshape(5, 48), wanted, rtol=0, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 70),
    in_features=st.integers(1, 200),
    out_features=st.integers(1, 300),
    kind=st.sampled_from([WeightKind.FLOAT32, WeightKind.BFLOAT16]),
    has_bias=st.booleans(),
)
def test_any_shape(num_rows: int, in_features: int, out_features: int, kind: WeightKind, has_bias: bool) -> None:
    check(num_rows, in_features, out_features, kind, has_bias=has_bias)


@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_weights_packed_in_parts_equal_weights_packed_at_once(kind: WeightKind) -> None:
    weight, x = torch.randn(100, 64), torch.randn(5, 64)
    whole, parts = (PackedLinear(kind, 64, 100) for _ in range(2))
    whole.set_weight(weight)
    for first, end in ((0, 7), (7, 48), (48, 100)):
        parts.set_weight(weight[first:end], first_output=first)
    if kind is not WeightKind.INT8 or has_int8():
        assert torch.equal(linear(x, parts), linear(x, whole))


def test_interleaved_panels() -> None:
    even, odd, x = torch.randn(32, 64), torch.randn(32, 64), torch.randn(3, 64)
    packed = PackedLinear(WeightKind.FLOAT32, 64, 64)
    packed.set_weight(even, every=2, offset=0)
    packed.set_weight(odd, every=2, offset=1)
    panels = torch.cat((even[:16], odd[:16], even[16:], odd[16:]))
    assert torch.allclose(linear(x, packed), x @ panels.t(), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stored_bfloat16_is_packed_bit_by_bit_and_float16_through_float32(dtype: torch.dtype) -> None:
    weight, x = torch.randn(48, 64).to(dtype), torch.randn(3, 64)
    packed = PackedLinear(WeightKind.FLOAT32, 64, 48)
    packed.set_weight(weight)
    assert torch.allclose(linear(x, packed), x @ weight.float().t(), atol=1e-5)


@pytest.mark.parametrize("in_features", [2, 30, 31, 32, 34, 64, 96, 130])
def test_stored_bfloat16_is_copied_into_panels_of_bfloat16(in_features: int) -> None:
    weight, x = torch.randn(40, in_features).bfloat16(), torch.randn(16, in_features)
    copied, converted = (PackedLinear(WeightKind.BFLOAT16, in_features, 40) for _ in range(2))
    copied.set_weight(weight)
    converted.set_weight(weight.float())
    assert torch.equal(linear(x, copied), linear(x, converted))
    wanted = x.bfloat16().double() @ weight.double().t()
    assert torch.allclose(linear(x, copied).double(), wanted, atol=1e-4)


def test_int8_rows_of_zeros_give_zeros() -> None:
    if not has_int8():
        pytest.skip("this processor has no instruction for int8")
    packed = PackedLinear(WeightKind.INT8, 64, 32)
    packed.set_weight(torch.zeros(32, 64))
    assert not linear(torch.zeros(2, 64), packed).any()


@pytest.mark.parametrize("in_features", [64, 37])
@pytest.mark.parametrize("num_rows", [4, 18, 40])
def test_a_row_of_nan_changes_no_other_row(num_rows: int, in_features: int) -> None:
    x, weight = torch.randn(num_rows, in_features), torch.randn(32, in_features)
    packed = PackedLinear(WeightKind.BFLOAT16, in_features, 32)
    packed.set_weight(weight)
    clean = linear(x, packed)
    x[3] = torch.nan
    spoilt = linear(x, packed)
    assert spoilt[3].isnan().all()
    assert torch.equal(spoilt[:3], clean[:3])
    assert torch.equal(spoilt[4:], clean[4:])


@pytest.mark.parametrize("in_features", [64, 37])
def test_an_output_of_nan_changes_no_other_output(in_features: int) -> None:
    x, weight = torch.randn(20, in_features), torch.randn(40, in_features)
    weight[16] = torch.nan  # the first of its panel: rows must not be multiplied with what follows theirs
    packed = PackedLinear(WeightKind.BFLOAT16, in_features, 40)
    packed.set_weight(weight)
    output = linear(x, packed)
    assert output[:, 16].isnan().all()
    assert output[:, :16].isfinite().all()
    assert output[:, 17:].isfinite().all()


@pytest.mark.parametrize(
    ("count", "first", "every", "offset"), [(96, 0, 2, 1), (5, 14, 1, 0), (70, 9, 2, 0), (0, 3, 1, 0)]
)
def test_numbers_of_outputs_are_put_into_their_lanes(count: int, first: int, every: int, offset: int) -> None:
    lanes, values = torch.zeros(14 * LANES), torch.arange(1.0, count + 1)
    expected, index = lanes.clone(), torch.arange(first, first + count)
    expected[(index // LANES * every + offset) * LANES + index % LANES] = values
    put_lanes(lanes, values, first_output=first, every=every, offset=offset)
    assert torch.equal(lanes, expected)
