"""config.json as it is written: what its raw fields alone decide, before transformers or torch is imported.

So a launcher reports in milliseconds what an engine would report after its start.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, ModelLoadError, shown
from engine.models.config.families.architectures import ALIASES, PROVEN, require_served
from engine.models.config.families.refused import is_refused
from engine.models.config.families.table import ARCHITECTURES
from engine.models.config.files.json_file import read_json
from engine.models.config.files.other_forms import what_to_give
from engine.models.config.files.own_code import as_known_text
from engine.models.config.files.quantization import read_quantization, without_quantization
from engine.models.config.files.text_parts import MULTIMODAL, text_fields
from engine.models.config.values.limits import require_plausible
from engine.models.gguf.config import gguf_config
from engine.models.gguf.file import is_gguf, open_gguf

__all__ = ["context_length", "num_positions", "read_config_json", "rope_of"]

logger = logging.getLogger(__name__)


def read_config_json(path: str | Path) -> dict[str, Any]:
    """Return a checkpoint's config.json without what it says of quantisation; reject checkpoints that need own code.

    The metadata of a GGUF file stands for a config.json.

    Code that comes with an architecture that is computed here is never run, and not needed: the checkpoint is older
    than transformers' own classes, as Microsoft's Phi-3 and Phi-4 are.

    Raises:
        ConfigError: if the directory or its config.json does not exist, or the GGUF file.
        ModelLoadError: if the file is malformed, names remote code or a refused architecture, is of a checkpoint in a
            quantised format that cannot be read, or has values that no model has.
    """
    if is_gguf(path):
        raw = gguf_config(open_gguf(path))
        require_plausible(raw, path)
        return raw
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(f"model '{path}' is not a directory; give the path of a Hugging Face checkpoint")
    file = directory / "config.json"
    if not file.is_file():
        raise ConfigError(f"model '{path}' has no config.json; {what_to_give(directory)}")
    try:
        raw = read_json(file)
    except OSError as error:
        raise ModelLoadError(f"config.json of '{path}' could not be read: {error}") from error
    _require_not_refused(raw)
    if (text := as_known_text(raw)) is not raw:
        names = [fields["architectures"][0] for fields in (raw, text)]
        logger.info("The code of '%s' is not run: of %s the text part is served, as %s", path, *names)
        raw = text
    if "auto_map" in raw:
        _ignore_own_code(raw, path)
    match text_fields(raw).get("architectures"):
        case [str(name), *_]:
            require_served(name)
    read_quantization(directory, raw)
    raw = without_quantization(raw)  # to models, dequantised weights are like any
    require_plausible(raw, path)
    return raw


def _require_not_refused(raw: dict[str, Any]) -> None:
    """Raise ModelLoadError for an architecture that is refused with a reason, which is a better one than its code."""
    match text_fields(raw).get("architectures"):
        case [str(name), *_] if is_refused(name):
            require_served(name)


def _ignore_own_code(raw: dict[str, Any], path: str | Path) -> None:
    """Remove ``auto_map``; raise ModelLoadError unless its architecture is computed without it."""
    match raw.get("architectures"):
        case [str(name), *_] if ALIASES.get(name, name) in PROVEN | ARCHITECTURES.keys() | MULTIMODAL.keys():
            logger.info("The code of '%s' (auto_map) is not run: %s is computed without it", path, name)
            del raw["auto_map"]
        case names:
            raise ModelLoadError(
                f"model '{path}' names code of its own (auto_map), which Pagoda never runs, for {shown(names)}; "
                "docs/models.md lists what is served"
            )


def num_positions(max_position_embeddings: int, rope: object) -> int:
    """Return how many positions a model has: with YaRN or linear scaling ``factor`` times the original ones.

    Model cards tell users to add such a scaling to config.json and to leave max_position_embeddings as it is. Configs
    that are published with a scaling name the scaled number there, and it counts if it is the larger one.

    Args:
        rope: the parameters of RoPE, as a config of transformers or ``rope_of`` has them: of all layers, or a mapping
            of them by layer type. Then linear scaling counts only with original_max_position_embeddings: Gemma 3's
            configs, which have none, name the scaled number. Anything else has no effect.
    """
    if not isinstance(rope, dict):
        return max_position_embeddings
    by_type = [own for own in rope.values() if isinstance(own, dict) and not _is_linear_alone(own)]
    return max(_scaled(max_position_embeddings, own) for own in (rope, *by_type))


def _scaled(max_position_embeddings: int, rope: dict[str, Any]) -> int:
    """Return how many positions one set of RoPE parameters allows, at least ``max_position_embeddings``."""
    if _rope_type(rope) not in ("yarn", "linear"):
        return max_position_embeddings
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings") or max_position_embeddings
    if isinstance(factor, bool) or not isinstance(factor, int | float) or type(original) is not int:
        return max_position_embeddings
    return max(max_position_embeddings, int(factor * original)) if math.isfinite(factor) else max_position_embeddings


def _is_linear_alone(rope: dict[str, Any]) -> bool:
    return _rope_type(rope) == "linear" and rope.get("original_max_position_embeddings") is None


def _rope_type(rope: dict[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type"))


def rope_of(raw: dict[str, Any]) -> object:
    """Return the parameters of a config.json's RoPE as transformers takes them: ``rope_scaling`` comes first.

    Of families that have them by layer type, a single set is that of the layers that attend to everything.
    """
    rope = raw.get("rope_scaling") or raw.get("rope_parameters")
    for name in raw.get("architectures") or ():
        if isinstance(name, str) and name in ARCHITECTURES and ARCHITECTURES[name].has_rope_by_layer_type:
            is_by_type = isinstance(rope, dict) and any(isinstance(own, dict) for own in rope.values())
            return rope if is_by_type else {"full_attention": rope}
    return rope


def context_length(requested: int | None, longest: int) -> int:
    """Return the context length in tokens: ``requested`` or, if that is None, the model's ``longest``.

    Raises:
        ConfigError: more is requested than the model has positions.
    """
    if requested is not None and requested > longest:
        raise ConfigError(f"max_model_len={requested} exceeds the model's {longest} positions; lower it")
    return requested or longest
