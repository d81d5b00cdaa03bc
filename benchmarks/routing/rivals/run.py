"""Let rivals decide inside the simulation: ``python -m benchmarks.routing.rivals.run --rivals dynamo --engine shared``.

Before a router that is a server, vllm-router's round robin is run beside the simulated one. Each request must have the
same hits and the same first token, which shows that the harness adds and loses no time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.result_file import write_result
from benchmarks.routing.baselines.load import RoundRobin
from benchmarks.routing.replica import SHARED_STEPS, Settings
from benchmarks.routing.rivals.configurations import CONFIGURATIONS, ROUND_ROBIN, Configuration
from benchmarks.routing.rivals.errors import InvalidReplyError
from benchmarks.routing.rivals.install import python_of
from benchmarks.routing.rivals.policy import RivalPolicy
from benchmarks.routing.rivals.process import RivalProcess
from benchmarks.routing.runs import measure
from benchmarks.routing.simulation import Cluster, Result, simulate
from benchmarks.routing.traces import Request, load_mooncake

__all__ = ["check_round_robin", "main", "run_rival"]

TRACE = "../shared/traces/mooncake_conversation.jsonl"
LOGS = Path("build/rivals/logs")
ENGINES = {"free": Settings(), "shared": Settings(steps=SHARED_STEPS)}
CHECK, CHECKED = "round-robin-check", 1_000  # the row's name, and how many requests it has
NOT_OURS = ("mispredicted", "retries", "ghosts")  # figures that a rival does not have


def run_rival(
    process: RivalProcess, requests: Sequence[Request], settings: Settings, options: dict[str, Any], seed: int = 0
) -> tuple[Result, dict[str, Any]]:
    """Run a trace; return the result, and what the rival reports, with its version.

    Raises:
        RivalError: if the rival does not decide as it should.
    """
    policies = []

    def make(cluster: Cluster) -> RivalPolicy:
        policies.append(RivalPolicy(cluster, process, options))
        return policies[0]

    result = simulate(requests, settings, make, seed=seed)
    return result, {"version": policies[0].version, **policies[0].finish()}


def check_round_robin(result: Result, requests: Sequence[Request], settings: Settings, seed: int = 0) -> None:
    """Compare a rival's round robin with the simulated one.

    Raises:
        InvalidReplyError: if a request differs.
    """
    expected = simulate(requests, settings, RoundRobin, seed=seed)
    for job, other in zip(result.jobs, expected.jobs, strict=True):
        if (job.hit_tokens, job.first_token_at, job.ended_at) != (
            other.hit_tokens,
            other.first_token_at,
            other.ended_at,
        ):
            raise InvalidReplyError(
                f"round robin through the router differs from the simulated one at request {job.number}: "
                f"first token at {job.first_token_at} s on {job.replica}, not at {other.first_token_at} s"
            )


def start(name: str, configuration: Configuration) -> RivalProcess:
    """Start a rival's process.

    Raises:
        RivalMissingError: if it is not installed.
    """
    command = [python_of(configuration.environment), "-m", f"benchmarks.routing.rivals.{configuration.module}"]
    variables = {"DYN_LOG": "error", **configuration.variables}
    return RivalProcess(command, LOGS / f"{name}.log", environment=variables)


def main() -> None:
    """Run the chosen rivals. The JSON keeps the rows of other runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", default=TRACE, help="the Mooncake conversation trace")
    parser.add_argument("--rivals", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS))
    parser.add_argument("--engine", choices=ENGINES, default="shared", help="prompts and answers share steps, or not")
    parser.add_argument("--requests", type=int, default=None, help="number of requests of the trace")
    parser.add_argument("--seed", type=int, default=0, help="spread of the trace's timestamps")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/routing_rivals.json"))
    args = parser.parse_args()
    requests = load_mooncake(Path(args.trace), args.seed)[: args.requests]
    facts = {"trace": Path(args.trace).name, "seed": args.seed, "engine": args.engine}
    if any(CONFIGURATIONS[name].module != "in_process" for name in args.rivals):
        row = _run(CHECK, ROUND_ROBIN, requests[:CHECKED], facts)
        print(f"vllm-router's round robin is the simulated one: {row['requests']} requests, {args.engine}", flush=True)
        _store(args.out, row)
    for name in args.rivals:
        row = _run(name, CONFIGURATIONS[name], requests, facts)
        print(_line(row), flush=True)
        _store(args.out, row)


def _run(name: str, configuration: Configuration, requests: Sequence[Request], facts: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a rival."""
    settings, seed, begun = ENGINES[facts["engine"]], facts["seed"], time.perf_counter()
    with start(name, configuration) as process:
        result, report = run_rival(process, requests, settings, configuration.options, seed)
    if name == CHECK:
        check_round_robin(result, requests, settings, seed)
    figures = {key: round(value, 5) for key, value in measure(result).items() if key not in NOT_OURS}
    row = {"rival": name, "version": report.pop("version"), **facts, "requests": len(requests), **figures}
    row |= {"wall_s": round(time.perf_counter() - begun, 1), "report": report}
    return row | {"options": configuration.options, "variables": configuration.variables}


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['rival']:<24} {row['engine']:<6} hit {row['hit']:.1%}, TTFT mean {row['ttft_mean']:.2f} p50 "
        f"{row['ttft_p50']:.2f} p90 {row['ttft_p90']:.2f} p99 {row['ttft_p99']:.1f} s, whole request mean "
        f"{row['whole_mean']:.1f} p90 {row['whole_p90']:.1f} s, "
        f"{row['token_ms']:.0f} ms a token; ran {row['wall_s']:.0f} s"
    )


def _store(path: Path, row: dict[str, Any]) -> None:
    """Add a row to the file, in the place of one of the same run."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    key = ("rival", "trace", "requests", "seed", "engine")
    rows = [other for other in rows if any(other[name] != row[name] for name in key)]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_result(path, {"replicas": Settings().num_replicas, "rows": [*rows, row]})


if __name__ == "__main__":
    main()
