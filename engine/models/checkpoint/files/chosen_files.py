"""chosen_file: which safetensors files of a directory are loaded: the same ones as by transformers.

Directories into which several models were saved hold files of all of them. Where that leaves a doubt it is logged, with
the dates of the files.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from engine.errors import ModelLoadError
from engine.models.checkpoint.files.shard_index import listed_files
from engine.models.config.files.json_file import read_json
from engine.models.config.files.other_forms import what_to_give

__all__ = ["INDEX", "SINGLE", "chosen_file"]

logger = logging.getLogger(__name__)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARDS = "model-*-of-*.safetensors"


def chosen_file(directory: Path) -> Path:
    """Return the file that is loaded alone, or the index whose files are.

    config.json may name it. Else an index counts beside model.safetensors only if it lists that file and others.

    Raises:
        ModelLoadError: if there is neither, or none of the name in config.json.
    """
    if (named := _named_file(directory)) is not None:
        return named
    index, single = directory / INDEX, directory / SINGLE
    if not index.is_file():
        if not single.is_file():
            raise ModelLoadError(f"'{directory}' has no {SINGLE} and no {INDEX}; {what_to_give(directory)}")
        return single
    names = listed_files(index)
    if single.is_file() and (SINGLE not in names or names == {SINGLE}):
        if SINGLE not in names:
            logger.warning(
                "'%s' (of %s) is loaded, as by transformers, and not the shards of '%s' (of %s); remove the older",
                *_with_dates((single, index)),
            )
        return single
    if names and (unlisted := sorted(file for file in directory.glob(_SHARDS) if file.name not in names)):
        logger.warning(
            "'%s' (of %s) lists no '%s' (of %s), which is not loaded; remove the older, or save the model again",
            *_with_dates((index, unlisted[-1])),
        )
    return index


def _named_file(directory: Path) -> Path | None:
    """Return the file that ``transformers_weights`` in config.json names; None if nothing does."""
    config = directory / "config.json"
    name = read_json(config).get("transformers_weights") if config.is_file() else None
    if name is None:
        return None
    file = directory / str(name)
    is_inside = directory.absolute() in Path(os.path.abspath(file)).parents  # a link may lead outside
    if not (is_inside and file.is_file() and file.name.endswith((".safetensors", ".safetensors.index.json"))):
        raise ModelLoadError(
            f"transformers_weights={name!r} in '{config}' is not a safetensors file, or an index of some, in that "
            "directory; correct the name, or remove it to load model.safetensors"
        )
    return file


def _with_dates(files: Iterable[Path]) -> Iterable[str]:
    """Yield the path of each file and the time of its last change."""
    for file in files:
        yield str(file)
        yield datetime.fromtimestamp(file.stat().st_mtime).astimezone().isoformat(sep=" ", timespec="seconds")
