"""bitsandbytes checkpoints: the values of every weight, bit for bit, and the tokens of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import ModelLoadError
from engine.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from engine.models.checkpoint.sharding import Shard
from kernels.coded_weight import decode
from kernels.dequant.bitsandbytes import ByteLevels, byte_levels
from kernels.dequant.stored import unpacked
from tests.engine.models.checkpoint.formats.quantised import (
    FILE,
    Encoded,
    Quantised,
    check_codes,
    check_tokens,
    check_values,
    save_quantised,
    tiny_model,
)

# Quantiles of a normal distribution, from the QLoRA paper (Dettmers et al., 2023), appendix E, rounded.
LOWER = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0]
UPPER = [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0]
NF4 = torch.tensor(LOWER + UPPER)
FP4 = torch.tensor([0.0, 0.0052, 0.6667, 1.0, 0.3333, 0.5, 0.1667, 0.25])
TABLES = {"nf4": NF4, "fp4": torch.cat([FP4, -FP4])}
DYNAMIC = torch.linspace(-1, 1, 256)
BLOCK, NESTED_BLOCK = 64, 256


# What a level of a byte may be wrong by, relative to the largest number of the block.
LEVEL_ERRORS = {"nf4": 0.00386, "fp4": 0.00315}


def four_bits(weight: torch.Tensor, kind: str, *, is_nested: bool, block_size: int = BLOCK) -> Encoded:
    table, flat = TABLES[kind], weight.flatten()
    blocks = flat.split(block_size)
    scales = torch.stack([block.abs().amax() for block in blocks])
    state: dict[str, Any] = {
        "quant_type": kind,
        "blocksize": block_size,
        "dtype": "bfloat16",
        "shape": list(weight.shape),
    }
    tensors = {"weight.quant_map": table, "weight.absmax": scales}
    if is_nested:
        offset = float(scales.mean())
        parts = (scales - offset).split(NESTED_BLOCK)
        maxima = torch.stack([part.abs().amax() for part in parts])
        codes = [(part / top - DYNAMIC[:, None]).abs().argmin(0) for part, top in zip(parts, maxima, strict=True)]
        scales = torch.cat([DYNAMIC[code] * top for code, top in zip(codes, maxima, strict=True)]) + offset
        tensors |= {"weight.absmax": torch.cat(codes).to(torch.uint8), "weight.nested_quant_map": DYNAMIC}
        tensors |= {"weight.nested_absmax": maxima}
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
    codes = [
        (block / scale.clamp(min=1e-9) - table[:, None]).abs().argmin(0)
        for block, scale in zip(blocks, scales, strict=True)
    ]
    values = torch.cat([table[code] * scale for code, scale in zip(codes, scales, strict=True)]).view(weight.shape)
    joined = torch.cat(codes)
    tensors["weight"] = (joined[::2] << 4 | joined[1::2]).to(torch.uint8).view(-1, 1)  # the first is in the high half
    content = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    error = level_error(kind, values, block_size)
    return Encoded(tensors | {f"weight.quant_state.bitsandbytes__{kind}": content}, values, error)


def level_error(kind: str, values: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return what each number may be wrong by if the table's numbers are levels of a byte."""
    largest = [part.abs().amax().expand(len(part)) for part in values.flatten().split(block_size)]
    return LEVEL_ERRORS[kind] * torch.cat(largest).view(values.shape)


def eight_bits(weight: torch.Tensor) -> Encoded:
    maxima = weight.abs().amax(1)
    codes = (weight / maxima[:, None] * 127).round().to(torch.int8)
    values = codes.float() * maxima[:, None] * torch.tensor(1 / 127)
    return Encoded({"weight": codes, "SCB": maxima, "weight_format": torch.tensor(0, dtype=torch.uint8)}, values)


def save(kind: str, path: Path, family: str = "qwen3", **options: Any) -> Quantised:
    config = {"quant_method": "bitsandbytes", "load_in_4bit": kind != "int8", "load_in_8bit": kind == "int8"}
    config |= {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "llm_int8_skip_modules": ["lm_head"]}

    def encode(_: str, weight: torch.Tensor) -> Encoded:
        return eight_bits(weight) if kind == "int8" else four_bits(weight, kind[:3], is_nested="double" in kind)

    return save_quantised(tiny_model(family, **options), path, encode, {"quantization_config": config})


@pytest.mark.parametrize("kind", ["nf4 double", "nf4", "fp4", "int8"])
def test_every_kind_gives_the_values_and_tokens(kind: str, tmp_path: Path) -> None:
    quantised = save(kind, tmp_path)
    check_values(quantised)
    check_tokens(quantised)


@pytest.mark.parametrize("kind", TABLES)
def test_levels_of_a_byte_are_the_best_there_are(kind: str) -> None:
    table = TABLES[kind]
    levels = byte_levels(tuple(table.tolist()))
    assert levels is not None
    assert all(1 <= level <= 255 for level in levels.levels)
    assert levels.levels[int(table.abs().argmin())] == ByteLevels.ZERO
    numbers = levels.scale * (torch.tensor(levels.levels, dtype=torch.float64) - ByteLevels.ZERO)
    errors = numbers - table
    assert float(errors.abs().max()) < LEVEL_ERRORS[kind]
    assert float(errors.square().mean().sqrt()) < 0.0018
    for top in (127, 126, 120, 112.5, 100):  # any other scale
        others = (table.double() * top).round() / top - table
        assert float(errors.square().sum()) <= float(others.square().sum()) + 1e-9


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_table_with_a_number_that_is_not_finite_has_no_levels(number: float) -> None:
    assert byte_levels((number, *NF4.tolist()[1:])) is None
    assert byte_levels((0.0,) * 16) is None


def write_one(path: Path, encoded: Encoded) -> None:
    """Write a checkpoint of the one weight ``layer.weight``."""
    save_file({f"layer.{name}": tensor for name, tensor in encoded.tensors.items()}, path / FILE, {"format": "pt"})
    (path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "bitsandbytes"}}))


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize(
    ("columns", "block_size", "group"),
    [(192, 64, 64), (96, 64, 32), (48, 64, 16), (256, 4096, 256), (512, 128, 128), (200, 64, 0), (67, 64, 0)],
)
def test_blocks_go_on_from_one_output_to_the_next(
    columns: int, block_size: int, group: int, is_nested: bool, tmp_path: Path
) -> None:
    """Neighbours with one scale are as many as divide a block and an output; below 16 no codes are kept."""
    weight = torch.randn(70, columns, generator=torch.Generator().manual_seed(columns))
    encoded = four_bits(weight, "nf4", is_nested=is_nested, block_size=block_size)
    write_one(tmp_path, encoded)
    with open_checkpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.read("layer.weight"), encoded.values)
        assert torch.equal(checkpoint.read("layer.weight", Shard(0, 70, 33, 60)), encoded.values[33:60])
        form = checkpoint.code_format("layer.weight")
        assert (form is not None) == bool(group)
        if form is not None:
            assert form.group in (max(group, 32), 2**24)  # with one group there is one for all inputs
            check_codes(checkpoint, "layer.weight", encoded.values, encoded.code_error)


@pytest.mark.parametrize("kind", TABLES)
def test_experts_of_a_stack_are_codes_of_their_own(kind: str, tmp_path: Path) -> None:
    weight = torch.randn(5, 24, 96, generator=torch.Generator().manual_seed(5))
    encoded = four_bits(weight, kind, is_nested=True)
    write_one(tmp_path, encoded)
    assert encoded.code_error is not None
    error = encoded.code_error + 1e-6
    with open_checkpoint(tmp_path) as checkpoint:
        for index in range(5):
            rows = Shard(0, 24, 8, 20, num_stacked=5, index=index)
            assert torch.equal(checkpoint.read("layer.weight", rows), encoded.values[index, 8:20])
            assert checkpoint.code_format("layer.weight", rows) is not None
            difference = decode(unpacked(checkpoint.read_coded("layer.weight", rows))) - encoded.values[index, 8:20]
            assert (difference.abs() <= error[index, 8:20]).all()


PLANTED = {
    "halves of bytes swapped": lambda t: t | {"weight": t["weight"] >> 4 | t["weight"] << 4},
    "a neighbour's scale": lambda t: t | {"weight.absmax": t["weight.absmax"].roll(1)},
    "a neighbour's nested scale": lambda t: t | {"weight.nested_absmax": t["weight.nested_absmax"].roll(1)},
    "the other half's sign": lambda t: t | {"weight.quant_map": -t["weight.quant_map"]},
    "the last byte": lambda t: t | {"weight": torch.cat((t["weight"][:-1], t["weight"][-1:] ^ 0x0F))},
    "the last block's scale": lambda t: t | {"weight.absmax": torch.cat((t["weight.absmax"][:-1],
                                                                         t["weight.absmax"][-1:] ^ 0x40))},
}  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_error_is_seen(planted: str, tmp_path: Path) -> None:
    weight = torch.randn(4 * 256, 192, generator=torch.Generator().manual_seed(1))
    right = four_bits(weight, "nf4", is_nested=True)
    wrong = Encoded(PLANTED[planted](right.tensors), right.values)

    def check(checkpoint: Checkpoint) -> None:
        check_codes(checkpoint, "layer.weight", right.values, right.code_error)

    for encoded in (right, wrong):
        write_one(tmp_path, encoded)
        with open_checkpoint(tmp_path) as checkpoint:
            if encoded is right:
                check(checkpoint)
                continue
            with pytest.raises(AssertionError):
                check(checkpoint)


def test_a_scale_that_is_not_finite_is_refused_with_the_names(tmp_path: Path) -> None:
    encoded = four_bits(torch.randn(32, 64), "nf4", is_nested=False)
    scales = encoded.tensors["weight.absmax"].clone()
    scales[-1] = torch.nan
    write_one(tmp_path, Encoded(encoded.tensors | {"weight.absmax": scales}, encoded.values))
    with (
        open_checkpoint(tmp_path) as checkpoint,
        pytest.raises(ModelLoadError, match=r"'layer.weight' of '.*model.safetensors'.*scale of nan"),
    ):
        checkpoint.read_coded("layer.weight")
