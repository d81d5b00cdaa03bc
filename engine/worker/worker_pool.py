"""WorkerPool: the workers of one engine: rank 0 in this process, the other ranks in processes of their own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from engine.config import EngineConfig
from engine.worker.model_worker import ModelWorker
from engine.worker.ranks.one_host import OneHost
from engine.worker.ranks.rank_hosts import RankHosts
from engine.worker.ranks.remote_ranks import RemoteRanks
from engine.worker.step_plan import StepPlan
from kernels.device_copy import wait_for_device

__all__ = ["WorkerPool"]


class WorkerPool:
    """Every rank's loaded ModelWorker. The other ranks end with this object, at the latest with the interpreter.

    Args:
        config: options of the engine.
        hosts: where the other ranks run; None: all on this host. It is closed with this object.

    Raises:
        ConfigError, ModelLoadError: as ModelWorker does, on any rank.
        EngineDeadError: if a rank dies while it loads.
    """

    def __init__(self, config: EngineConfig, hosts: RankHosts | None = None) -> None:
        own_address = "" if hosts is None else hosts.own_address
        self.local = ModelWorker(config, host=own_address)  # raises most config errors, before any process has started
        self._ranks: RemoteRanks | None = None
        if config.tensor_parallel_size == 1:
            self.call("load", "")
            return
        hosts = hosts or OneHost()
        self._ranks = RemoteRanks(config, hosts, abort=self.local.abort)
        self._close_ranks = weakref.finalize(self, self._ranks.close)
        self.call("load", hosts.rendezvous)

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker at the same time; return the results in the order of the ranks."""
        run = getattr(self.local, method)
        if self._ranks is None:
            return [run(*args)]
        with self._ranks.together():
            self._ranks.send((method, args, True))
            return [run(*args), *self._ranks.receive()]

    def execute(
        self,
        plan: StepPlan,
        on_prompt_logits: Callable[[torch.Tensor], None] | None = None,
        sampled: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Compute one step on every rank; return rank 0's logits as ``ModelWorker.execute`` does.

        Only a single rank can be given ``sampled``.

        Raises:
            EngineDeadError: if a rank has died.
        """
        if self._ranks is None:
            return self.local.execute(plan, on_prompt_logits, sampled)
        if not len(plan.token_ids):  # no collective shows that all ranks have made the copies
            self.call("copy_pages", plan)
            return None
        with self._ranks.together():
            self._ranks.send(("execute", (plan,), False))  # no reply: the collectives show that all ranks compute it
            return self.local.execute(plan, on_prompt_logits)

    def wait(self, event: torch.cuda.Event | None = None) -> None:
        """Wait until rank 0's device has done all that this thread has queued. Only then can its results be read.

        Args:
            event: wait only for what was queued before it.

        Raises:
            EngineDeadError: if a rank has died. With GPUs ``execute`` returns before they compute, and collectives that
                are aborted by a death leave garbage.
        """
        if self._ranks is None:
            wait_for_device(self.local.shard.device, event)
            return
        with self._ranks.together():
            wait_for_device(self.local.shard.device, event)
            self._ranks.check_health()

    def check_health(self) -> None:
        """Raise EngineDeadError if another rank has died."""
        if self._ranks is not None:
            self._ranks.check_health()

    def close(self) -> None:
        """End the processes of the other ranks."""
        if self._ranks is not None:
            self._close_ranks()
