"""Default logging of the packages engine and kernels, for programs that have not configured logging.

Without configuration, Python shows only warnings and errors. The start of an engine would be silent, although its log
lines report what it loads and how many tokens its KV cache holds. The environment variable PAGODA_LOGGING_LEVEL sets
how much is shown: DEBUG, INFO (the default), WARNING, ERROR, CRITICAL, or OFF to change nothing.
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
    """Show log lines on stderr, or ``stream``, unless the program has logging handlers of its own.

    Raises:
        ConfigError: if PAGODA_LOGGING_LEVEL is unknown.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter(_FORMAT, _TIME))
    _attach(handler)


def forward_logs(target: logging.Logger) -> None:
    """Pass log lines on to the logger ``target``, which applies its own level.

    Raises:
        ConfigError: if PAGODA_LOGGING_LEVEL is unknown.
    """
    _attach(_Forwarder(target))


class _Forwarder(logging.Handler):
    """Passes log records to another logger, whose handlers may be added later."""

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
            logger.propagate = False  # otherwise each line appears twice in a program that configures logging later
