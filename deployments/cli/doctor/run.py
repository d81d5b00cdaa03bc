"""diagnose: runs the checks that fit a target, and prints what they find."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deployments.cli.client import ServerClient
from deployments.cli.console import open_console
from deployments.cli.doctor import machine, software
from deployments.cli.doctor.finding import Finding, State, findings_of
from deployments.cli.models import find_model

__all__ = ["diagnose"]

STYLES = {State.OK: "green", State.NOTE: "cyan", State.WARNING: "yellow", State.ERROR: "bold red"}
FAILED = 1


def diagnose(target: str | None, port: int, key: str | None) -> int:
    """Print the findings; return 1 if one of them is an error, else 0.

    Args:
        target: URL of a server, a model as ``pagoda serve`` takes it, or None for this machine alone.
        port: of the server that is to run on this machine.
        key: API key of the server.
    """
    console = open_console()
    if target is not None and _is_url(target):
        from deployments.cli.doctor.server import check_server

        findings = check_server(ServerClient(target, key))
    else:
        findings = findings_of(_checks(None if target is None else find_model(target), port))
    counts = dict.fromkeys(State, 0)
    for finding in findings:  # as they come: some take seconds
        counts[finding.state] += 1
        _show(console, finding)
    console.print(_summary(counts))
    return FAILED if counts[State.ERROR] else 0


def _is_url(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def _checks(model: str | None, port: int) -> Iterator[tuple[str, Callable[[], Iterable[Finding]]]]:
    yield "Python", software.check_python
    yield "packages", software.check_packages
    yield "HAProxy", software.check_haproxy
    yield "GPU", software.check_gpu
    yield "CPUs", machine.check_cpu
    yield "compiler", machine.check_compiler
    yield "memory", machine.check_memory
    yield "shared memory", machine.check_shared_memory
    yield "files", machine.check_files
    yield "clock", machine.check_clock
    yield "ports", partial(machine.check_ports, port)
    yield "proxies", machine.check_proxies
    if model is not None:
        from deployments.cli.doctor.model import check_model

        yield "model", partial(check_model, model)


def _show(console: Console, finding: Finding) -> None:
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_column(width=7)
    row.add_column(width=13)
    row.add_column(overflow="fold")
    text = Text(finding.text)
    if finding.remedy:
        text.append(f"\n-> {finding.remedy}", style="bold" if finding.state is State.ERROR else "")
    row.add_row(Text(finding.state.value, style=STYLES[finding.state]), finding.subject, text)
    console.print(row)


def _summary(counts: dict[State, int]) -> str:
    if counts[State.ERROR]:
        return f"\n{counts[State.ERROR]} to repair before a server works, {counts[State.WARNING]} warnings"
    return f"\nnothing prevents a server from working, {counts[State.WARNING]} warnings"
