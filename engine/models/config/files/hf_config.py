"""load_hf_config: a checkpoint's config.json as transformers reads it.

transformers' AutoConfig reads all but the plainest files (see without_transformers.py), as it knows their many
spellings.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from engine.errors import ModelLoadError, shown
from engine.models.config.families.architectures import MODEL_TYPES
from engine.models.config.files.config_json import read_config_json
from engine.models.config.files.json_file import read_json
from engine.models.config.files.own_code import as_known_text
from engine.models.config.files.text_parts import text_config, text_fields
from engine.models.config.files.without_transformers import plain_config
from engine.models.gguf.file import is_gguf

__all__ = ["load_hf_config", "read_with_transformers", "unreadable_config"]

logger = logging.getLogger(__name__)


def load_hf_config(path: str | Path) -> Any:
    """Read config.json as transformers does; reject checkpoints that need code of their own.

    Of a multimodal checkpoint it is the config of the text part.

    Raises:
        ConfigError: if the directory or its config.json does not exist.
        ModelLoadError: if it is malformed, or names remote code, an unknown architecture or format of weights.
    """
    raw = read_config_json(path)
    if (text := text_fields(raw)) is not raw:
        names = [fields["architectures"][0] for fields in (raw, text)]
        logger.info("Of %s the text part is served, as %s; requests with images or sound are rejected", *names)
    return plain_config(raw) or read_with_transformers(path)


def read_with_transformers(path: str | Path) -> Any:
    """Return transformers' config of a checkpoint that ``read_config_json`` has accepted, or of its text part.

    Raises:
        ModelLoadError: if transformers refuses it.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, __version__  # slow to import

    directory = Path(path)
    stored = read_config_json(directory) if is_gguf(directory) else read_json(directory / "config.json")
    raw = as_known_text(stored)
    model_type = raw.get("model_type")
    known = MODEL_TYPES.get(model_type, model_type) if isinstance(model_type, str) else None
    if known is None or known not in CONFIG_MAPPING:
        raise ModelLoadError(
            f"config.json of '{path}' has the model_type {shown(model_type)}, which transformers {__version__} does "
            "not know; docs/models.md lists what is served"
        )
    try:
        if is_gguf(directory) or raw is not stored or known != model_type:
            return CONFIG_MAPPING[known].from_dict(raw)
        return text_config(AutoConfig.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True))
    except ModelLoadError:
        raise
    except Exception as error:  # its classes check some values, and compute with others
        raise unreadable_config(directory, error) from error


def unreadable_config(path: str | Path, error: Exception) -> ModelLoadError:
    """Return the error about a config.json that transformers refused with ``error``."""
    lines = str(error).split("\n")
    problem = " ".join(line.strip() for line in lines[:2]) if lines[0].endswith(":") else lines[0]
    return ModelLoadError(
        f"config.json of '{path}' could not be read: {type(error).__name__}: {problem}; correct it, or "
        "download it again"
    )
