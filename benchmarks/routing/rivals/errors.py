"""RivalError: what can go wrong with a rival, as one tree of errors."""

from __future__ import annotations

__all__ = ["InvalidReplyError", "RivalDiedError", "RivalError", "RivalHungError", "RivalMissingError"]


class RivalError(RuntimeError):
    """A rival's router did not decide as it should; the run has no figures."""


class RivalMissingError(RivalError):
    """A rival is not installed, or not in the pinned version."""


class RivalDiedError(RivalError):
    """The rival's process ended before the run did, or its router failed a request."""


class RivalHungError(RivalError):
    """The rival's process did not answer in time."""


class InvalidReplyError(RivalError):
    """The rival's process answered something that the simulation cannot use, such as an unknown replica."""
