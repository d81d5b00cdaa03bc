"""config.json as it is written: what its raw fields alone decide, before transformers or torch is imported.

So a launcher finds in milliseconds what an engine would find after its start.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, ModelLoadError
from engine.models.config_limits import require_plausible

__all__ = ["context_length", "read_config_json", "read_json"]


def read_config_json(path: str | Path) -> dict[str, Any]:
    """Return the fields of a checkpoint's config.json; reject checkpoints that need code of their own.

    Raises:
        ConfigError: if the directory or its config.json does not exist.
        ModelLoadError: if the file is malformed, names remote code, is of a quantized checkpoint, or has values that
            no model has.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(f"model '{path}' is not a directory; give the path of a Hugging Face checkpoint")
    file = directory / "config.json"
    if not file.is_file():
        raise ConfigError(f"model '{path}' has no config.json; give the path of a Hugging Face checkpoint")
    try:
        raw = read_json(file)
    except OSError as error:
        raise ModelLoadError(f"config.json of '{path}' could not be read: {error}") from error
    if "auto_map" in raw:
        raise ModelLoadError(f"model '{path}' names code of its own (auto_map), which Pagoda never runs")
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
        raise ModelLoadError(f"model '{path}' is quantised ({method}); give the checkpoint in bf16, fp16 or fp32")
    require_plausible(raw, path)
    return raw


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object that a file holds.

    Raises:
        OSError: if it cannot be read.
        ModelLoadError: if it holds something else.
    """
    try:
        raw = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"'{file}' is not valid JSON: {error}; download it again") from error
    if not isinstance(raw, dict):
        raise ModelLoadError(f"'{file}' holds a {type(raw).__name__}; a JSON object is expected; download it again")
    return raw


def context_length(requested: int | None, longest: int) -> int:
    """Return the context length in tokens: ``requested`` or, if that is None, the model's ``longest``.

    Raises:
        ConfigError: more is requested than the model has positions.
    """
    if requested is not None and requested > longest:
        raise ConfigError(f"max_model_len={requested} exceeds the model's {longest} positions; lower it")
    return requested or longest
