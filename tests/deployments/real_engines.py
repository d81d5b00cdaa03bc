"""RealEngines: an engine in this process, where the ingress expects a deployment; each request runs at once."""

from __future__ import annotations

from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from engine.request import EngineRequest
from engine.step_engine import StepEngine
from tests.deployments.fakes import FakeEngines, Script


class _Info:
    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()
        return self._engine.info

    def cancel(self) -> None:
        """There is nothing to cancel."""


class RealEngines(FakeEngines):
    """A handle, and the dispatcher, of one engine."""

    def __init__(self, engine: StepEngine) -> None:
        super().__init__([])
        self.engine = engine

    @property
    def info(self) -> Any:
        return SimpleNamespace(remote=lambda: _Info(self.engine))

    def answer(self, request: EngineRequest) -> Script:
        self.engine.check_request(request)
        grammars = self.engine.grammars
        grammar = None if grammars is None else grammars.compile(request.params.structured_outputs)
        self.engine.queue_request(request, grammar=grammar)
        outputs: Script = []
        while self.engine.has_unfinished:
            outputs += [replace(output, replica="r1") for output in self.engine.step()]
        return outputs
