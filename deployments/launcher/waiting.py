"""WaitingReplicas: reports replicas for which the cluster has no room.

Serve waits for room without a word, because nodes may still join. On one machine that is an unfinished start.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["Usage", "WaitingReplicas", "replica_ids", "unplaced_replicas"]

PATIENCE_S = 3.0
PATIENCE_WITH_ROOM_S = 60.0  # a replica that fits is placed when its process has started
ROUNDING = 1e-6
CPU_OPTIONS = {"engine": "replicas.cpus_per_engine", "ingress": "replicas.cpus_per_ingress"}


class Usage(NamedTuple):
    """How much of a resource the cluster's replicas have reserved, and how much there is."""

    used: float
    total: float

    @property
    def free(self) -> float:
        """What is left."""
        return max(0.0, self.total - self.used)


class WaitingReplicas:
    """Watches Serve's details for replicas that Ray has not placed, and reports each change of them once."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._reported: list[str] = []
        self.are_placed = False  # all replicas were on a node when last seen

    def update(self, details: Mapping[str, Any]) -> bool:
        """Note what Serve reports now; return whether it is time for a ``report``."""
        waiting = unplaced_replicas(details)
        self.are_placed = bool(replica_ids(details)) and not waiting
        if not waiting:
            self._since, self._reported = None, []
            return False
        if self._since is None:
            self._since = time.monotonic()
        return time.monotonic() - self._since >= PATIENCE_S

    def report(self, details: Mapping[str, Any], usage: Mapping[str, Usage], config: str) -> list[str]:
        """Return a line for each deployment with waiting replicas; nothing if it would repeat the last report.

        Args:
            details: Serve's.
            usage: of the cluster, by the name of the resource.
            config: name of the file in which the user can lower the demand.
        """
        is_late = self._since is not None and time.monotonic() - self._since >= PATIENCE_WITH_ROOM_S
        waiting = [pair for pair in _deployments(details) if _unplaced(pair[1])]
        lines = [
            _line(name, deployment, usage, config)
            for name, deployment in waiting
            if is_late or _scarce(deployment, usage)
        ]
        if not lines or lines == self._reported:
            return []
        self._reported = lines
        return lines


def replica_ids(details: Mapping[str, Any]) -> set[str]:
    """Return the ids of all replicas that Serve knows."""
    return {str(replica["replica_id"]) for _, deployment in _deployments(details) for replica in _replicas(deployment)}


def unplaced_replicas(details: Mapping[str, Any]) -> set[str]:
    """Return the ids of the replicas that Ray has not placed on a node."""
    return {str(replica["replica_id"]) for _, deployment in _deployments(details) for replica in _unplaced(deployment)}


def _deployments(details: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    applications = details.get("applications") or {}
    return [pair for application in applications.values() for pair in application.get("deployments", {}).items()]


def _replicas(deployment: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(deployment.get("replicas") or ())


def _unplaced(deployment: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [
        replica
        for replica in _replicas(deployment)
        if replica.get("state") == "STARTING" and not replica.get("node_id")
    ]


def _line(name: str, deployment: Mapping[str, Any], usage: Mapping[str, Usage], config: str) -> str:
    target = max(int(deployment.get("target_num_replicas") or 0), len(_replicas(deployment)))
    head = f"{len(_unplaced(deployment))} of {target} {name} replicas wait for"
    scarce = _scarce(deployment, usage)
    if scarce is None:
        return f"{head} a node that has room for them; `make status` shows what they need"
    has = usage.get(scarce, Usage(0, 0))
    where = f"each needs {_needs(deployment)[scarce]:g}, the cluster has {has.total:g} and {has.free:g} are free"
    return f"{head} {scarce}: {where}; lower {_options(name, scarce)} in {config}, or use a larger cluster"


def _scarce(deployment: Mapping[str, Any], usage: Mapping[str, Usage]) -> str | None:
    """Return the resource that a replica lacks most, or None if the cluster has enough of each."""
    lacks = {name: need - usage.get(name, Usage(0, 0)).free for name, need in _needs(deployment).items()}
    most = max(lacks, key=lambda name: lacks[name], default=None)
    return most if most is not None and lacks[most] > ROUNDING else None


def _needs(deployment: Mapping[str, Any]) -> dict[str, float]:
    resources = deployment.get("required_resources") or {}
    return {name: float(resources[name]) for name in ("CPU", "GPU") if resources.get(name)}


def _options(name: str, resource: str) -> str:
    """Return the keys that decide how much of a resource the replicas need."""
    own = [CPU_OPTIONS[name]] if resource == "CPU" and name in CPU_OPTIONS else []
    return " or ".join(["replicas.num_engine_replicas", *own])
