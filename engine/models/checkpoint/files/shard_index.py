"""The index of a sharded checkpoint, model.safetensors.index.json: which file holds each tensor."""

from __future__ import annotations

import json
import os
from pathlib import Path

from engine.errors import ModelLoadError, listed, shown
from engine.models.checkpoint.files.safetensors_header import StoredTensor

__all__ = ["join_shards", "listed_files", "read_index"]


def listed_files(index: Path) -> frozenset[str]:
    """Return the names of the files that an index lists; none if it cannot be read, and may not be needed."""
    try:
        return frozenset(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, LookupError, TypeError, AttributeError, OSError, RecursionError):
        return frozenset()


def read_index(index: Path) -> dict[str, str]:
    """Return which file of the index's directory holds each tensor; all of these files exist."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise ModelLoadError(f"'{index}' is malformed: {type(error).__name__}: {error}; download it again") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"'{index}' is malformed: its weight_map is {shown(weight_map)}; download it again")
    tensors: dict[str, list[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name or name in (".", "..") or Path(name).name != name:
            raise ModelLoadError(
                f"'{index}' names files outside its own directory: {shown(name)} for the tensor {shown(tensor)}; "
                "download it again"
            )
        tensors.setdefault(name, []).append(tensor)
    if missing := sorted(name for name in tensors if not os.path.isfile(index.parent / name)):
        raise ModelLoadError(
            f"checkpoint '{index.parent}' lacks the shards {listed(missing)}; '{missing[0]}' holds "
            f"{listed(tensors[missing[0]])}; download them"
        )
    return weight_map


def join_shards(
    index: Path, weight_map: dict[str, str], by_file: dict[str, dict[str, StoredTensor]]
) -> dict[str, StoredTensor]:
    """Return all tensors of the shards. Each must be where the index says; an unlisted one must be there only once."""
    stored: dict[str, StoredTensor] = {}
    for name, file in weight_map.items():
        if name not in by_file[file]:
            holders = [other for other in by_file if name in by_file[other]]
            where = f"{listed(holders)} does" if holders else "no other file of the index does"
            raise ModelLoadError(
                f"'{index}' says that '{file}' holds the tensor {shown(name)}, but {where}; download all files again"
            )
        stored[name] = by_file[file][name]
    for file, tensors in by_file.items():
        for name in tensors.keys() - weight_map.keys():
            if name in stored:
                raise ModelLoadError(
                    f"'{stored[name].path}' and '{file}' both hold the tensor {shown(name)}, which '{index}' does not "
                    "name; download the checkpoint again"
                )
            stored[name] = tensors[name]
    return stored
