"""`python -m deployments.batch`: answers a file of requests with a Ray Data job on the engines of a cluster.

It reads and writes JSONL or Parquet at any address that Ray Data knows. The same command continues after an
interruption. Without --address and RAY_ADDRESS it starts Ray on this machine.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from deployments.launcher.environment import SETTINGS
from engine.errors import ConfigError, PagodaError
from kernels.cgroup import available_cpus

__all__ = ["job_parser", "main"]


def job_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m deployments.batch", description=__doc__)
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="files or directories of JSONL or Parquet")
    parser.add_argument("--out", required=True, help="directory of the results; an interrupted run is continued")
    parser.add_argument("--config", type=Path, default=Path("serve_config.yaml"), help="options of the engines")
    parser.add_argument("--engines", type=int, help="how many; default: replicas.num_engine_replicas of the config")
    parser.add_argument("--format", choices=("jsonl", "parquet"), help="of the results; default: that of the input")
    parser.add_argument("--address", help="of a Ray cluster; default: RAY_ADDRESS, else Ray on this machine")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the job of a command line; return the exit code: 1 if lines have failed, or nothing can be run."""
    parser = job_parser()
    given = parser.parse_args(arguments)
    if given.engines is not None and given.engines < 1:
        parser.error(f"--engines={given.engines} is not possible; give at least 1")
    try:
        return _run(given)
    except PagodaError as error:
        print(f"pagoda: {error}", file=sys.stderr)
        return 1


def _run(given: argparse.Namespace) -> int:
    """Run the job.

    Raises:
        ConfigError: nothing can be run.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)  # Ray reads some of them when it is imported
    try:
        import pandas  # noqa: F401
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"Ray Data needs {error.name}, which is not installed; pip install '.[data]'") from None
    import ray

    from deployments.batch.data.job import Job, run_job
    from deployments.batch.offline.run import application_of

    job = Job(tuple(given.inputs), given.out, application_of(given.config), given.engines, given.format)
    address = given.address or os.environ.get("RAY_ADDRESS")
    if address:
        ray.init(address)
    else:
        ray.init("local", num_cpus=available_cpus(), include_dashboard=False)
    try:
        counts = run_job(job)
    except ray.exceptions.RayError as error:
        raise ConfigError(f"the job has failed, and the same command continues it: {error}") from error
    finally:
        ray.shutdown()
    print(f"{counts.completed} lines are answered, {counts.failed} have failed: {given.out}")
    return 1 if counts.failed else 0


if __name__ == "__main__":
    sys.exit(main())
