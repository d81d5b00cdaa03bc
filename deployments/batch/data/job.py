"""run_job: answers the requests of an input with a Ray Data pipeline, and continues what an earlier run has begun.

    LineSource -> lines without a result -> blocks -> EngineWorker, one actor an engine -> ResultSink

A file of results appears whole or not at all, a task that Ray runs again overwrites its file, and a run begins by
reading the custom_ids of all results. So each line has one result, whatever ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
import ray.data

from deployments.batch.data.engine_worker import BLOCKS_AT_ONCE, EngineWorker
from deployments.batch.data.line_source import LineSource
from deployments.batch.data.result_sink import ResultSink
from deployments.batch.data.survey import endpoint_of, read_results, remaining, survey
from deployments.batch.offline.counts import Counts
from deployments.config import AppConfig
from engine.errors import ConfigError

__all__ = ["Job", "run_job"]

_BATCHES_A_BLOCK = 4  # of an engine
_BLOCKS_AN_ENGINE = 4  # at least, so that all engines end at about the same time


@dataclass(frozen=True)
class Job:
    """What is to be run.

    Attributes:
        inputs: files or directories of JSONL or Parquet, at addresses that Ray Data reads.
        out: a directory for the results, at an address that it writes to; one that an earlier run has left.
        arguments: of the application, whose engines answer.
        num_engines: how many; None: as many as the application has replicas.
        file_format: of the results, ``jsonl`` or ``parquet``; None: that of the first file.
    """

    inputs: tuple[str, ...]
    out: str
    arguments: dict[str, Any]
    num_engines: int | None = None
    file_format: str | None = None


def run_job(job: Job) -> Counts:
    """Run a job to its end on the Ray cluster that this process is connected to; returns how the lines have ended.

    Raises:
        ConfigError: a file cannot be used, the directory has something else in it, or the options are wrong.
        ray.exceptions.RayError: an engine cannot start.
    """
    config = AppConfig.parse(job.arguments)
    config.require_model()
    if (strategy := config.replicas.placement_strategy) != "STRICT_PACK":
        raise ConfigError(f"args.replicas.placement_strategy={strategy} is for servers; leave it out of a job")
    _require_cpus(config, _num_engines(job, config))
    source = _source(job.inputs)
    sink = ResultSink(job.out, job.file_format or source.file_format)
    endpoint = endpoint_of(source)
    source = _source(job.inputs, {"method": "POST", "url": endpoint})
    surveyed = survey(source, endpoint)
    if not surveyed.digests and not surveyed.bad_lines:
        raise ConfigError(f"{' '.join(job.inputs)} has no lines; give at least one request")
    done = read_results(sink.results(), surveyed.digests)
    sink.write_bad_lines(surveyed.bad_lines)
    if len(done.digests) < len(surveyed.digests):
        num_lines = len(surveyed.digests) - len(done.digests)
        answers = _answers(remaining(source, endpoint, surveyed, done.digests), num_lines, job, config, endpoint)
        answers.write_datasink(sink)
        done = read_results(sink.results(), surveyed.digests)
    num_bad = len(surveyed.bad_lines)
    total, num_errors = len(surveyed.digests) + num_bad, done.num_errors + num_bad
    return Counts(total, len(done.digests) - done.num_errors, num_errors)


def _answers(lines: ray.data.Dataset, num_lines: int, job: Job, config: AppConfig, endpoint: str) -> ray.data.Dataset:
    """Return the results of lines, which are computed when they are read."""
    num_engines = _num_engines(job, config)
    most = _BATCHES_A_BLOCK * config.engine_config.max_num_seqs
    size = max(1, min(most, num_lines // (num_engines * _BLOCKS_AN_ENGINE)))
    return lines.repartition(target_num_rows_per_block=size).map_batches(
        EngineWorker,
        fn_constructor_args=(job.arguments, endpoint),
        batch_size=None,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(
            size=num_engines, max_tasks_in_flight_per_actor=2 * BLOCKS_AT_ONCE, enable_true_multi_threading=True
        ),
        max_concurrency=BLOCKS_AT_ONCE,
        num_cpus=config.replicas.cpus_per_engine,
        num_gpus=config.gpus_per_engine(_resource("GPU")),
    )


def _num_engines(job: Job, config: AppConfig) -> int:
    return job.num_engines or config.replicas.num_engine_replicas


def _source(inputs: tuple[str, ...], defaults: dict[str, str] | None = None) -> LineSource:
    try:
        return LineSource(inputs, defaults)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{' '.join(inputs)} cannot be read: {error}") from None


def _require_cpus(config: AppConfig, num_engines: int) -> None:
    available, used = _resource("CPU"), num_engines * config.replicas.cpus_per_engine
    if available - used < 1:
        raise ConfigError(
            f"{num_engines} engines take {used:g} of {available:g} CPUs of the cluster, and reading and writing need "
            f"one; give fewer --engines, or a lower replicas.cpus_per_engine"
        )


def _resource(name: str) -> float:
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return resources.get(name, 0.0)
