"""The options of serve_config.yaml, for the tests of documents that name them."""

from __future__ import annotations

import dataclasses

from pydantic import BaseModel

from deployments.config import AppConfig
from engine.config import EngineConfig

__all__ = ["option_names"]


def option_names(section: str) -> set[str]:
    """Return the keys of a section of ``args``."""
    if section == "engine":
        return {field.name for field in dataclasses.fields(EngineConfig)}
    options = AppConfig.model_fields[section].annotation
    assert isinstance(options, type)
    assert issubclass(options, BaseModel)
    return set(options.model_fields)
