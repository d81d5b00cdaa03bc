"""Checkpoint: the tensors of a directory of safetensors files, single or sharded, read one at a time.

Only safetensors are read: pickled weights can run code when they are loaded. The files are mapped into memory: a whole
tensor is a view of its file, which stays mapped as long as the tensor lives, and only the touched parts are read. A
tensor that is copied anyway is read instead, so that memory holds it only once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import ModelLoadError
from engine.models.sharding import Shard
from engine.models.tensor_files import TensorFiles

__all__ = ["Checkpoint", "open_checkpoint"]

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class Checkpoint:
    """Names and tensors of an open checkpoint.

    Args:
        path: the directory, for messages.
        mapped: each tensor's open safetensors file, by the tensor's name.
        files: the same files, for reading without mapping.
    """

    def __init__(self, path: Path, mapped: dict[str, Any], files: TensorFiles) -> None:
        self.path = path
        self._mapped = mapped
        self._files = files

    def __contains__(self, name: object) -> bool:
        return name in self._mapped

    @property
    def names(self) -> list[str]:
        """Names of all the tensors, sorted."""
        return sorted(self._mapped)

    def require(self, name: str, shape: list[int]) -> None:
        """Check a tensor's name and shape in the file's header; read nothing else.

        Raises:
            ModelLoadError: if the checkpoint lacks the tensor or stores another shape.
        """
        if name not in self._mapped:
            raise ModelLoadError(f"checkpoint '{self.path}' lacks the tensor '{name}'; it is incomplete")
        stored = self._mapped[name].get_slice(name).get_shape()
        if stored != shape:
            raise ModelLoadError(f"'{name}' of '{self.path}' has shape {stored}, but its config says {shape}")

    def read(self, name: str, shard: Shard | None = None) -> torch.Tensor:
        """Return one tensor, or only the ``shard`` of it, on the CPU and in the checkpoint's own dtype."""
        self._files.reached(name)
        tensor: torch.Tensor
        if shard is None or shard.is_whole:
            tensor = self._mapped[name].get_tensor(name)
        else:
            part = (slice(None),) * shard.dim + (slice(shard.start, shard.stop),)
            stack = () if shard.num_stacked is None else (shard.index,)
            tensor = self._mapped[name].get_slice(name)[stack + part]
        return tensor

    def read_into(self, out: torch.Tensor, name: str, shard: Shard) -> None:
        """Fill ``out``, contiguous and on any device, with a ``shard`` of a tensor, converted to its dtype.

        Raises:
            ModelLoadError: if the file cannot be read to the end of the tensor.
        """
        if out.device.type != "cpu" or self._files.dtype(name) != _DTYPES.get(out.dtype) or shard.dim != 0:
            out.copy_(self.read(name, shard))
            return
        self._files.reached(name)
        stride = math.prod(out.shape[1:]) * out.itemsize  # bytes
        try:
            rows = shard.index * shard.full + shard.start
            self._files.read_into(out.flatten().view(torch.uint8).numpy().data, name, rows * stride)
        except OSError as error:
            raise ModelLoadError(f"'{name}' of '{self.path}' could not be read: {error}") from error

    def expect(self, names: Iterable[str]) -> None:
        """Set the order in which tensors will be read, so that the disk reads ahead."""
        self._files.expect(names)


@contextmanager
def open_checkpoint(path: str | Path) -> Iterator[Checkpoint]:
    """Open the safetensors files of a directory, memory-mapped. Tensors read in the ``with`` may outlive it.

    Raises:
        ModelLoadError: if there is no such file, a shard is missing, or a file is corrupt.
    """
    directory = Path(path)
    with ExitStack() as stack:
        mapped: dict[str, Any] = {}
        files = stack.enter_context(TensorFiles())
        for file in _weight_files(directory):
            try:
                handle: Any = stack.enter_context(safe_open(str(file), framework="pt"))
                files.open(file)
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(f"'{file}' is no readable safetensors file: {error}") from error
            mapped |= dict.fromkeys(handle.keys(), handle)
        yield Checkpoint(directory, mapped, files)


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelLoadError(f"'{index}' is malformed: {type(error).__name__}: {error}") from error
        if any(Path(name).name != name for name in names):
            raise ModelLoadError(f"'{index}' names files outside its own directory")
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise ModelLoadError(f"checkpoint '{directory}' lacks the shards {', '.join(missing)}")
        return [directory / name for name in names]
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    pickled = [file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in directory.glob(pattern)]
    hint = f"; {pickled[0]} is pickled, which can run code: convert it to safetensors" if pickled else ""
    raise ModelLoadError(f"'{directory}' has no model.safetensors and no model.safetensors.index.json{hint}")
