"""Small fakes: an engine deployment that answers from a script, and a detokenizer."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from deployments.requests.replication import Replication
from deployments.routing.cluster_view import ClusterView, cluster_view
from deployments.transport.request_channel.dispatch import Dispatch
from engine.config import EngineInfo
from engine.errors import EngineDeadError
from engine.observability.load import EngineLoad
from engine.outputs import EngineOutput, FinishReason, Logprob, RequestTiming, TokenLogprobs
from engine.request import EngineRequest

Script = list[EngineOutput | BaseException | None]  # None: nothing has come

NO_REPLICATION = Replication(ClusterView(), None, lambda replica, order: None)
INFO = EngineInfo(
    model="/some/where/model",
    block_size=4,
    num_blocks=64,
    num_host_blocks=0,
    max_model_len=128,
    vocab_size=384,
    dtype="float32",
    device="cpu",
    attention_backend="cpu",
    eos_token_ids=(2,),
    default_sampling={"temperature": 0.5},
)


def output(
    token_ids: list[int],
    finish_reason: str | None = None,
    *,
    replica: str = "r1",
    cached: int = 0,
    logprobs: list[float] | None = None,
    prompt_logprobs: bool | list[TokenLogprobs | None] = False,
    timing: RequestTiming | None = None,
    index: int = 0,
) -> EngineOutput:
    """Return an output as a replica sends it."""
    ranked = [{t: Logprob(value, 1)} for t, value in zip(token_ids, logprobs, strict=True)] if logprobs else None
    of_prompt = [None] if prompt_logprobs is True else prompt_logprobs or None
    return EngineOutput(
        "id",
        index,
        token_ids,
        None if finish_reason is None else FinishReason(finish_reason),
        None,
        cached,
        logprobs=ranked,
        prompt_logprobs=of_prompt,
        timing=timing,
        replica=replica,
    )


@dataclass(slots=True, eq=False)
class FakeDispatch(Dispatch):
    """A request whose outputs come from a script, one at a time."""

    script: Script = field(default_factory=list)

    def take(self) -> EngineOutput | None:
        if not self.script:
            raise EngineDeadError("the script has ended")
        item = self.script.pop(0)
        if isinstance(item, BaseException):
            raise item
        if item is not None:
            self.replica = item.replica
        return item

    async def wait(self) -> None:
        """The next item of the script is there."""


@dataclass
class FakeEngines:
    """A handle, and the dispatcher. Each request is answered with the next script; the last script is repeated."""

    scripts: list[Script]
    calls: list[tuple[EngineRequest, dict[str, Any]]] = field(default_factory=list)
    dispatches: list[FakeDispatch] = field(default_factory=list)
    deployment_name: str = "engine-of-fakes"
    is_down: bool = False
    request_timeout_s: float = 60.0
    engine_info: EngineInfo | None = None  # None: INFO
    replication: Replication = NO_REPLICATION

    def options(self, **options: Any) -> FakeEngines:
        return self

    @property
    def info(self) -> Any:
        return SimpleNamespace(remote=lambda: _Ready(self.engine_info or INFO, self.is_down))

    def start(self) -> None:
        """There is nothing to connect to."""

    def close(self) -> None:
        """There is nothing to close."""

    def send(
        self,
        request: EngineRequest,
        block_hashes: Sequence[int],
        *,
        avoid: Collection[str],
        deadline: float,
        handed_over_by: str = "",
    ) -> FakeDispatch:
        call: dict[str, Any] = {"block_hashes": list(block_hashes), "avoid": avoid}
        self.calls.append((request, call | ({"handed_over_by": handed_over_by} if handed_over_by else {})))
        script = list(self.answer(request))
        self.dispatches.append(FakeDispatch(request, block_hashes, avoid, deadline, handed_over_by, script=script))
        return self.dispatches[-1]

    def answer(self, request: EngineRequest) -> Script:
        """Return the script of the request that was sent last."""
        return self.scripts[min(len(self.calls), len(self.scripts)) - 1]

    def end(self, dispatch: Dispatch) -> None:
        dispatch.ended = time.monotonic()

    def queued(self) -> tuple[int, int]:
        return cluster_view(self.deployment_name).queued()


IDLE = EngineLoad(
    num_running=0,
    num_waiting=0,
    queued_prefill_tokens=0,
    num_blocks=100,
    num_free_blocks=100,
    prefill_tokens_per_s=1000.0,
    num_steps=1,
)


def waiting(requests: int, tokens: int) -> EngineLoad:
    """Return the load of an engine with these many waiting requests and prompt tokens."""
    return EngineLoad(
        num_running=1,
        num_waiting=requests,
        queued_prefill_tokens=tokens,
        num_blocks=9,
        num_free_blocks=1,
        prefill_tokens_per_s=1000.0,
        num_steps=1,
    )


@dataclass
class _Ready:
    value: Any
    fails: bool = False

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()
        if self.fails:
            raise DeploymentUnavailableError(DeploymentID("engine"))
        return self.value

    def cancel(self) -> None:
        """There is nothing to cancel."""


@dataclass
class FakeText:
    """A TextStream that shows token ids as themselves and stops at ``stop``."""

    stop: str | None = None
    stop_string: str | None = None
    num_tokens: int = 0

    def push(self, token_ids: list[int], *, final: bool = False) -> str:
        text = ""
        for token_id in token_ids:
            self.num_tokens += 1
            if self.stop is not None and f"<{token_id}>" == self.stop:
                self.stop_string = self.stop
                break
            text += f"<{token_id}>"
        return text


def events(text: str) -> list[Any]:
    """Return the JSON of each server-sent event but the last."""
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: {")]
