"""The residual stream's sums and norms against the reference."""

from __future__ import annotations

import pytest
import torch

from kernels.layer_ops import reference
from kernels.layer_ops.base import Addend, LayerOps
from kernels.layer_ops.torch import TorchOps
from tests.kernels.layer_ops.tensors import TOLERANCES, Random, TestNorm, assert_close

PLACEMENTS = {  # whether the addend exists, whether it is normalized, whether the sum is
    "first norm": (False, False, True),
    "norms before": (True, False, True),
    "norms after": (True, True, False),
    "norms around": (True, True, True),
    "no norm": (True, False, False),
}


def _addend(random: Random, num_tokens: int, width: int, norm: TestNorm | None = None) -> Addend:
    return Addend(random(num_tokens, width), norm, 0.3)


def _check(ops: LayerOps, residual: torch.Tensor, addend: Addend | None, norm: TestNorm | None) -> None:
    before = residual.clone()
    got = ops.add_norm(residual, addend, norm)
    for result, expected in zip(got, reference.add_norm(residual, addend, norm), strict=True):
        assert_close(result, expected)
    assert torch.equal(residual, before)


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS.keys())
@pytest.mark.parametrize("adds_one", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_every_placement_and_dtype(
    ops: LayerOps, placement: tuple[bool, bool, bool], adds_one: bool, dtype: torch.dtype, device: torch.device
) -> None:
    random, (adds, norms_addend, norms_sum) = Random(dtype, device), placement
    residual = random(3, 96)
    addend_norm = random.norm(96, adds_one=adds_one) if norms_addend else None
    addend = _addend(random, 3, 96, addend_norm) if adds else None
    _check(ops, residual, addend, random.norm(96, adds_one=adds_one) if norms_sum else None)


@pytest.mark.parametrize("norms_sum", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_sum_may_be_scaled(ops: LayerOps, norms_sum: bool, dtype: torch.dtype, device: torch.device) -> None:
    random = Random(dtype, device)
    scale = torch.tensor([0.4], dtype=dtype, device=device)
    addend = Addend(random(3, 96), random.norm(96), 1.0, scale)
    _check(ops, random(3, 96), addend, random.norm(96) if norms_sum else None)


@pytest.mark.parametrize("width", [1, 2, 31, 64, 130, 5000])
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_any_width(ops: LayerOps, num_tokens: int, width: int, device: torch.device) -> None:
    random = Random(torch.float32, device)
    _check(ops, random(num_tokens, width), _addend(random, num_tokens, width), random.norm(width))


def test_rows_may_be_slices(ops: LayerOps, device: torch.device) -> None:
    random = Random(torch.float32, device)
    residual, values = random(5, 100)[:, 3:51], random(9, 48)[1::2][:4]
    assert residual.stride(0) == 100
    assert values.stride(0) == 96
    _check(ops, residual[:4], Addend(values, None), random.norm(48))


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_token_does_not_depend_on_the_others(
    ops: LayerOps, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not isinstance(ops, TorchOps):
        monkeypatch.setattr("kernels.layer_ops.triton.ops._MAX_PROGRAMS", 8)
    random = Random(dtype, device)
    residual, values = random(20, 40), random(20, 40)
    values[7] = torch.nan
    addend_norm, norm = random.norm(40), random.norm(40)
    together = ops.add_norm(residual, Addend(values, addend_norm), norm)
    for index in (0, 6, 8, 19):
        alone = ops.add_norm(residual[index : index + 1], Addend(values[index : index + 1], addend_norm), norm)
        for result, whole in zip(alone, together, strict=True):
            assert torch.equal(result[0], whole[index])
    assert together[1][7].isnan().all()


def test_a_row_of_zeros_has_a_norm_of_zeros(ops: LayerOps, device: torch.device) -> None:
    random = Random(torch.float32, device)
    assert torch.equal(
        ops.add_norm(torch.zeros(2, 9, device=device), None, random.norm(9))[1].abs().sum().cpu(), torch.zeros(())
    )
