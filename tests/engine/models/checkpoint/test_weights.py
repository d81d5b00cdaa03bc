"""Weights one at a time: what is yielded in which order, what is mapped and what is copied, and what is read ahead."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from engine.errors import ModelLoadError
from engine.models.checkpoint import plain_tensor, progress
from engine.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from engine.models.checkpoint.files import read_ahead
from engine.models.checkpoint.files import tensor_files as module
from engine.models.checkpoint.files.tensor_files import TensorFiles
from engine.models.checkpoint.sharding import Shard, shard_of
from engine.models.checkpoint.weights import StoredParameter, read_weights, require_parameters
from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.model_config import ModelConfig
from engine.models.decoder.decoder import Decoder
from engine.models.decoder.loader import load_decoder
from engine.models.tensor_parallel import TensorParallel
from kernels.layer_ops.torch import TorchOps
from tests.engine.checkpoints import build_model, save_checkpoint
from tests.engine.conftest import SavedModel

CPU = torch.device("cpu")


def shapes_of(path: str) -> dict[str, torch.Size]:
    config = ModelConfig.from_hf(load_hf_config(path))
    model = Decoder(config, torch.zeros(1), TensorParallel(), TorchOps())
    return {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}


def weights_of(
    checkpoint: Checkpoint, path: str, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, torch.Tensor]]:
    return read_weights(checkpoint, parameters_of(checkpoint, path, dtype), CPU)


def parameters_of(checkpoint: Checkpoint, path: str, dtype: torch.dtype = torch.float32) -> list[StoredParameter]:
    config = ModelConfig.from_hf(load_hf_config(path))
    return require_parameters(checkpoint, shapes_of(path), config, TensorParallel(), dtype)


def mapped_file(tensor: torch.Tensor) -> str:
    """Return the file that the tensor's memory is mapped from, or nothing."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, *rest = line.split(maxsplit=5)
        start, stop = (int(part, 16) for part in area.split("-"))
        if start <= address < stop:
            return rest[-1] if len(rest) == 5 else ""
    return ""


def test_every_parameter_comes_once_in_the_models_order_as_the_checkpoint_has_it(family: SavedModel) -> None:
    with open_checkpoint(family.path) as checkpoint:
        weights = dict(weights_of(checkpoint, family.path))
    assert list(weights) == list(shapes_of(family.path))
    stored = load_file(Path(family.path) / "model.safetensors")
    attention, mlp = "layers.1.self_attn", "layers.1.mlp"
    fused = [stored[f"model.{attention}.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(weights[f"{attention}.qkv_proj.weight"], torch.cat(fused))
    fused = [stored[f"model.{mlp}.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(weights[f"{mlp}.gate_up_proj.weight"], torch.cat(fused))
    assert torch.equal(weights[f"{mlp}.down_proj.weight"], stored[f"model.{mlp}.down_proj.weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_another_dtype_are_converted_as_torch_does(family: SavedModel, dtype: torch.dtype) -> None:
    with open_checkpoint(family.path) as checkpoint:
        as_stored = dict(weights_of(checkpoint, family.path))
        for name, weight in weights_of(checkpoint, family.path, dtype):
            assert torch.equal(weight, as_stored[name].to(dtype)), name


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at Linux's map of the process")
def test_what_needs_no_change_is_a_view_of_the_file_that_outlives_the_open_checkpoint(qwen3: SavedModel) -> None:
    with open_checkpoint(qwen3.path) as checkpoint:
        weights = dict(weights_of(checkpoint, qwen3.path))
    file = str(Path(qwen3.path) / "model.safetensors")
    for name in ("embed_tokens.weight", "layers.0.mlp.down_proj.weight", "norm.weight"):
        assert mapped_file(weights[name]) == file
    assert mapped_file(weights["layers.0.self_attn.qkv_proj.weight"]) != file
    assert torch.equal(weights["embed_tokens.weight"], load_file(file)["model.embed_tokens.weight"])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at Linux's map of the process")
def test_the_embedding_of_a_loaded_model_is_the_file(tmp_path: Path) -> None:
    path = save_checkpoint(build_model("mistral"), tmp_path)
    model = load_decoder(
        path,
        load_hf_config(path),
        dtype=torch.float32,
        device=CPU,
        max_model_len=64,
        parallel=TensorParallel(),
    )
    assert mapped_file(model.embed_tokens.weight).endswith("model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_head_is_the_embedding_itself(qwen3: SavedModel, dtype: torch.dtype) -> None:
    with open_checkpoint(qwen3.path) as checkpoint:
        weights = dict(weights_of(checkpoint, qwen3.path, dtype))
    assert weights["lm_head.weight"].data_ptr() == weights["embed_tokens.weight"].data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("converted_bytes", [1, 1000, 2**20])
def test_a_ranks_rows_are_read_as_they_are_mapped(
    family: SavedModel, dtype: torch.dtype, converted_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_tensor, "_CONVERTED_BYTES", converted_bytes)
    config = ModelConfig.from_hf(load_hf_config(family.path))
    num_checked = 0
    with open_checkpoint(family.path) as checkpoint:
        for name in checkpoint.names:
            for rank in range(2):
                shard = shard_of(name, config, rank, 2)
                if shard is not None:
                    mapped = checkpoint.read(name, shard)
                    filled = torch.empty(mapped.shape, dtype=dtype)
                    checkpoint.read_into(filled, name, shard)
                    assert torch.equal(filled, mapped.to(dtype)), name
                    num_checked += 1
    assert num_checked >= 2 * (1 + 7 * 2)  # the embedding, and the matrices of two layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (0, 4), (3, 0), (2, 3, 4)])
def test_a_tensor_of_any_shape_is_read(tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randn(shape)
    save_file({"other": torch.ones(3), "weight": tensor}, tmp_path / "model.safetensors")
    filled = torch.full(shape, torch.nan, dtype=dtype)
    with open_checkpoint(tmp_path) as checkpoint:
        checkpoint.read_into(filled, "weight")
    assert torch.equal(filled, tensor.to(dtype))


def test_a_file_that_has_become_shorter_is_an_error(qwen3: SavedModel, tmp_path: Path) -> None:
    path = shutil.copytree(qwen3.path, tmp_path / "checkpoint")
    with open_checkpoint(path) as checkpoint:
        os.truncate(path / "model.safetensors", 50_000)
        with pytest.raises(ModelLoadError, match=r"model\.layers\.1.* could not be read: .*has become shorter"):
            checkpoint.read_into(torch.empty(96, 48), "model.layers.1.mlp.up_proj.weight", Shard(0, 96, 0, 96))


def test_a_weight_that_nobody_keeps_is_gone_before_the_next_one_is_read(
    qwen3: SavedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "MAX_BYTES", 0)  # nothing is read before it is asked for
    last: weakref.ref[torch.Tensor] | None = None
    num_read = 0
    with open_checkpoint(qwen3.path) as checkpoint:
        reads = checkpoint.read_into

        def read_into(out: torch.Tensor, name: str, shard: Shard | None = None) -> bool:
            nonlocal num_read
            num_read += 1
            assert last is None or last() is None
            return reads(out, name, shard)

        checkpoint.read_into = read_into  # type: ignore[method-assign]
        for name, weight in weights_of(checkpoint, qwen3.path, torch.bfloat16):
            last = weakref.ref(weight) if name not in ("embed_tokens.weight", "lm_head.weight") else None
            del weight
    assert num_read > 20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at Linux's map of the process")
def test_only_what_may_be_mapped_is(qwen3: SavedModel) -> None:
    with open_checkpoint(qwen3.path) as checkpoint:
        parameters = parameters_of(checkpoint, qwen3.path)
        weights = read_weights(checkpoint, parameters, CPU, may_be_mapped=lambda name: name == "embed_tokens.weight")
        mapped = {name for name, weight in weights if mapped_file(weight).endswith("model.safetensors")}
    assert mapped == {"embed_tokens.weight", "lm_head.weight"}


def test_a_checkpoint_that_does_not_match_is_rejected_before_reading(qwen3: SavedModel, tmp_path: Path) -> None:
    path = shutil.copytree(qwen3.path, tmp_path / "checkpoint")
    file = path / "model.safetensors"
    shapes = shapes_of(qwen3.path)
    save_file(load_file(file) | {"model.norm.weight": torch.zeros(5)}, file, {"format": "pt"})
    config = ModelConfig.from_hf(load_hf_config(path))
    with open_checkpoint(path) as checkpoint, pytest.raises(ModelLoadError, match=r"'model\.norm\.weight'"):
        require_parameters(checkpoint, shapes, config, TensorParallel(), torch.float32)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="only Linux reads ahead")
def test_the_next_tensors_are_requested_once_within_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {name: torch.zeros(size, dtype=torch.uint8) for name, size in {"a": 300, "b": 10, "c": 128}.items()}
    save_file(tensors, tmp_path / "weights.safetensors")
    fetched: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, start, length, advice: fetched.append((start, length)))
    monkeypatch.setattr(module, "CHUNK", 128)
    monkeypatch.setattr(module, "WINDOW", 100)
    with TensorFiles() as ahead:
        stored = ahead.open(tmp_path / "weights.safetensors")
        ahead.expect(stored[name] for name in ("a", "c", "b"))
        ahead.reached(stored["a"])
        assert [length for _, length in fetched] == [128]  # c, which fills the window; a is read right now
        ahead.reached(stored["c"])
        assert [length for _, length in fetched] == [128, 10]
        ahead.reached(stored["b"])
        ahead.reached(stored["a"])  # nothing is left to fetch, and reading again does no harm
    end = (tmp_path / "weights.safetensors").stat().st_size
    assert sorted(fetched) == [(end - 138, 10), (end - 128, 128)]  # after a's bytes, up to the end of the file


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="only Linux reads ahead")
def test_a_file_system_that_rejects_advice_is_read_anyway(qwen3: SavedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError("no advice, please")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    with open_checkpoint(qwen3.path) as checkpoint:
        assert len(dict(weights_of(checkpoint, qwen3.path))) == len(shapes_of(qwen3.path))


def bars_of(path: str, show_progress: bool, monkeypatch: pytest.MonkeyPatch) -> list[tqdm[NoReturn]]:
    """Return the progress bars that a load makes."""
    bars: list[tqdm[NoReturn]] = []

    class Recorded(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            bars.append(self)

    monkeypatch.setattr("tqdm.tqdm", Recorded)
    load_decoder(
        path,
        load_hf_config(path),
        dtype=torch.bfloat16,
        device=CPU,
        max_model_len=64,
        parallel=TensorParallel(),
        show_progress=show_progress,
    )
    return bars


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_progress_bar_counts_each_byte_once_and_shows_on_a_terminal(
    family: SavedModel, is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = io.StringIO()
    stderr.isatty = lambda: is_terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", stderr)
    (bar,) = bars_of(family.path, True, monkeypatch)
    stored = load_file(Path(family.path) / "model.safetensors")
    if is_terminal:
        assert bar.n == bar.total == sum(2 * tensor.numel() for tensor in stored.values())  # in bfloat16
        assert "Loading weights: 100%" in stderr.getvalue()
    assert bool(stderr.getvalue()) == is_terminal


def test_without_progress_there_is_no_bar(qwen3: SavedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bars_of(qwen3.path, False, monkeypatch) == []


def test_a_long_load_without_a_terminal_is_logged(
    qwen3: SavedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(progress, "LOG_INTERVAL_S", 0.0)
    caplog.set_level("INFO")
    bars_of(qwen3.path, True, monkeypatch)
    lines = [line for line in caplog.messages if line.startswith("Loading weights:")]
    assert len(lines) > 10
    assert re.fullmatch(r"Loading weights: \d+\.\d of \d+\.\d GB \(\d+%\), about \d+ seconds to go", lines[0])
