"""Replicas: the calls of an ingress to all engines and all ingresses of its application.

The methods that it calls are those of EngineReplica (deployments/replica.py) and Ingress (deployments/ingress.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.observability.recorder import Series
from deployments.routing.recently_routed import RoutedRequest
from deployments.serve.broadcast import all_ingresses, broadcast, first_result
from deployments.web.live_view import EngineSnapshot

__all__ = ["Replicas"]

ANSWER_TIMEOUT_S = 1.0  # of an engine that a health check asks


class Replicas:
    """The replicas of one application.

    Args:
        engines: the handle to the engine deployment.
    """

    def __init__(self, engines: DeploymentHandle[Any]) -> None:
        self._engines = engines

    async def engine_answers(self) -> bool:
        """Whether an engine answers a call."""
        call = self._engines.info.remote()
        try:
            await asyncio.wait_for(call, ANSWER_TIMEOUT_S)
        except Exception:  # of any kind: no request can be served
            call.cancel()  # type: ignore[no-untyped-call]
            return False
        return True

    async def num_unfinished(self) -> Mapping[str, int]:
        """Return the number of unfinished requests for tokens of each ingress."""
        return await broadcast(all_ingresses(), "num_unfinished")

    async def metrics(self) -> tuple[Mapping[str, Sequence[Series]], Mapping[str, Sequence[Series]]]:
        """Return the metrics of each engine and of each ingress."""
        engines, ingresses = await asyncio.gather(
            broadcast(self._engines, "metrics"), broadcast(all_ingresses(), "ingress_metrics")
        )
        return engines, ingresses

    async def live(self) -> Mapping[str, EngineSnapshot]:
        """Return the present state of each engine, for the web page."""
        return await broadcast(self._engines, "live")

    async def recently_routed(self) -> Mapping[str, Sequence[RoutedRequest]]:
        """Return where each ingress has sent its last requests."""
        return await broadcast(all_ingresses(), "recently_routed")

    async def ask_ingresses(self, method: str, argument: Any) -> Any:
        """Call a method of all ingresses; returns the first result that is not None."""
        return await first_result(all_ingresses(), method, argument)
