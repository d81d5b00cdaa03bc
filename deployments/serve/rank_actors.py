"""Tensor-parallel ranks as Ray actors in the bundles of the replica's placement group, on several nodes.

The replica is rank 0, in the first bundle. An actor ends when the replica ends, because that owns it, and when the
connection to the replica does, as the processes of ranks on one host.
"""

from __future__ import annotations

import logging
import subprocess
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deployments.serve.cpu_priority import in_yielding_thread
from engine.config import EngineConfig
from engine.worker.ranks.rank_hosts import RankHosts
from engine.worker.ranks.rank_listener import Invitation
from engine.worker.ranks.rank_process import join
from engine.worker.ranks.several_hosts import SeveralHosts

__all__ = ["hosts_of_ranks"]

logger = logging.getLogger(__name__)

_END_SECONDS = 10.0  # that Ray may take to end an actor


def hosts_of_ranks(config: EngineConfig, host: str) -> RankHosts | None:
    """Return where the ranks of the engine of this replica run; None: on this host.

    Args:
        config: options of the engine.
        host: this node's address.
    """
    group = get_current_placement_group()
    if group is None or config.tensor_parallel_size == 1:
        return None
    return SeveralHosts(host, partial(_start_rank, config, group))


def _start_rank(config: EngineConfig, group: PlacementGroup, invitation: Invitation) -> _RankHandle:
    bundle = group.bundle_specs[invitation.number]
    declare: Any = ray.remote(_Rank)
    actor = declare.options(
        num_cpus=bundle.get("CPU", 0),
        num_gpus=bundle.get("GPU", 0),
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, invitation.number),
    ).remote()
    return _RankHandle(actor, actor.join.remote(config, invitation))


class _Rank:
    """The actor of one rank."""

    def join(self, config: EngineConfig, invitation: Invitation) -> None:
        """Be a rank of the engine, until this process ends."""
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        try:
            in_yielding_thread(config, partial(join, invitation, host))
        except Exception:  # which Ray would not write to the log of this process
            logger.exception("tensor-parallel rank %d cannot reach rank 0 at %s", invitation.number, invitation.host)
            raise


class _RankHandle:
    """A RankHandle on an actor."""

    def __init__(self, actor: Any, running: ray.ObjectRef[None]) -> None:
        self._actor = actor
        self._running = running

    def kill(self) -> None:
        if ray.is_initialized():  # else the actor has ended with Ray, which the call would start again
            with suppress(RayError, RuntimeError):
                ray.kill(self._actor)

    def wait(self, timeout: float | None = None) -> int | None:
        """Return None when the actor has ended, or has had time for it."""
        if not ray.is_initialized():
            return None
        with suppress(RayError, RuntimeError):
            done, _ = ray.wait([self._running], timeout=_END_SECONDS if timeout is None else timeout)
            if not done and timeout is not None:
                raise subprocess.TimeoutExpired("the actor of a rank", timeout)
        return None
