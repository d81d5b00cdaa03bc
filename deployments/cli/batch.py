"""`pagoda batch`: runs a file of requests, and shows how far it is."""

from __future__ import annotations

import asyncio

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from deployments.batch.offline.counts import Counts
from deployments.batch.offline.run import OfflineBatch, run_batch
from deployments.cli.console import open_console
from engine.errors import ConfigError

__all__ = ["batch"]


def batch(what: OfflineBatch) -> int:
    """Run a batch, or continue one that was interrupted; return the exit code: 1 if lines have failed.

    Raises:
        ConfigError: nothing can be run, or a result cannot be written.
        PagodaError: the engine cannot start.
    """
    console = open_console(to_stderr=True)
    columns = TextColumn("lines"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]}")
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("", total=None, failed="")

        def show(counts: Counts) -> None:
            failed = f"{counts.failed} failed" if counts.failed else ""
            progress.update(task, completed=counts.done, total=counts.total, failed=failed)

        try:
            counts = asyncio.run(run_batch(what, show))
        except OSError as error:
            raise ConfigError(f"the results cannot be written to '{what.out}': {error}") from error
        except KeyboardInterrupt:
            console.print("interrupted; the same command continues")
            raise
    console.print(f"{counts.completed} lines are answered, {counts.failed} have failed: {what.out}", soft_wrap=True)
    return 1 if counts.failed else 0
