"""GgufFile: a model as llama.cpp stores it, in one file or split over several.

model-Q4_K_M.gguf
model-Q4_K_M-00001-of-00003.gguf    the first part has the metadata of the model; every part has tensors
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import ConfigError, ModelLoadError, shown
from engine.models.gguf.header import GgufTensor, read_gguf_header

__all__ = ["GgufFile", "gguf_name", "is_gguf", "open_gguf", "require_gguf_file"]

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
_CACHED = 2  # a server's process reads config and tokenizer of one model


class GgufFile(NamedTuple):
    """A model's metadata and tensors. Do not change them: several callers share them."""

    path: Path  # the first part
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]  # by llama.cpp's names


def is_gguf(path: str | Path) -> bool:
    """Return whether a model's path is that of a GGUF file, by its name alone."""
    return str(path).lower().endswith(".gguf")


def gguf_name(path: str | Path) -> str:
    """Return a file's name without `.gguf` and the number of the part."""
    name = Path(path).name
    match = _PART.fullmatch(name)
    return match[1] if match else Path(name).stem


def require_gguf_file(path: str | Path) -> None:
    """Raise ConfigError unless there is a file at ``path``, and it is the first part if there are several."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"model '{path}' is not a file; give the path of a GGUF file")
    match = _PART.fullmatch(file.name)
    if match and match[2] != "00001":
        first = file.with_name(f"{match[1]}-00001-of-{match[3]}.gguf")
        raise ConfigError(f"model '{path}' is part {int(match[2])} of several; give the path of the first, '{first}'")


def open_gguf(path: str | Path) -> GgufFile:
    """Return the metadata and tensors of a model, read from the headers of its files.

    Raises:
        ConfigError: if there is no such file, or it is not the first part of several.
        ModelLoadError: if a file is missing or malformed, or has a tensor of a type that is not read.
    """
    require_gguf_file(path)
    file = Path(path)
    try:
        status = os.stat(file)
    except OSError as error:
        raise ModelLoadError(f"'{path}' could not be read: {error}") from error
    return _open(file, status.st_ino, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=_CACHED)
def _open(path: Path, inode: int, size: int, modified_ns: int) -> GgufFile:
    """Read the file, which the other arguments identify."""
    first = read_gguf_header(path)
    count = first.metadata.get(_COUNT, 1)
    if type(count) is not int or not 0 <= count < 100_000:
        raise ModelLoadError(f"'{path}' has {_COUNT}={shown(count)}, not a number of files; download it again")
    if count <= 1:
        return GgufFile(path, first.metadata, first.tensors)
    tensors: dict[str, GgufTensor] = {}
    for number, part in enumerate(_parts(path, count)):
        header = first if number == 0 else read_gguf_header(part)
        if (header.metadata.get(_NUMBER), header.metadata.get(_COUNT)) != (number, count):
            raise ModelLoadError(
                f"'{part}' says that it is part {shown(header.metadata.get(_NUMBER))} of "
                f"{shown(header.metadata.get(_COUNT))}, counted from 0, but its name says {number} of {count}; "
                "download all parts again"
            )
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise ModelLoadError(
                    f"'{tensors[name].path}' and '{part}' both hold the tensor {shown(name)}; download all parts again"
                )
            tensors[name] = tensor
    if len(tensors) != (expected := first.metadata.get(_TENSORS, len(tensors))):
        raise ModelLoadError(
            f"the {count} parts of '{path}' hold {len(tensors)} tensors, and the first says {shown(expected)}; "
            "download all parts again"
        )
    return GgufFile(path, first.metadata, tensors)


def _parts(path: Path, count: int) -> list[Path]:
    """Return the files of a split model; raise ModelLoadError if one is missing or the first has another name."""
    match = _PART.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise ModelLoadError(
            f"'{path}' is the first of {count} parts, so its name must end in '-00001-of-{count:05}.gguf'; give all "
            "parts their original names"
        )
    parts = [path.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if missing := [part for part in parts if not part.is_file()]:
        raise ModelLoadError(f"'{path}' needs '{missing[0]}' beside it; download all {count} parts")
    return parts
