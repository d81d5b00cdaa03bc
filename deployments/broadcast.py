"""Calls to every replica of a deployment, for metrics and for the web page."""

from __future__ import annotations

import asyncio
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

__all__ = ["all_ingresses", "broadcast"]

TIMEOUT_S = 2.0  # for a replica's answer; Prometheus waits 10 s for a scrape


def all_ingresses() -> DeploymentHandle[Any]:
    """Return the handle to the deployment of the ingress that calls this."""
    context = serve.get_replica_context()
    return serve.get_deployment_handle(context.deployment, context.app_name)


async def broadcast(handle: DeploymentHandle[Any], method: str) -> dict[str, Any]:
    """Call ``method`` on every replica of ``handle``; returns the results by replica.

    Args:
        handle: leads to the deployment.
        method: takes no arguments; returns (the replica's name, its result).

    A replica that fails or does not answer in time is left out.
    """
    try:
        # Serve's own results_async raises if any replica fails.
        results = await asyncio.wait_for(handle.broadcast(method)._fetch_replica_results_async(), TIMEOUT_S)
    except Exception as error:  # there may be no replica
        del error
        return {}
    calls = [asyncio.ensure_future(result.get_async()) for result in results]  # type: ignore[no-untyped-call]
    answered, late = await asyncio.wait(calls, timeout=TIMEOUT_S)
    for call in late:
        call.cancel()
    return dict(call.result() for call in answered if call.exception() is None)
