"""StartBars: how far a server's start is, as bars on the terminal, from what Serve and the replicas' logs say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from deployments.launcher.progress import StartProgress

__all__ = ["StartBars"]

_HEAD = re.compile(r"\w+ [\d-]+ [\d:,]+ \w+?_?(engine|ingress) (\w+) -- ")  # of a line in a replica's log
_PERCENT = re.compile(r"Loading weights:[^%]*?\(?(\d+)%")
_STARTED, _COMPILES, _LOADED, _READY = (
    "Started initializing replica",
    "Compiling the CPU kernels",
    "Model loading took",
    "engine ready",
)


class StartBars(StartProgress):
    """Four bars: Ray, the replicas' processes, the weights of all engines, and their warm-up.

    Args:
        console: a terminal; what is printed meanwhile appears above the bars.
    """

    needs_logs = True

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description:10}"), BarColumn(30), TextColumn("{task.fields[text]}"))
        self._progress = Progress(*columns, TimeElapsedColumn(), console=console, refresh_per_second=4)
        self._ray = self._add("Ray", "starts", total=None)
        self._processes = self._add("replicas", "")
        self._load = self._add("load", "")
        self._warm_up = self._add("warm-up", "")
        self._started = set[str]()
        self._loaded: dict[str, float] = {}  # share of the weights, by engine
        self._ready = set[str]()
        self._engine = ""  # of the last line with a head; lines without one follow it

    def _add(self, name: str, text: str, total: int | None = 1) -> TaskID:
        return self._progress.add_task(name, start=False, total=total, text=text)

    def __enter__(self) -> Self:
        self._progress.start()
        self._progress.start_task(self._ray)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:  # the server answers, whatever the logs said last
            self._progress.update(self._ray, total=1)
            for task in self._progress.tasks:
                self._show(task.id, float(task.total or 1))
        self._progress.stop()

    def see_details(self, details: Mapping[str, Any]) -> None:
        """Take the numbers of replicas from Serve's details."""
        deployments = [
            pair
            for application in (details.get("applications") or {}).values()
            for pair in (application.get("deployments") or {}).items()
        ]
        if not deployments:
            return
        self._progress.update(self._ray, total=1)
        self._show(self._ray, 1, "runs")
        targets = {name: int(item.get("target_num_replicas") or 0) for name, item in deployments}
        engines = max(1, targets.get("engine", 1))
        for task, total in ((self._processes, sum(targets.values())), (self._load, engines), (self._warm_up, engines)):
            self._progress.update(task, total=total)
        self._update()

    def see_line(self, line: str) -> None:
        """Take a line of an engine's or an ingress's log."""
        if head := _HEAD.match(line):
            self._engine = head[2] if head[1] == "engine" else ""
            if _STARTED in line:
                self._started.add(head[2])
        if self._engine:
            self._see_engine(self._engine, line)
        self._update()

    def _see_engine(self, engine: str, line: str) -> None:
        if _COMPILES in line:
            self._progress.update(self._load, text="compiling the C kernels, once for this machine")
        elif match := _PERCENT.search(line):
            self._loaded[engine] = int(match[1]) / 100
        elif _LOADED in line:
            self._loaded[engine] = 1.0
        elif _READY in line:
            self._loaded[engine] = 1.0
            self._ready.add(engine)

    def _update(self) -> None:
        self._show(self._processes, len(self._started))
        self._show(self._load, sum(self._loaded.values()))
        self._show(self._warm_up, len(self._ready))

    def _show(self, task: TaskID, completed: float, text: str | None = None) -> None:
        total = self._progress.tasks[task].total or 1
        if completed > 0:
            self._progress.start_task(task)
            text = f"{completed:.3g} of {total:.3g}" if text is None and task != self._ray else text or "runs"
            self._progress.update(task, completed=completed, text=text)
