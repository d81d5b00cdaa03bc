"""The content of a Serve config file for `pagoda serve`: a file or a model, with the changes of `--set`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from deployments.cli.models import DEMO, find_model
from deployments.launcher.preflight import IMPORT_PATH, read_document
from deployments.version import SHIPPED_CONFIG, checkout_root
from engine.errors import ConfigError

__all__ = ["as_yaml", "make_document"]

# The keys that belong to Ray Serve; `--set` takes every other key as one of Pagoda's, below `args`.
OF_SERVE = ("proxy_location", "http_options", "grpc_options", "logging_config", "applications")


def make_document(model: str | None, config: Path | None, changes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the content of the config file to start.

    Args:
        model: a checkpoint, or ``demo``; None: that of the file, or the demo.
        config: a Serve config file to start from. None: for the demo the shipped file, for another model the defaults.
        changes: ``key=value``, the key as a path with dots, the value as YAML.

    Raises:
        ConfigError: there is no such model or file, or a change is malformed.
    """
    if config is not None:
        document = read_document(config)
    elif model in (None, DEMO):
        document = read_document(checkout_root() / SHIPPED_CONFIG)
    else:
        document = _defaults()
    if model is not None:
        _args(document)["model"] = find_model(model)
    for change in changes:
        _apply(document, change)
    return document


def as_yaml(document: dict[str, Any]) -> str:
    """Return a document as text, its keys in their order."""
    text: str = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120)
    return text


def _defaults() -> dict[str, Any]:
    application = {"name": "pagoda", "route_prefix": "/", "import_path": IMPORT_PATH, "args": {}}
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "127.0.0.1", "port": 8000},
        "applications": [application],
    }


def _args(document: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of Pagoda's application, which is made to have some."""
    applications = document.get("applications")
    for application in applications if isinstance(applications, list) else ():
        if isinstance(application, dict) and application.get("import_path") == IMPORT_PATH:
            if not isinstance(application.get("args"), dict):
                application["args"] = {}
            args: dict[str, Any] = application["args"]
            return args
    raise ConfigError(f"no application has import_path: {IMPORT_PATH}; {SHIPPED_CONFIG} shows one")


def _apply(document: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    path = key.strip().removeprefix("args.").split(".")
    if not equals or not all(path):
        remedy = "give, say, engine.max_model_len=4096 or http_options.port=9000"
        raise ConfigError("is not key=value", param="--set", value=change, remedy=remedy)
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        remedy = "quote the value as YAML wants it"
        raise ConfigError("has a value that is not YAML", param="--set", value=change, remedy=remedy) from None
    section: Any = document if path[0] in OF_SERVE else _args(document)
    for part in path[:-1]:
        inner = section.setdefault(part, {}) if isinstance(section, dict) else None
        if not isinstance(inner, dict):
            problem = f"sets a key below '{part}', which is not a mapping"
            raise ConfigError(problem, param="--set", value=change, remedy=f"set {part} as a whole, or edit the file")
        section = inner
    section[path[-1]] = value
