"""Mistakes that are easy to make in a format: each makes the comparison with the values, or the tokens, fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.checkpoint import stored_parts
from engine.models.checkpoint.formats import bitsandbytes, compressed_integers, fp4, fp8, gptq_awq
from kernels.dequant import fp4 as kernels_fp4
from kernels.dequant import integers
from kernels.dequant.fp4 import E2M1
from tests.engine.models.checkpoint.formats import test_bitsandbytes as of_bitsandbytes
from tests.engine.models.checkpoint.formats import test_compressed_integers as of_integers
from tests.engine.models.checkpoint.formats import test_fp4 as of_fp4
from tests.engine.models.checkpoint.formats import test_fp8 as of_fp8
from tests.engine.models.checkpoint.formats import test_gptq_awq as of_gptq_awq
from tests.engine.models.checkpoint.formats.quantised import Quantised, check_tokens, check_values

Save = Callable[..., Quantised]
SWAPPED = torch.tensor([(E2M1[octet >> 4], E2M1[octet & 15]) for octet in range(256)])


def before(
    function: Callable[..., torch.Tensor], change: Callable[..., tuple[Any, ...]]
) -> Callable[..., torch.Tensor]:
    """Return a function with changed arguments."""
    return lambda *arguments, **options: function(*change(*arguments), **options)


FP8, AWQ, PACKED = fp8.dequantise_fp8, integers.dequantise_awq, integers.dequantise_packed
TRANSPOSED = before(FP8, lambda codes, scales, block, row: (codes, scales.t().contiguous(), block, row))
NEIGHBOURS = before(FP8, lambda codes, scales, block, row: (codes, scales.roll(1, 1), block, row))
ONE_MORE = before(
    PACKED, lambda words, bits, columns, scales, zeros, size: (words, bits, columns, scales, zeros.float() + 1, size)
)
ONE_LESS = before(AWQ, lambda words, columns, scales, zeros, size: (words, columns, scales, zeros.float() - 1, size))
NEXT_SCALE = before(
    PACKED, lambda words, bits, columns, scales, *others: (words, bits, columns, scales.roll(1, 1), *others)
)
IN_ORDER = before(
    gptq_awq.dequantise_ordered, lambda codes, scales, zeros, order: (codes, scales, zeros, order.sort()[0])
)
LOW_FIRST = before(bitsandbytes.dequantise_4bit, lambda octets, *others: ((octets & 15) << 4 | (octets >> 4), *others))

ERRORS: dict[str, tuple[Save, str, Any, str, object]] = {
    "scales of columns for rows": (of_fp8.save, "block", fp8, "dequantise_fp8", TRANSPOSED),
    "a neighbour's block": (of_fp8.save, "block", fp8, "dequantise_fp8", NEIGHBOURS),
    "swapped nibbles of FP4": (of_fp4.save, "mxfp4", kernels_fp4, "_e2m1_pairs", lambda: SWAPPED),
    "a zero point too high": (of_integers.save, "int8 by channel", compressed_integers, "dequantise_packed", ONE_MORE),
    "a zero point too low": (of_gptq_awq.save, "awq", gptq_awq, "dequantise_awq", ONE_LESS),
    "a neighbour's group": (of_gptq_awq.save, "gptq", gptq_awq, "dequantise_packed", NEXT_SCALE),
    "desc_act ignored": (of_gptq_awq.save, "gptq desc_act", gptq_awq, "dequantise_ordered", IN_ORDER),
    "AWQ's columns in order": (of_gptq_awq.save, "awq", integers, "_AWQ_ORDER", tuple(range(8))),
    "the low half first": (of_bitsandbytes.save, "nf4", bitsandbytes, "dequantise_4bit", LOW_FIRST),
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
def test_exchanged_parts_of_a_fused_layer_are_found(
    fused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised = of_fp8.save("modelopt", tmp_path, num_hidden_layers=1)
    parts = {"gate_up_proj": ("up_proj", "gate_proj"), "qkv_proj": ("q_proj", "v_proj", "k_proj")}[fused]
    monkeypatch.setitem(stored_parts._FUSED, fused, parts)
    with pytest.raises(AssertionError):
        check_tokens(quantised)
