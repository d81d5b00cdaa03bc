"""`python -m deployments.batches.offline FILE --out FILE`: runs a batch, or continues one that was interrupted."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
from pathlib import Path

from deployments.batches.offline.run import CONCURRENCY, Counts, OfflineBatch, run_batch
from engine.errors import PagodaError

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code: 1 if nothing could be run, 2 if lines have failed."""
    parser = argparse.ArgumentParser(prog="pagoda-batch", description="Run a batch of requests.")
    parser.add_argument("input", type=Path, help="JSONL, as for /v1/batches")
    parser.add_argument("--out", type=Path, required=True, help="results; an interrupted run is continued")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", help="of a server; its key is in OPENAI_API_KEY")
    where.add_argument("--config", type=Path, default=Path("serve_config.yaml"), help="options of an engine to start")
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY, help="lines at once at a server")
    given = parser.parse_args(arguments)
    if given.concurrency < 1:
        parser.error(f"--concurrency={given.concurrency} must be at least 1")
    key = os.environ.get("OPENAI_API_KEY", "")
    batch = OfflineBatch(given.input, given.out, given.url, given.config, key, given.concurrency)
    try:
        counts = asyncio.run(run_batch(batch, _Progress()))
    except (PagodaError, OSError) as error:
        print(f"pagoda: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("pagoda: interrupted; the same command continues", file=sys.stderr)
        return 130
    print(f"pagoda: {counts.completed} lines are answered, {counts.failed} have failed: {batch.out}", file=sys.stderr)
    return 2 if counts.failed else 0


class _Progress:
    """Prints a line for each tenth of the batch."""

    def __init__(self) -> None:
        self._printed = -1
        self._lock = threading.Lock()

    def __call__(self, counts: Counts) -> None:
        with self._lock:
            tenth = 10 * counts.done // max(1, counts.total)
            if tenth > self._printed:
                self._printed = tenth
                print(f"pagoda: {counts.done} of {counts.total} lines", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
