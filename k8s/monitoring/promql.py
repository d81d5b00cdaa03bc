"""PromQL for the dashboard.

Every metric begins with ``${prefix}``, so that one dashboard shows both doors, and only the replicas and ingresses of
the chosen models are looked at. Where a total is wanted, a counter that is not there counts as 0: at Ray's door one
appears with its first event.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["engine", "hit_ratio", "imbalance", "ingress", "mean", "quantile", "rate", "rate_or_zero"]

ENGINE, INGRESS = 'replica=~"$replica"', 'ingress=~"$ingress"'
WINDOW = "[$__rate_interval]"


def engine(name: str, *matchers: str) -> str:
    """Return the series of the chosen replicas."""
    return f"${{prefix}}_{name}{{{', '.join((ENGINE, *matchers))}}}"


def ingress(name: str, *matchers: str) -> str:
    """Return the series of the chosen models' ingresses."""
    return f"${{prefix}}_{name}{{{', '.join((INGRESS, *matchers))}}}"


def rate(series: str, by: str = "") -> str:
    """Return the events a second, in all or for each value of a label."""
    return f"sum by ({by}) (rate({series}{WINDOW}))" if by else f"sum(rate({series}{WINDOW}))"


def rate_or_zero(series: str) -> str:
    """Return the events a second; 0 where none has ever happened."""
    return f"({rate(series)} or vector(0))"


def quantile(share: float, name: str, select: Callable[[str], str] = engine) -> str:
    """Return a quantile of a histogram over all chosen processes."""
    return f"histogram_quantile({share}, {rate(select(f'{name}_bucket'), 'le')})"


def mean(name: str, select: Callable[[str], str] = engine) -> str:
    """Return the mean of a histogram over all chosen processes."""
    return f"{rate(select(f'{name}_sum'))} / {rate(select(f'{name}_count'))}"


def hit_ratio() -> str:
    """Return the share of prompt tokens that the prefix caches served."""
    hits, queries = engine("prefix_cache_hit_tokens_total"), engine("prefix_cache_query_tokens_total")
    return f"{rate_or_zero(hits)} / {rate(queries)}"


def imbalance(per_replica: str) -> str:
    """Return how far the busiest replica is above the mean one."""
    return f"max({per_replica}) / avg({per_replica})"
