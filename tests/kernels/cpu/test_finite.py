"""The C kernel that looks for NaN and infinity, against torch."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu import finite
from kernels.cpu.finite import all_finite

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_number_is_found_wherever_it_is(dtype: torch.dtype, bad: float) -> None:
    for count in (1, 31, 4096, 4097, 10_000):
        numbers = torch.randn(count).to(dtype)
        numbers[0], numbers[-1] = torch.finfo(dtype).max, torch.finfo(dtype).min
        assert all_finite(numbers)
        for index in {0, count // 2, count - 1, min(4096, count - 1)}:
            damaged = numbers.clone()
            damaged[index] = bad
            assert all_finite(damaged) is False


def test_every_bfloat16_is_judged_as_by_torch() -> None:
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    judged = [all_finite(number) for number in numbers]
    assert torch.equal(torch.tensor(judged), numbers.isfinite())


def test_what_it_does_not_judge_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all_finite(torch.zeros(0))
    assert all_finite(torch.zeros(4, 4).t()[1:]) is None
    assert all_finite(torch.zeros(4, dtype=torch.float64)) is None
    monkeypatch.setattr(finite, "library", lambda: None)
    assert all_finite(torch.zeros(4)) is None
