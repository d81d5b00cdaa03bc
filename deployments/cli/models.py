"""find_model: the checkpoint that an argument of the command line means."""

from __future__ import annotations

from pathlib import Path

from engine.errors import ConfigError

__all__ = ["DEMO", "DEMO_NAME", "find_model"]

DEMO = "demo"
DEMO_NAME = "pagoda-demo"
DEMO_MODEL = "demo/model"  # relative to the shipped serve_config.yaml


def find_model(argument: str) -> str:
    """Return the absolute path of a checkpoint's directory or GGUF file.

    Args:
        argument: a path, or ``demo`` for the model that comes with Pagoda (``./demo`` is a directory of that name).

    Raises:
        ConfigError: there is no such path. Nothing is ever downloaded.
    """
    from deployments.version import checkout_root

    path = checkout_root() / DEMO_MODEL if argument == DEMO else Path(argument).expanduser()
    if path.exists():
        return str(path.resolve())
    is_hub_name = argument.count("/") == 1 and not argument.startswith((".", "/", "~"))
    remedy = "give the path of a checkpoint's directory or of a GGUF file, or `demo`"
    if is_hub_name:
        remedy = f"Pagoda downloads nothing: fetch it with `hf download {argument} --local-dir DIR` and give DIR"
    raise ConfigError("does not exist", param="MODEL", value=argument, remedy=remedy)
