"""The limits on what waits at all engines together, checked before a request is tokenised.

Each engine also limits its own queue, where a request of higher priority replaces one of lower priority. The limits
here reject a flood of requests at the ingress.
"""

from __future__ import annotations

from deployments.config import LimitOptions
from deployments.errors import ApiError
from deployments.observability.ingress_metrics import INGRESS_REJECTIONS, ingress_recorder
from deployments.requests.dispatcher import Dispatcher

__all__ = ["check_queue_limits"]

RETRY_AFTER_S = 1
DEFAULT_PRIORITY = 0


def check_queue_limits(dispatcher: Dispatcher, limits: LimitOptions, priority: int) -> None:
    """Reject a request while too many requests or prompt tokens wait.

    A request of higher priority than the default is accepted: the engine rejects another one to make room.

    Raises:
        ApiError: 503 with Retry-After; the message has both numbers.
    """
    if priority > DEFAULT_PRIORITY:
        return
    num_requests, num_tokens = dispatcher.queued()
    for count, limit, what in (
        (num_requests, limits.max_queued_requests, "requests"),
        (num_tokens, limits.max_queued_prefill_tokens, "prompt tokens"),
    ):
        if count >= limit:
            ingress_recorder().increment(INGRESS_REJECTIONS, reason="overloaded")
            message = f"{count} {what} wait already, this server's limit is {limit}; try again shortly"
            raise ApiError(503, message, code="overloaded", retry_after_s=RETRY_AFTER_S)
