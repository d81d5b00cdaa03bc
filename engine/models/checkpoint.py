"""Checkpoint: the tensors of a directory of safetensors files, single or sharded, read one at a time.

Only safetensors are read: pickled weights can run code when they are loaded. The files are mapped into memory, not
copied: a whole tensor is a view of its file, of which only what is touched is ever read, and it keeps the file mapped
however long it lives.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import ModelLoadError
from engine.models.read_ahead import ReadAhead
from engine.models.sharding import Shard

__all__ = ["Checkpoint", "open_checkpoint"]


class Checkpoint:
    """Names and tensors of an open checkpoint.

    Args:
        path: the directory, for messages.
        files: each tensor's open safetensors file, by the tensor's name.
        read_ahead: told what will be read.
    """

    def __init__(self, path: Path, files: dict[str, Any], read_ahead: ReadAhead) -> None:
        self.path = path
        self._files = files
        self._read_ahead = read_ahead

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> list[str]:
        """Names of all the tensors, sorted."""
        return sorted(self._files)

    def require(self, name: str, shape: list[int]) -> None:
        """Look at what the file's header says of a tensor, and read nothing.

        Raises:
            ModelLoadError: if the checkpoint does not have the tensor or it is of another shape.
        """
        if name not in self._files:
            raise ModelLoadError(f"checkpoint '{self.path}' lacks the tensor '{name}'; it is incomplete")
        stored = self._files[name].get_slice(name).get_shape()
        if stored != shape:
            raise ModelLoadError(f"'{name}' of '{self.path}' has shape {stored}, but its config says {shape}")

    def read(self, name: str, shard: Shard | None = None) -> torch.Tensor:
        """Return one tensor, or only the ``shard`` of it, on the CPU and in the checkpoint's own dtype."""
        self._read_ahead.reached(name)
        tensor: torch.Tensor
        if shard is None or shard.is_whole:
            tensor = self._files[name].get_tensor(name)
        else:
            part = slice(shard.start, shard.stop)
            stored = self._files[name].get_slice(name)
            tensor = stored[part] if shard.dim == 0 else stored[:, part]
        return tensor

    def expect(self, names: Iterable[str]) -> None:
        """Announce the order in which tensors will be read, so that the disk can be ahead of whoever reads them."""
        self._read_ahead.expect(names)


@contextmanager
def open_checkpoint(path: str | Path) -> Iterator[Checkpoint]:
    """Open the safetensors files of a directory, memory-mapped. Tensors read in the ``with`` may outlive it.

    Raises:
        ModelLoadError: if there are none, a shard is missing, or a file is corrupt.
    """
    directory = Path(path)
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        read_ahead = stack.enter_context(ReadAhead())
        for file in _weight_files(directory):
            try:
                handle: Any = stack.enter_context(safe_open(str(file), framework="pt"))
                read_ahead.open(file)
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(f"'{file}' is no readable safetensors file: {error}") from error
            files |= dict.fromkeys(handle.keys(), handle)
        yield Checkpoint(directory, files, read_ahead)


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
