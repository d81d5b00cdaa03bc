"""Calls to every replica of a deployment, for metrics, for the web page, and to find what one of them keeps."""

from __future__ import annotations

import asyncio
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

__all__ = ["all_ingresses", "broadcast", "first_result"]

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
    calls = await _calls(handle, method)
    if not calls:
        return {}
    answered, late = await asyncio.wait(calls, timeout=TIMEOUT_S)
    for call in late:
        call.cancel()
    return dict(call.result() for call in answered if call.exception() is None)


async def first_result(handle: DeploymentHandle[Any], method: str, *args: Any) -> Any:
    """Call ``method`` on every replica of ``handle``; returns the first result that is not None, else None.

    Args:
        handle: leads to the deployment.
        method: returns (the replica's name, its result).
        args: of the method.

    A replica that fails or does not answer in time is left out, and none is waited for after the result.
    """
    pending: set[asyncio.Future[Any]] = set(await _calls(handle, method, *args))
    deadline = asyncio.get_running_loop().time() + TIMEOUT_S
    try:
        while pending:
            timeout = deadline - asyncio.get_running_loop().time()
            answered, pending = await asyncio.wait(pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            results = [call.result()[1] for call in answered if call.exception() is None]
            answer = next((result for result in results if result is not None), None)
            if answer is not None or not answered:
                return answer
        return None
    finally:
        for call in pending:
            call.cancel()


async def _calls(handle: DeploymentHandle[Any], method: str, *args: Any) -> list[asyncio.Future[Any]]:
    """Call ``method`` on every replica; none if there is no replica."""
    try:
        # Serve's own results_async raises if any replica fails.
        results = await asyncio.wait_for(handle.broadcast(method, *args)._fetch_replica_results_async(), TIMEOUT_S)
    except Exception as error:  # there may be no replica
        del error
        return []
    return [asyncio.ensure_future(result.get_async()) for result in results]  # type: ignore[no-untyped-call]
