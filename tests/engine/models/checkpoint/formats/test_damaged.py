"""Damaged quantised checkpoints: each loads, or is refused with an error that names the file and the tensor.

Hypothesis removes, cuts, transposes and converts tensors, overwrites their bytes, and changes the fields of the config.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.errors import ModelLoadError, PagodaError
from engine.models.adapter.loader import load_transformers_decoder
from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.implementation import read_shape
from engine.models.config.transformers_config import TransformersConfig
from engine.models.decoder.loader import load_decoder
from engine.models.tensor_parallel import TensorParallel
from tests.engine.models.checkpoint.damaged_checkpoints import REMEDY
from tests.engine.models.checkpoint.formats import test_bitsandbytes as of_bitsandbytes
from tests.engine.models.checkpoint.formats import test_compressed_integers as of_integers
from tests.engine.models.checkpoint.formats import test_fp4 as of_fp4
from tests.engine.models.checkpoint.formats import test_fp8 as of_fp8
from tests.engine.models.checkpoint.formats import test_gptq_awq as of_gptq_awq
from tests.engine.models.checkpoint.formats import test_mlx as of_mlx
from tests.engine.models.checkpoint.formats import test_modelopt_int4 as of_modelopt_int4
from tests.engine.models.checkpoint.formats.quantised import Quantised
from tests.engine.models.published import test_stacked_experts as of_modelopt_stacks

FILE = "model.safetensors"


def mlx_stacks(path: Path) -> Quantised:
    """Write experts as MLX stacks them."""
    quantised = of_mlx.save(4, path, "qwen3_moe", num_hidden_layers=1, moe_intermediate_size=64)
    save_file(of_mlx.stacked(load_file(quantised.path / FILE)), quantised.path / FILE, {"format": "pt"})
    return quantised


def modelopt_stacks(name: str) -> Callable[[Path], Quantised]:
    """Return a function that writes experts as ModelOpt stacks them."""
    return lambda path: of_modelopt_stacks.save(name, path)


KINDS: dict[str, Callable[[Path], Quantised]] = {
    "fp8 block": lambda path: of_fp8.save("block", path, num_hidden_layers=1),
    "fp8 channel": lambda path: of_fp8.save("channel", path, num_hidden_layers=1),
    "mxfp8": lambda path: of_fp8.save("mxfp8", path, num_hidden_layers=1),
    "nvfp4": lambda path: of_fp4.save("modelopt", path, num_hidden_layers=1),
    "mxfp4": lambda path: of_fp4.save("mxfp4", path, num_hidden_layers=1),
    "int4": lambda path: of_integers.save("int4 actorder", path, num_hidden_layers=1),
    "int8": lambda path: of_integers.save("int8 bytes, asymmetric", path, num_hidden_layers=1),
    "modelopt int4": lambda path: of_modelopt_int4.save("int4", path, num_hidden_layers=1),
    "gptq": lambda path: of_gptq_awq.save("gptq desc_act", path, num_hidden_layers=1),
    "awq": lambda path: of_gptq_awq.save("awq", path, num_hidden_layers=1),
    "nf4": lambda path: of_bitsandbytes.save("nf4 double", path, num_hidden_layers=1),
    "bnb int8": lambda path: of_bitsandbytes.save("int8", path, num_hidden_layers=1),
    "mlx": lambda path: of_mlx.save(4, path, num_hidden_layers=1),
    "mlx nvfp4": lambda path: of_mlx.save_mode("nvfp4", path, num_hidden_layers=1),
    "mlx mxfp8": lambda path: of_mlx.save_mode("mxfp8", path, num_hidden_layers=1),
    "gpt-oss": of_fp4.save_gpt_oss,
    "mlx stacks": mlx_stacks,
    "nvfp4 stacks, a scale for each": modelopt_stacks("Gemma 4, a scale for each expert"),
    "nvfp4 stacks by inputs": modelopt_stacks("Llama-4-Scout-17B-16E-Instruct-FP4"),
    "fp8 stacks by inputs": modelopt_stacks("Llama-4-Scout-17B-16E-Instruct-FP8"),
    "mxfp4 stacks": modelopt_stacks("Gemma 4 in MXFP4"),
}
# The beginning of the names of the weight that is damaged.
MODULE = "model.layers.0.mlp.up_proj"
STACKS = re.compile(r"model\.layers\.0\.(mlp|feed_forward)?\.?(experts|switch_mlp)\b")

IN_MAKE_TEST = ("fp8 block", "int4", "gptq", "nf4", "mlx")


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=() if kind in IN_MAKE_TEST else pytest.mark.long) for kind in KINDS],
)
def good(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = KINDS[request.param](tmp_path_factory.mktemp("good")).path
    assert load(path) is None
    return path


def load(path: Path) -> PagodaError | None:
    """Load a checkpoint; return the error, or None. Any error but ours is raised.

    With the one dtype FP8 stays codes, with the other it is dequantised.
    """
    return load_as(path, torch.bfloat16) or load_as(path, torch.float32)


def load_as(path: Path, dtype: torch.dtype) -> PagodaError | None:
    options: dict[str, Any] = {"dtype": dtype, "device": torch.device("cpu"), "max_model_len": 64}
    raised: PagodaError | None = None
    try:
        config = load_hf_config(path)
        shape = read_shape(config, "auto")
        if isinstance(shape, TransformersConfig):
            del options["max_model_len"]
            load_transformers_decoder(path, shape, **options, parallel=TensorParallel())
        else:
            load_decoder(path, config, **options, parallel=TensorParallel())
    except PagodaError as error:
        raised = error
    if raised is not None:
        assert isinstance(raised, ModelLoadError)
        assert str(path) in str(raised), raised
        assert REMEDY.search(str(raised)), raised
    return raised


def load_changed(good: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> PagodaError | None:
    """Load a copy with changed tensors."""
    tensors = load_file(good / FILE)
    change(tensors)
    copy = Path(shutil.copytree(good, good.parent / "copy"))
    try:
        save_file(tensors, copy / FILE, {"format": "pt"})
        return load(copy)
    finally:
        shutil.rmtree(copy)


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "removed": lambda _: None,
    "a row less": lambda tensor: tensor[:-1].clone() if tensor.dim() else tensor[None].clone(),
    "a dimension more": lambda tensor: tensor[None].clone(),
    "flat": lambda tensor: tensor.flatten().clone(),
    "transposed": lambda tensor: tensor.t().contiguous().clone() if tensor.dim() == 2 else None,
    "empty": lambda tensor: tensor.flatten()[:0].clone(),
    "one number": lambda tensor: tensor.flatten()[:1].clone(),
    "bytes": lambda tensor: tensor.flatten().view(torch.uint8).clone(),
    "wide integers": lambda tensor: tensor.flatten().view(torch.uint8).to(torch.int64).clone(),
    "doubles": lambda tensor: tensor.flatten().view(torch.uint8).to(torch.float64).clone(),
}


def draw_part(data: st.DataObject, good: Path) -> tuple[str, str]:
    """Return one of the tensors of the weight that is damaged, and what an error about it has to name."""
    stored = sorted(load_file(good / FILE))
    stacks = [name for name in stored if STACKS.match(name)]
    if not stacks:
        return data.draw(st.sampled_from([name for name in stored if name.startswith(MODULE)])), MODULE
    name = data.draw(st.sampled_from(stacks))
    stack = STACKS.match(name)
    assert stack is not None
    return name, stack[0]


def names_module(error: PagodaError, module: str) -> bool:
    """Return whether an error names a module as it is stored, or as transformers has it."""
    return any(name in str(error) for name in (module, module.replace("switch_mlp", "experts")))


@settings(max_examples=8, deadline=None)
@given(data=st.data(), change=st.sampled_from(sorted(CHANGES)))
def test_a_damaged_part_of_a_weight_is_named(good: Path, data: st.DataObject, change: str) -> None:
    name, module = draw_part(data, good)

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        changed = CHANGES[change](tensors.pop(name))
        if changed is not None:
            tensors[name] = changed

    error = load_changed(good, damage)
    assert error is None or names_module(error, module), error


@settings(max_examples=8, deadline=None)
@given(data=st.data(), octets=st.binary(min_size=1, max_size=64))
def test_other_bytes_give_weights_or_an_error(good: Path, data: st.DataObject, octets: bytes) -> None:
    name, module = draw_part(data, good)

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        memory = tensors[name].contiguous().view(-1).view(torch.uint8)
        size = min(len(octets), len(memory))
        memory[:size] = torch.tensor(list(octets[:size]), dtype=torch.uint8)

    error = load_changed(good, damage)
    assert error is None or names_module(error, module), error


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 300) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=10, deadline=None)
@given(data=st.data(), value=JSON)
def test_a_damaged_config_is_named(good: Path, data: st.DataObject, value: Any) -> None:
    file, key = good / "config.json", "quantization_config"
    if key not in json.loads(file.read_text()):
        file, key = good / "hf_quant_config.json", "quantization"
    before = file.read_text()
    config = json.loads(before)
    field = data.draw(st.sampled_from([None, *sorted(config[key])]))
    if field is None:
        config[key] = value
    else:
        config[key][field] = value
    try:
        file.write_text(json.dumps(config))
        load(good)
    finally:
        file.write_text(before)
