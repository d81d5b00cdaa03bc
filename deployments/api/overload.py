"""The bound on what waits in all engines together, kept at the door: before anything is tokenised.

Each engine bounds its own queue, and sheds by priority there; this keeps a flood from reaching them at all.
"""

from __future__ import annotations

from deployments.config import LimitOptions
from deployments.errors import ApiError
from deployments.observability.ingress_metrics import INGRESS_REJECTIONS, ingress_recorder
from deployments.routing.cluster_view import ClusterView

__all__ = ["require_room"]

RETRY_AFTER_S = 1
DEFAULT_PRIORITY = 0


def require_room(view: ClusterView, limits: LimitOptions, priority: int) -> None:
    """Refuse a request while too much waits already.

    One of a higher priority than usual passes: the engine that gets it refuses another one in its place.

    Raises:
        ApiError: 503 with Retry-After, and both numbers.
    """
    if priority > DEFAULT_PRIORITY:
        return
    num_requests, num_tokens = view.queued()
    for count, limit, what in (
        (num_requests, limits.max_queued_requests, "requests"),
        (num_tokens, limits.max_queued_prefill_tokens, "prompt tokens"),
    ):
        if count >= limit:
            ingress_recorder().increment(INGRESS_REJECTIONS, reason="overloaded")
            message = f"{count} {what} wait already, this server's limit is {limit}; try again shortly"
            raise ApiError(503, message, code="overloaded", retry_after_s=RETRY_AFTER_S)
