"""BASELINES: every baseline by name, with its default parameters and the grid that it is tuned on."""

from __future__ import annotations

from typing import Any

from benchmarks.routing.baselines.base import Baseline
from benchmarks.routing.baselines.costs import AIBrixLike, DynamoLike, LlmdLike, LMetric
from benchmarks.routing.baselines.load import BoundedHashing, LeastQueuedTokens, LeastRequests, RoundRobin
from benchmarks.routing.baselines.trees import ProductionStackLike, RayServeLike, SGLangLike

__all__ = ["BASELINES"]

_RINGS = [{"blocks": blocks, "bound": bound} for blocks in (1, 2, 4, 8) for bound in (1.1, 1.25, 1.5)]

# name -> (policy, default parameters, grid of parameters to tune over; empty if there is nothing to tune)
BASELINES: dict[str, tuple[type[Baseline], dict[str, Any], list[dict[str, Any]]]] = {
    "round robin": (RoundRobin, {}, []),
    "least requests": (LeastRequests, {}, []),
    "least queued tokens": (LeastQueuedTokens, {}, []),
    "CHWBL": (BoundedHashing, {"blocks": 2, "bound": 1.25}, _RINGS),
    "KubeAI CHWBL": (
        BoundedHashing,
        {"blocks": 1, "bound": 1.25},
        [{"blocks": 1, "bound": bound} for bound in (1.1, 1.5, 2.0)],
    ),
    "SGLang-like": (
        SGLangLike,
        {"threshold": 0.5, "absolute": 32, "relative": 1.1},
        [{"threshold": t, "absolute": a, "relative": 1.1} for t in (0.1, 0.3, 0.5) for a in (2, 4, 8, 16)],
    ),
    "vLLM production stack-like": (
        ProductionStackLike,
        {"least_blocks": 0, "caches": 1 << 30},
        [{"least_blocks": blocks, "caches": 1 << 30} for blocks in (2, 4, 8, 16)],
    ),
    "AIBrix-like": (
        AIBrixLike,
        {"sigmas": 1.0, "imbalance": 8},
        [{"sigmas": s, "imbalance": i} for s in (0.0, 0.5, 1.0, 2.0) for i in (4, 8, 16)],
    ),
    "llm-d-like": (
        LlmdLike,
        {"weights": (2, 1, 1)},
        [{"weights": (p, q, 1)} for p, q in ((1, 1), (1, 2), (3, 2), (2, 3), (3, 1))],
    ),
    "LMetric": (LMetric, {"batch": "all"}, [{"batch": "all"}, {"batch": "running"}]),
    "Dynamo-like": (DynamoLike, {"weight": 1.0}, [{"weight": weight} for weight in (0.5, 2.0, 4.0, 8.0, 16.0)]),
    "Ray Serve LLM-like": (
        RayServeLike,
        {"imbalance": float("inf"), "threshold": 0.1},
        [{"imbalance": i, "threshold": t} for i in (2, 4, 8, 16) for t in (0.1, 0.3, 0.5)],
    ),
}
