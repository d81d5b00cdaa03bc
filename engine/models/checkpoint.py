"""Checkpoint: the tensors of a directory of safetensors files, single or sharded, read one at a time.

Only safetensors are read: pickled weights can run code when they are loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import ModelLoadError
from engine.models.sharding import Shard

__all__ = ["Checkpoint", "open_checkpoint"]


class Checkpoint:
    """Names and tensors of an open checkpoint; remembers which ones were read."""

    def __init__(self, path: Path, files: dict[str, Any]) -> None:
        self._path = path
        self._files = files  # tensor name -> open safetensors file
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str, shape: list[int], shard: Shard | None = None) -> torch.Tensor:
        """Return one tensor, or only the ``shard`` of it, on the CPU and in the checkpoint's own dtype.

        Args:
            name: the tensor's.
            shape: what the whole tensor must have.
            shard: the part to read from the disk.

        Raises:
            ModelLoadError: if the checkpoint does not have it or it is of another shape.
        """
        if name not in self._files:
            raise ModelLoadError(f"checkpoint '{self._path}' lacks the tensor '{name}'; it is incomplete")
        self._read.add(name)
        file = self._files[name]
        stored = file.get_slice(name)
        if stored.get_shape() != shape:
            raise ModelLoadError(
                f"'{name}' of '{self._path}' has shape {stored.get_shape()}, but its config says {shape}"
            )
        tensor: torch.Tensor
        if shard is None or shard.is_whole:
            tensor = file.get_tensor(name)
        else:
            part = slice(shard.start, shard.stop)
            tensor = stored[part] if shard.dim == 0 else stored[:, part]
        return tensor

    @property
    def unread(self) -> list[str]:
        """Names of the tensors that nobody asked for."""
        return sorted(set(self._files) - self._read)


@contextmanager
def open_checkpoint(path: str | Path) -> Iterator[Checkpoint]:
    """Open the safetensors files of a directory, memory-mapped, for the time of the ``with``.

    Raises:
        ModelLoadError: if there are none, a shard is missing, or a file is corrupt.
    """
    directory = Path(path)
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for file in _weight_files(directory):
            try:
                handle: Any = stack.enter_context(safe_open(str(file), framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(f"'{file}' is no readable safetensors file: {error}") from error
            files |= dict.fromkeys(handle.keys(), handle)
        yield Checkpoint(directory, files)


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
