"""The shipped application with engines that compute nothing. Serve's config names ``build_app`` as its import_path."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from ray.serve import Application

from benchmarks.front.runner import ComputeFreeEngine
from deployments import app, replica

__all__ = ["ComputeFreeReplica", "build_app"]


class ComputeFreeReplica(replica.EngineReplica):
    """The shipped replica around a ComputeFreeEngine."""

    def __init__(self, *arguments: Any) -> None:
        with patch.object(replica, "Engine", ComputeFreeEngine):
            super().__init__(*arguments)


def build_app(args: dict[str, Any]) -> Application:
    """Return the application that ``args`` describe, with ComputeFreeReplica in place of EngineReplica.

    Raises:
        ConfigError: as the shipped builder does.
    """
    with patch.object(app, "EngineReplica", ComputeFreeReplica):
        return app.build_app(args)
