"""Mistakes that are easy to make in a format: each makes the comparison with the values, or the tokens, fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.checkpoint import stored_parts
from engine.models.checkpoint.formats import (
    bitsandbytes,
    compressed_integers,
    fp4,
    fp8,
    gptq_awq,
    mlx,
    modelopt_int4,
    table,
)
from kernels.dequant import fp4 as kernels_fp4
from kernels.dequant import integers
from kernels.dequant.fp4 import E2M1
from tests.engine.models.checkpoint.formats import test_bitsandbytes as of_bitsandbytes
from tests.engine.models.checkpoint.formats import test_compressed_integers as of_integers
from tests.engine.models.checkpoint.formats import test_fp4 as of_fp4
from tests.engine.models.checkpoint.formats import test_fp8 as of_fp8
from tests.engine.models.checkpoint.formats import test_gptq_awq as of_gptq_awq
from tests.engine.models.checkpoint.formats import test_mlx as of_mlx
from tests.engine.models.checkpoint.formats import test_modelopt_int4 as of_modelopt_int4
from tests.engine.models.checkpoint.formats.quantised import Quantised, check_tokens, check_values
from tests.engine.models.published import test_stacked_experts as of_stacks

Save = Callable[..., Quantised]
SWAPPED = torch.tensor([(E2M1[octet >> 4], E2M1[octet & 15]) for octet in range(256)])


def before(
    function: Callable[..., torch.Tensor], change: Callable[..., tuple[Any, ...]]
) -> Callable[..., torch.Tensor]:
    """Return a function with changed arguments."""
    return lambda *arguments, **options: function(*change(*arguments), **options)


FP8, PACKED = fp8.dequantise_fp8, integers.dequantise_packed
AWQ, GPTQ = integers.dequantise_awq, integers.dequantise_gptq
TRANSPOSED = before(FP8, lambda codes, scales, block, row: (codes, scales.t().contiguous(), block, row))
NEIGHBOURS = before(FP8, lambda codes, scales, block, row: (codes, scales.roll(1, 1), block, row))
ONE_MORE = before(
    PACKED, lambda words, bits, columns, scales, zeros, size: (words, bits, columns, scales, zeros.float() + 1, size)
)
ONE_LESS = before(AWQ, lambda words, columns, scales, zeros, size: (words, columns, scales, zeros.float() - 1, size))
NEXT_SCALE = before(
    GPTQ, lambda words, own, bits, columns, scales, *others: (words, own, bits, columns, scales.roll(1, 1), *others)
)
IN_ORDER = before(
    gptq_awq.dequantise_ordered, lambda codes, scales, zeros, order: (codes, scales, zeros, order.sort()[0])
)
LOW_FIRST = before(bitsandbytes.dequantise_4bit, lambda octets, *others: ((octets & 15) << 4 | (octets >> 4), *others))

MLX, INT4 = mlx.dequantise_affine_packed, modelopt_int4.dequantise_groups
MLX_NEXT_SCALE = before(
    MLX, lambda words, bits, columns, scales, *others: (words, bits, columns, scales.roll(1, 1), *others)
)
MLX_NEXT_BIAS = before(
    MLX, lambda words, bits, columns, scales, biases, size: (words, bits, columns, scales, biases.roll(1, 0), size)
)
MLX_ONE_MORE = before(
    MLX,
    lambda words, bits, columns, scales, biases, size: (words, bits, columns, scales, biases.float() + scales, size),
)
MLX_EXCHANGED = before(
    MLX, lambda words, bits, columns, scales, biases, size: (words, bits, columns, biases, scales, size)
)
INT4_NEXT_SCALE = before(INT4, lambda codes, scales, zeros, size: (codes, scales.roll(1, 1), zeros, size))
INT4_ONE_MORE = before(INT4, lambda codes, scales, zeros, size: (codes, scales, zeros + 1, size))


def swapped(words: torch.Tensor) -> torch.Tensor:
    """Return words whose nibbles are exchanged in each byte."""
    octets = words.contiguous().view(torch.uint8)
    return (octets >> 4 | (octets & 15) << 4).view(words.dtype)


MLX_SWAPPED = before(MLX, lambda words, *others: (swapped(words), *others))


def columns_in_pairs(parts: Any, rows: range) -> torch.Tensor:
    """Return codes of ModelOpt as if a byte held two columns of a row, as in other formats."""
    octets = parts["weight"][rows.start // 2 : rows.stop // 2]
    return (torch.stack([octets & 15, octets >> 4], dim=2).flatten(1) ^ 8).view(2 * len(octets), -1)


def odd_rows_first(parts: Any, rows: range) -> torch.Tensor:
    """Return codes of ModelOpt as if the even row were in the high half."""
    octets = parts["weight"][rows.start // 2 : rows.stop // 2]
    return torch.stack([octets >> 4, octets & 15], dim=1).flatten(0, 1) ^ 8


ERRORS: dict[str, tuple[Save, Any, Any, str, object]] = {
    "scales of columns for rows": (of_fp8.save, "block", fp8, "dequantise_fp8", TRANSPOSED),
    "a neighbour's block": (of_fp8.save, "block", fp8, "dequantise_fp8", NEIGHBOURS),
    "swapped nibbles of FP4": (of_fp4.save, "mxfp4", kernels_fp4, "_e2m1_pairs", lambda: SWAPPED),
    "a zero point too high": (of_integers.save, "int8 by channel", compressed_integers, "dequantise_packed", ONE_MORE),
    "a zero point too low": (of_gptq_awq.save, "awq", gptq_awq, "dequantise_awq", ONE_LESS),
    "a neighbour's group": (of_gptq_awq.save, "gptq", gptq_awq, "dequantise_gptq", NEXT_SCALE),
    "desc_act ignored": (of_gptq_awq.save, "gptq desc_act", gptq_awq, "dequantise_ordered", IN_ORDER),
    "AWQ's columns in order": (of_gptq_awq.save, "awq", integers, "_AWQ_ORDER", tuple(range(8))),
    "the low half first": (of_bitsandbytes.save, "nf4", bitsandbytes, "dequantise_4bit", LOW_FIRST),
    "MLX, swapped nibbles": (of_mlx.save, 4, mlx, "dequantise_affine_packed", MLX_SWAPPED),
    "MLX, a neighbour's scale": (of_mlx.save, 4, mlx, "dequantise_affine_packed", MLX_NEXT_SCALE),
    "MLX, a neighbour's bias": (of_mlx.save, 6, mlx, "dequantise_affine_packed", MLX_NEXT_BIAS),
    "MLX, a bias one code too high": (of_mlx.save, 4, mlx, "dequantise_affine_packed", MLX_ONE_MORE),
    "MLX, scales for biases": (of_mlx.save, 8, mlx, "dequantise_affine_packed", MLX_EXCHANGED),
    "ModelOpt int4, swapped nibbles": (of_modelopt_int4.save, "plain", modelopt_int4, "_codes", odd_rows_first),
    "ModelOpt int4, columns for rows": (of_modelopt_int4.save, "plain", modelopt_int4, "_codes", columns_in_pairs),
    "ModelOpt int4, a neighbour's scale": (
        *(of_modelopt_int4.save, "plain", modelopt_int4, "dequantise_groups"),
        INT4_NEXT_SCALE,
    ),
    "ModelOpt int4, a zero point too high": (
        *(of_modelopt_int4.save, "plain", modelopt_int4, "dequantise_groups"),
        INT4_ONE_MORE,
    ),
    "ModelOpt int4, no factors of inputs": (
        *(of_modelopt_int4.save, "int4", table, "with_scaled_inputs"),
        lambda weight, factors: weight,
    ),
}


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_in_a_format_is_found(error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, kind, target, name, replacement = ERRORS[error]
    quantised = save(kind, tmp_path, num_hidden_layers=1)
    check_values(quantised)
    monkeypatch.setattr(target, name, replacement)
    with pytest.raises(AssertionError):
        check_values(quantised)


@pytest.mark.parametrize(
    ("save", "kind", "weight", "attribute", "value"),
    [
        (of_gptq_awq.save, "gptq", gptq_awq.GptqWeight, "stores_minus_one", False),
        (of_gptq_awq.save, "gptq v2", gptq_awq.GptqWeight, "stores_minus_one", True),
        (of_fp4.save, "modelopt", fp4.Nvfp4Weight, "divides", True),
        (of_fp4.save, "compressed-tensors", fp4.Nvfp4Weight, "divides", False),
    ],
)
def test_the_other_version_of_a_format_is_found(
    save: Save, kind: str, weight: Any, attribute: str, value: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised = save(kind, tmp_path, num_hidden_layers=1)
    initialise = weight.__init__

    def other(self: object, **fields: Any) -> None:
        initialise(self, **fields | {attribute: value})

    monkeypatch.setattr(weight, "__init__", other)
    with pytest.raises(AssertionError):
        check_values(quantised)


@pytest.mark.parametrize("fused", ["gate_up_proj", "qkv_proj"])
@pytest.mark.parametrize(
    ("save", "kind"), [(of_fp8.save, "modelopt"), (of_mlx.save, 4), (of_modelopt_int4.save, "int4")]
)
def test_exchanged_parts_of_a_fused_layer_are_found(
    save: Save, kind: Any, fused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised = save(kind, tmp_path, num_hidden_layers=1)
    parts = {"gate_up_proj": ("up_proj", "gate_proj"), "qkv_proj": ("q_proj", "v_proj", "k_proj")}[fused]
    monkeypatch.setitem(stored_parts._FUSED, fused, parts)
    with pytest.raises(AssertionError):
        check_tokens(quantised)


def test_the_factors_of_gates_for_ups_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, dequantise = "Gemma 4, a scale for gates and one for ups", fp4.Nvfp4Weight.dequantise
    quantised = of_stacks.save(name, tmp_path)
    of_stacks.check_stacks(name, quantised)

    def exchanged(self: Any, parts: Any, rows: range, out: torch.Tensor | None = None) -> torch.Tensor:
        return dequantise(self, {**parts, "global scale": parts["global scale"].flatten().flip(0)}, rows, out)

    monkeypatch.setattr(fp4.Nvfp4Weight, "dequantise", exchanged)
    with pytest.raises(AssertionError):
        of_stacks.check_stacks(name, quantised)


STACK_ERRORS: dict[str, Callable[[Any], Any]] = {
    "swapped nibbles": lambda parts: {"weight": swapped(parts["weight"])},
    "a neighbour's scale": lambda parts: {"scale": parts["scale"].view(torch.uint8).roll(1, 1)},
    "another row's scale": lambda parts: {"scale": parts["scale"].view(torch.uint8).flip(0)},
    "no second scale": lambda parts: {"global scale": torch.ones(1)},
}


@pytest.mark.parametrize("error", STACK_ERRORS)
def test_errors_in_stacks_by_inputs_are_found(error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, dequantise = "gpt-oss-120b-nvfp4", fp4.Fp4ByInputsWeight.dequantise
    quantised = of_stacks.save(name, tmp_path)
    of_stacks.check_stacks(name, quantised)

    def changed(self: Any, parts: Any, rows: range, out: torch.Tensor | None = None) -> torch.Tensor:
        return dequantise(self, {**parts, **STACK_ERRORS[error](parts)}, rows, out)

    monkeypatch.setattr(fp4.Fp4ByInputsWeight, "dequantise", changed)
    with pytest.raises(AssertionError):
        of_stacks.check_stacks(name, quantised)
