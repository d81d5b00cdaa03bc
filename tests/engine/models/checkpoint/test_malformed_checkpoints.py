"""Malformed safetensors files and indexes: each serves, or fails with an error that names the file and the tensor.

Hypothesis damages the bytes, headers, tensors and index of a tiny checkpoint. At the end, a good one answers as before.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from engine.errors import ModelLoadError
from engine.models.checkpoint.checkpoint import open_checkpoint
from tests.engine.checkpoints import build_model
from tests.engine.models.checkpoint.damaged_checkpoints import Damage, Workshop, generate

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    created = Workshop(tmp_path_factory.mktemp("workshop"))
    yield created
    assert generate(created.single) == created.tokens


# --- the bytes of a file --------------------------------------------------------------------------------------------


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    """Return the header of a safetensors file, and the bytes after it."""
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def write_file(file: Path, header: str, data: bytes) -> None:
    encoded = header.encode(errors="surrogatepass")
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


@settings(max_examples=15, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_that_is_cut_off_anywhere(workshop: Workshop, share: float) -> None:
    size = (workshop.single / SINGLE).stat().st_size
    header, data = header_of(workshop.single / SINGLE)
    length = int(share * size)
    error = workshop.try_damaged(workshop.single, lambda copy: os.truncate(copy / SINGLE, length))
    assert isinstance(error, ModelLoadError)
    cut = [name for name, entry in header.items() if size - len(data) + entry.get("data_offsets", [0, 0])[1] > length]
    assert SINGLE in str(error)
    assert length < size - len(data) or any(name in str(error) for name in cut)


@settings(max_examples=15, deadline=None)
@given(length=st.integers(0, 2**64 - 1) | st.integers(0, 5000))
def test_a_header_of_another_length(workshop: Workshop, length: int) -> None:
    def damage(copy: Path) -> None:
        content = (copy / SINGLE).read_bytes()
        (copy / SINGLE).write_bytes(length.to_bytes(8, "little") + content[8:])

    error = workshop.try_damaged(workshop.single, damage)
    is_right = length == int.from_bytes((workshop.single / SINGLE).read_bytes()[:8], "little")
    assert error is None if is_right else SINGLE in str(error)


@settings(max_examples=20, deadline=None)
@given(edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=3))
def test_what_safetensors_rejects_is_rejected(workshop: Workshop, edits: list[tuple[float, int]]) -> None:
    rejected: list[SafetensorError] = []

    def damage(copy: Path) -> None:
        content = bytearray((copy / SINGLE).read_bytes())
        end = 8 + int.from_bytes(content[:8], "little")
        for share, byte in edits:
            content[int(share * end)] = byte
        (copy / SINGLE).write_bytes(content)
        try:
            with safe_open(copy / SINGLE, framework="pt"):
                pass
        except SafetensorError as error:
            rejected.append(error)

    error = workshop.try_damaged(workshop.single, damage)
    assert error is not None or not rejected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
DTYPES = st.sampled_from(["F32", "F16", "BF16", "I32", "U8", "F8_E4M3", "F4", "F64", "F31", ""])
SHAPES = st.lists(st.integers(-2, 100) | st.just(2**62) | st.just(2**64), max_size=3)
OFFSETS = st.lists(st.integers(-10, 20_000) | st.just(2**63), min_size=1, max_size=3)


@settings(max_examples=30, deadline=None)
@given(
    field_and_value=st.tuples(st.just("dtype"), DTYPES | JSON)
    | st.tuples(st.just("shape"), SHAPES | JSON)
    | st.tuples(st.just("data_offsets"), OFFSETS | JSON)
)
def test_a_wrong_entry_of_a_header_names_the_tensor(workshop: Workshop, field_and_value: tuple[str, Any]) -> None:
    field, value = field_and_value
    header, data = header_of(workshop.single / SINGLE)
    is_same = header[UP][field] == value
    header[UP][field] = value
    error = workshop.try_damaged(
        workshop.single, lambda copy: write_file(copy / SINGLE, json.dumps(header, ensure_ascii=False), data)
    )
    assert is_same if error is None else UP in str(error) or (field == "data_offsets" and "model." in str(error))


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ("[1]", "a list, not an object"),
        ("[" * 200_000, "not JSON"),
        ('{"a": 1, "a": 2}', "the key 'a' twice"),
        ('{"a": ' + "9" * 5000 + "}", "not JSON"),
        ('{"a": 7}', "the tensor 'a' has the unknown dtype None"),
    ],
)
def test_a_header_that_is_no_header(workshop: Workshop, header: str, problem: str) -> None:
    error = workshop.try_damaged(workshop.single, lambda copy: write_file(copy / SINGLE, header, b""))
    assert isinstance(error, ModelLoadError)
    assert problem in str(error)


# --- tensors --------------------------------------------------------------------------------------------------------


def change_tensor(good: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Damage:
    """Return the damage that changes one tensor of a checkpoint, or removes it, wherever it is stored."""

    def damage(copy: Path) -> None:
        for file in copy.glob("*.safetensors"):
            weights = load_file(file)
            if name in weights:
                changed = change(weights.pop(name))
                save_file(weights | ({} if changed is None else {name: changed}), file, {"format": "pt"})

    return damage


TENSORS = st.sampled_from(sorted(load for load in build_model("qwen3").state_dict() if load != "lm_head.weight"))


@settings(max_examples=15, deadline=None)
@given(
    name=TENSORS,
    bad=st.sampled_from([float("nan"), float("inf"), float("-inf")]),
    share=st.floats(0, 1, exclude_max=True),
    is_sharded=st.booleans(),
)
def test_a_weight_that_is_not_finite_is_named(
    workshop: Workshop, name: str, bad: float, share: float, is_sharded: bool
) -> None:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[int(share * tensor.numel())] = bad
        return tensor

    good = workshop.sharded if is_sharded else workshop.single
    error = workshop.try_damaged(good, change_tensor(good, name, change))
    assert isinstance(error, ModelLoadError)
    assert re.search(
        rf"'{re.escape(name)}' of .*\.safetensors' has 1 weights \({bad} at .*\) that are not finite", str(error)
    )


@settings(max_examples=15, deadline=None)
@given(
    name=TENSORS,
    change=st.sampled_from(
        [
            None,
            lambda tensor: tensor[:-1].clone(),
            lambda tensor: tensor[None].clone(),
            lambda tensor: tensor.to(torch.int8),
            lambda tensor: tensor.to(torch.float8_e4m3fn),
        ]
    ),
    is_sharded=st.booleans(),
)
def test_a_tensor_that_does_not_fit_is_named(workshop: Workshop, name: str, change: Any, is_sharded: bool) -> None:
    good = workshop.sharded if is_sharded else workshop.single
    error = workshop.try_damaged(good, change_tensor(good, name, change or (lambda _: None)))
    assert isinstance(error, ModelLoadError)
    assert f"'{name}'" in str(error)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gemma2", "CohereForCausalLM", "Glm4MoeForCausalLM"])
def test_a_tensor_of_any_family_that_does_not_fit_is_named(name: str, tmp_path: Path) -> None:
    """The two last are computed by transformers' modules, which join the matrices of experts."""
    workshop = Workshop(tmp_path, name)
    tensors = sorted(load_file(workshop.single / SINGLE))
    tensors = tensors[:: max(1, len(tensors) // 8)]
    changes: list[Callable[[torch.Tensor], torch.Tensor | None]] = [
        lambda _: None,
        lambda tensor: tensor[:-1].clone(),
        lambda tensor: tensor.to(torch.int8),
        lambda tensor: tensor.fill_(float("nan")),
    ]
    for index, tensor in enumerate(tensors):
        error = workshop.try_damaged(workshop.single, change_tensor(workshop.single, tensor, changes[index % 4]))
        assert isinstance(error, ModelLoadError), tensor
        assert (tensor if workshop.model_impl == "auto" else tensor.partition(".experts.")[0]) in str(error)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_tensor_of_another_floating_dtype_is_converted(workshop: Workshop, dtype: torch.dtype) -> None:
    for name in (UP, "model.embed_tokens.weight"):
        damage = change_tensor(workshop.single, name, lambda tensor: tensor.to(dtype))
        assert workshop.try_damaged(workshop.single, damage) is None


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen3", "float16"),
        ("qwen3_moe", "bfloat16"),
        ("CohereForCausalLM", "float32"),
        ("Glm4MoeForCausalLM", "float16"),
        ("Glm4MoeForCausalLM", "bfloat16"),
    ],
)
def test_a_weight_of_a_float16_checkpoint_that_is_not_finite_is_named(name: str, dtype: str, tmp_path: Path) -> None:
    """Whichever dtype is computed in: many published checkpoints with broken weights are in float16."""
    workshop = Workshop(tmp_path, name)
    tensors = sorted(load_file(workshop.single / SINGLE))
    for index, bad in enumerate([float("nan"), float("inf"), float("-inf")]):
        broken = tensors[index * (len(tensors) - 1) // 2]

        def damage(copy: Path, broken: str = broken, bad: float = bad) -> None:
            weights = {name: weight.half() for name, weight in load_file(copy / SINGLE).items()}
            weights[broken].view(-1)[-1] = bad
            save_file(weights, copy / SINGLE, {"format": "pt"})
            config = json.loads((copy / "config.json").read_text())
            (copy / "config.json").write_text(json.dumps(config | {"dtype": dtype}))

        error = workshop.try_damaged(workshop.single, damage)
        assert isinstance(error, ModelLoadError), broken
        assert f"'{broken}' of " in str(error)
        assert f"has 1 weights ({bad} at " in str(error)
        assert "that are not finite; download the file again" in str(error)


def test_weights_beyond_the_range_of_the_dtype_are_named(workshop: Workshop) -> None:
    def damage(copy: Path) -> None:
        change_tensor(workshop.single, UP, lambda tensor: tensor + 1e6)(copy)
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))

    error = workshop.try_damaged(workshop.single, damage)
    assert UP in str(error)
    assert "too large for float16; set dtype to bfloat16 or float32" in str(error)


# --- the index ------------------------------------------------------------------------------------------------------

FILE_NAMES = st.sampled_from(
    ["../x.safetensors", "/etc/passwd", "..", ".", "", "a/b", "\0", "x" * 300, "\ud800", "config.json"]
)


@settings(max_examples=20, deadline=None)
@given(name=TENSORS, file=FILE_NAMES | JSON)
def test_an_index_that_names_something_else(workshop: Workshop, name: str, file: Any) -> None:
    def damage(copy: Path) -> None:
        index = json.loads((copy / INDEX).read_text())
        index["weight_map"][name] = file
        (copy / INDEX).write_text(json.dumps(index))

    error = workshop.try_damaged(workshop.sharded, damage)
    assert isinstance(error, ModelLoadError)
    assert name in str(error) or "config.json' is not a readable safetensors file" in str(error)


@settings(max_examples=30, deadline=None)
@given(name=TENSORS, choice=st.integers(0, 100))
def test_a_tensor_in_another_shard_than_the_index_says_is_named(workshop: Workshop, name: str, choice: int) -> None:
    weight_map = json.loads((workshop.sharded / INDEX).read_text())["weight_map"]
    others = sorted(set(weight_map.values()) - {weight_map[name]})
    wrong = others[choice % len(others)]

    def damage(copy: Path) -> None:
        index = {"weight_map": weight_map | {name: wrong}}
        (copy / INDEX).write_text(json.dumps(index))

    error = workshop.try_damaged(workshop.sharded, damage)
    assert f"says that '{wrong}' holds the tensor '{name}', but " in str(error)


@settings(max_examples=30, deadline=None)
@given(weight_map=JSON)
def test_an_index_of_anything(workshop: Workshop, weight_map: Any) -> None:
    error = workshop.try_damaged(
        workshop.sharded, lambda copy: (copy / INDEX).write_text(json.dumps({"weight_map": weight_map})) and None
    )
    assert INDEX in str(error)


def test_a_tensor_that_two_shards_hold_comes_from_the_one_that_the_index_names(workshop: Workshop) -> None:
    weight_map = json.loads((workshop.sharded / INDEX).read_text())["weight_map"]
    other = next(file for file in sorted(set(weight_map.values())) if file != weight_map[NORM])

    def add_copy(path: Path) -> None:
        weights = load_file(path / other)
        save_file(weights | {NORM: torch.full((96,), float("nan"))}, path / other, {"format": "pt"})

    def add_copy_and_forget_it(path: Path) -> None:
        add_copy(path)
        listed = {name: file for name, file in weight_map.items() if name != NORM}
        (path / INDEX).write_text(json.dumps({"weight_map": listed}))

    assert workshop.try_damaged(workshop.sharded, add_copy) is None
    error = workshop.try_damaged(workshop.sharded, add_copy_and_forget_it)
    assert re.search(f"both hold the tensor '{NORM}', which .*index.json' does not name", str(error))


def test_nothing_is_read_before_the_headers_are_checked(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.models.checkpoint.files.tensor_files.TensorFiles.read_into", None)
    monkeypatch.setattr("engine.models.checkpoint.files.tensor_files.TensorFiles.map", None)
    with open_checkpoint(workshop.sharded) as checkpoint:
        checkpoint.require(NORM, [96])
    for damage in (
        change_tensor(workshop.sharded, UP, lambda tensor: tensor[:-1].clone()),
        change_tensor(workshop.sharded, UP, lambda _: None),
    ):
        assert UP in str(workshop.try_damaged(workshop.sharded, damage))
