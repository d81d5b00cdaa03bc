"""Where the log lines of this package and of the kernels go when the program around them has not said so.

Python drops what is below a warning unless somebody asks for it, but whoever starts an engine wants to see what it
loads and how much it can hold. The environment variable PAGODA_LOGGING_LEVEL says how much is shown: DEBUG, INFO (as it
is without the variable), WARNING, ERROR, CRITICAL, or OFF to leave logging alone altogether.
"""

from __future__ import annotations

import logging
import os
from typing import TextIO

from engine.errors import ConfigError

__all__ = ["LEVEL_VARIABLE", "forward_logs", "show_logs"]

LEVEL_VARIABLE = "PAGODA_LOGGING_LEVEL"

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_PACKAGES = ("engine", "kernels")
_FORMAT = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
_TIME = "%m-%d %H:%M:%S"


def show_logs(stream: TextIO | None = None) -> None:
    """Show our log lines on stderr, or ``stream``; a program that has handlers of its own keeps them and only them.

    Raises:
        ConfigError: if PAGODA_LOGGING_LEVEL is no level.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter(_FORMAT, _TIME))
    _attach(handler)


def forward_logs(target: logging.Logger) -> None:
    """Have ``target`` show our log lines among its own, as far as its level lets them through.

    Raises:
        ConfigError: if PAGODA_LOGGING_LEVEL is no level.
    """
    _attach(_Forwarder(target))


class _Forwarder(logging.Handler):
    """Hands records to another logger, whatever handlers that has by then."""

    def __init__(self, target: logging.Logger) -> None:
        super().__init__()
        self._target = target

    def emit(self, record: logging.LogRecord) -> None:
        if self._target.isEnabledFor(record.levelno):
            self._target.handle(record)


def _attach(handler: logging.Handler) -> None:
    level = os.environ.get(LEVEL_VARIABLE, "INFO").upper()
    if level == "OFF":
        return
    if level not in _LEVELS:
        raise ConfigError(f"{LEVEL_VARIABLE}='{level}' is unknown; choose one of {', '.join(_LEVELS)}, OFF")
    for logger in map(logging.getLogger, _PACKAGES):
        if not logger.hasHandlers() and logger.level == logging.NOTSET:
            logger.addHandler(handler)
            logger.setLevel(level)
            logger.propagate = False  # or a program that configures logging later would show everything twice
