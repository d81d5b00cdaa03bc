"""PromQL expressions of the dashboard.

Every metric name begins with ``${prefix}``, so that one dashboard serves both endpoints: Ray's agents and GET /metrics.
Only replicas and ingresses of the selected models are shown. A missing counter counts as 0 in totals, because Ray's
agents export a counter only after its first event.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["engine", "hit_ratio", "imbalance", "ingress", "mean", "quantile", "rate", "rate_or_zero"]

ENGINE, INGRESS = 'replica=~"$replica"', 'ingress=~"$ingress"'
WINDOW = "[$__rate_interval]"


def engine(name: str, *matchers: str) -> str:
    """Return the series of the selected replicas."""
    return f"${{prefix}}_{name}{{{', '.join((ENGINE, *matchers))}}}"


def ingress(name: str, *matchers: str) -> str:
    """Return the series of the selected models' ingresses."""
    return f"${{prefix}}_{name}{{{', '.join((INGRESS, *matchers))}}}"


def rate(series: str, by: str = "") -> str:
    """Return the events per second, in total or for each value of a label."""
    return f"sum by ({by}) (rate({series}{WINDOW}))" if by else f"sum(rate({series}{WINDOW}))"


def rate_or_zero(series: str) -> str:
    """Return the events per second; 0 if the counter does not exist."""
    return f"({rate(series)} or vector(0))"


def quantile(share: float, name: str, select: Callable[[str], str] = engine) -> str:
    """Return a quantile of a histogram over all selected processes."""
    return f"histogram_quantile({share}, {rate(select(f'{name}_bucket'), 'le')})"


def mean(name: str, select: Callable[[str], str] = engine) -> str:
    """Return the mean of a histogram over all selected processes."""
    return f"{rate(select(f'{name}_sum'))} / {rate(select(f'{name}_count'))}"


def hit_ratio() -> str:
    """Return the share of prompt tokens served from the prefix caches."""
    hits, queries = engine("prefix_cache_hit_tokens_total"), engine("prefix_cache_query_tokens_total")
    return f"{rate_or_zero(hits)} / {rate(queries)}"


def imbalance(per_replica: str) -> str:
    """Return the busiest replica's value over the mean of all replicas."""
    return f"max({per_replica}) / avg({per_replica})"
