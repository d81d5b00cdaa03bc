"""`pagoda serve`: the launcher on a config file that is made from a model, a file and options."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from deployments.cli.console import escape_unknown_characters, open_console
from deployments.cli.serving.document import as_yaml, make_document
from deployments.cli.serving.progress import StartBars
from deployments.launch import run
from deployments.launcher.preflight import check_document
from deployments.launcher.progress import StartProgress

__all__ = ["print_config", "serve"]

FILE = "pagoda-serve.yaml"


def serve(model: str | None, config: Path | None, changes: Sequence[str]) -> int:
    """Run a server until it is stopped; return the exit code.

    Args:
        model: a checkpoint, or ``demo``.
        config: a Serve config file to start from.
        changes: of ``--set``.

    Raises:
        ConfigError: there is no such model or file, or an option is invalid.
        ModelLoadError: the checkpoint's config.json is malformed, or of a model that no engine serves.
    """
    console = open_console()
    progress = StartBars(console) if console.is_terminal else StartProgress()
    if config is not None and model is None and not changes:
        return run(config, progress)
    document = make_document(model, config, changes)
    check_document(document)  # here, so that an error does not name a file that the user never sees
    with tempfile.TemporaryDirectory(prefix="pagoda-") as directory:
        file = Path(directory) / FILE
        file.write_text(as_yaml(document), encoding="utf-8")
        return run(file, progress)


def print_config(model: str | None, config: Path | None, changes: Sequence[str]) -> int:
    """Write the YAML that ``serve`` would use to stdout; return the exit code.

    Raises:
        ConfigError: as ``serve``.
        ModelLoadError: likewise.
    """
    document = make_document(model, config, changes)
    check_document(document)
    escape_unknown_characters(sys.stdout)
    print(as_yaml(document), end="")
    return 0
