"""Where a chat template comes from: a configured file, the checkpoint, or the templates that come with Pagoda."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, ModelLoadError
from engine.text.tekken_tokenizer import is_tekken_tokenizer, tekken_version

__all__ = ["PACKAGED_TEMPLATES", "find_chat_template", "suggested_template", "with_default"]

_FOLDER = Path(__file__).with_name("chat_templates")
_OF_MODEL_TYPES = ("deepseek_v32", "deepseek_v4")  # each is also the model_type of checkpoints that have none
_OF_TEKKEN_VERSIONS = {f"mistral_v{version}": version for version in (7, 11, 13, 15)}  # all by mistral.jinja
PACKAGED_TEMPLATES = (*_OF_MODEL_TYPES, *_OF_TEKKEN_VERSIONS)  # the names of the templates that come with Pagoda
_OLD_FILE = "chat_template.json"  # where processors of multimodal checkpoints have kept it


def find_chat_template(path: Path, configured: str | None) -> str | None:
    """Return the chat template of a checkpoint, if transformers does not find it itself.

    Args:
        path: the checkpoint's directory.
        configured: a file, or one of PACKAGED_TEMPLATES; it replaces the checkpoint's. None: the checkpoint's.

    Raises:
        ConfigError: ``configured`` is neither.
        ModelLoadError: the checkpoint's chat_template.json cannot be read.
    """
    if configured is not None:
        return _configured(configured)
    if (path / _OLD_FILE).is_file():
        return _of_old_file(path / _OLD_FILE)
    model_type = _model_type(path / "config.json")
    return _packaged(model_type) if model_type in _OF_MODEL_TYPES else None


def suggested_template(path: Path) -> str | None:
    """Return which of PACKAGED_TEMPLATES fits a checkpoint with no template, whose prompts its tokenizer tells.

    It is a suggestion, as models of the same version may have been trained with a system prompt of their own.
    """
    name = f"mistral_{tekken_version(path)}" if is_tekken_tokenizer(path) else None
    return name if name in PACKAGED_TEMPLATES else None


def with_default(templates: str | dict[str, str] | None) -> str | dict[str, str] | None:
    """Return a checkpoint's named templates with a default one, which plain conversations need: the first, if none."""
    if not isinstance(templates, dict) or not templates or "default" in templates:
        return templates
    return {"default": next(iter(templates.values())), **templates}


def _configured(name: str) -> str:
    if name in PACKAGED_TEMPLATES:
        return _packaged(name)
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        remedy = f"give the path of a jinja file, or one of {', '.join(PACKAGED_TEMPLATES)}"
        raise ConfigError(f"chat_template={name!r} cannot be read ({type(error).__name__}); {remedy}") from None


def _packaged(name: str) -> str:
    version = _OF_TEKKEN_VERSIONS.get(name)
    text = (_FOLDER / f"{'mistral' if version else name}.jinja").read_text(encoding="utf-8")
    return f"{{%- set version = {version} -%}}\n{text}" if version else text


def _of_old_file(file: Path) -> str:
    try:
        template: Any = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ModelLoadError(
            f"'{file}' holds no chat template ({type(error).__name__}); download it again, or delete it"
        ) from None
    if not isinstance(template, str):
        raise ModelLoadError(f"'{file}' holds no chat template, but {type(template).__name__}; download it again")
    return template


def _model_type(config: Path) -> str | None:
    """Return the ``model_type`` in a config.json; None without one, which the loading of the model reports."""
    try:
        content: Any = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content.get("model_type") if isinstance(content, dict) else None
