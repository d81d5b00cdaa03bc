"""Gelu in C is torch's gelu."""

from __future__ import annotations

import pytest
import torch

from kernels import gelu
from kernels.gelu import Gelu

EDGES = [0.0, -0.0, 1e-30, -1e-30, 1e-4, -1e-4, 5.5, -5.5, 13.0, -13.0, 100.0, -100.0, 3e38, -3e38, torch.inf]


def test_all_sizes_of_numbers() -> None:
    x = torch.cat((torch.linspace(-12, 12, 100_001), torch.tensor(EDGES)))
    exact = torch.nn.functional.gelu(x.double())
    error = (Gelu()(x[None])[0].double() - exact).abs() / x.double().abs().clamp(min=1)
    assert error[:-1].max() < 2e-7
    assert Gelu()(x)[-1] == torch.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (1, 1), (5, 33), (2, 7, 100)])
def test_any_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    result = Gelu()(x)
    assert result.shape == x.shape
    torch.testing.assert_close(result, torch.nn.functional.gelu(x))


def test_a_view_with_gaps() -> None:
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))[::2, 5:30]
    torch.testing.assert_close(Gelu()(x), torch.nn.functional.gelu(x))


def test_torch_computes_what_c_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 20, dtype=torch.float64)
    assert torch.equal(Gelu()(x), torch.nn.functional.gelu(x))
    monkeypatch.setattr(gelu, "library", lambda: None)
    assert torch.equal(Gelu()(x.float()), torch.nn.functional.gelu(x.float()))
