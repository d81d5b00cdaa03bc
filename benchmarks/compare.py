"""Pagoda and its peers on the same workloads, alternating, in one session.

    python -m benchmarks.compare --model DIR --peer vllm=PYTHON --peer openvino=PYTHON,EXPORTED_DIR \\
        --peer llamacpp=PYTHON,MODEL.gguf --repeats 3 --out result.json

Every measured run is a fresh process that loads the engine and runs each workload once. Engines alternate (A B C A B C
...), so that other load on the machine affects all of them alike; the median of the repeats counts. The limit is
measured before the first run, unless ``--no-limit``: it is too high for a model with experts, because a batch
reads more of them than one token. A peer is given as the Python of its virtual environment and, if it cannot read our
checkpoint, the path of a converted one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_options import add_engine_arguments
from benchmarks.limits.model_shape import ModelShape
from benchmarks.limits.rates import Rates
from benchmarks.limits.roofline import Roofline
from benchmarks.machine import describe
from benchmarks.result_file import write_result
from benchmarks.workloads import Workload
from benchmarks.workloads import load as load_workload

__all__ = ["PEERS", "Contestant", "compare", "main", "parse_peer", "parse_results", "summarize", "table"]

OURS = "pagoda"
DEFAULT_WORKLOADS = ("w1", "w16", "wshare")
PEERS = ("vllm", "openvino", "llamacpp")
TIMEOUT_S = 1800.0  # for one process; some peers compile for minutes
ROOT = Path(__file__).resolve().parent.parent

Result = dict[str, Any]  # a runner's JSON line for a workload
Run = Callable[["Contestant", list[str]], list[Result]]


@dataclass(frozen=True)
class Contestant:
    """An engine and the command that runs it; workloads' files are appended."""

    name: str
    command: list[str]


def parse_peer(text: str, model: str) -> Contestant:
    """Return the peer of NAME=PYTHON or NAME=PYTHON,MODEL.

    Raises:
        ValueError: if the text has another form, or there is no runner with that name.
    """
    name, _, rest = text.partition("=")
    python, _, own_model = rest.partition(",")
    if name not in PEERS or not python:
        raise ValueError(f"--peer {text!r} is not NAME=PYTHON[,MODEL] with a NAME of {', '.join(PEERS)}")
    return Contestant(name, [python, "-m", f"benchmarks.peers.{name}", own_model or model])


def parse_results(output: str) -> list[Result]:
    """Return the results in a runner's output, which may contain lines of the engine too."""
    results = []
    for line in output.splitlines():
        if line.startswith("{") and "output_tokens_per_s" in line:
            results.append(json.loads(line))
    return results


def run(contestant: Contestant, files: list[str]) -> list[Result]:
    """Run the workloads in a fresh process.

    Raises:
        RuntimeError: if it fails; the message has the end of its stderr.
    """
    done = subprocess.run(
        contestant.command + files, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    results = parse_results(done.stdout)
    if done.returncode != 0 or len(results) != len(files):
        raise RuntimeError(f"{contestant.name} ended with code {done.returncode}:\n{done.stderr[-2000:]}")
    return results


def compare(
    contestants: list[Contestant], files: list[str], repeats: int, run: Run = run
) -> dict[str, list[list[Result]]]:
    """Return the runs of every engine. An engine that fails is reported and left out; the others continue."""
    runs: dict[str, list[list[Result]]] = {item.name: [] for item in contestants}
    failed: set[str] = set()
    for repeat in range(repeats):
        for contestant in contestants:
            if contestant.name in failed:
                continue
            try:
                results = run(contestant, files)
            except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
                failed.add(contestant.name)
                print(f"{contestant.name} is left out: {error}", file=sys.stderr)
                continue
            runs[contestant.name].append(results)
            rates = ", ".join(f"{result['workload']} {result['output_tokens_per_s']:.1f}" for result in results)
            print(f"run {repeat + 1} of {repeats}, {contestant.name}: {rates}", flush=True)
    return {name: many for name, many in runs.items() if many and name not in failed}


def summarize(
    runs: dict[str, list[list[Result]]], workloads: list[Workload], roofline: Roofline | None
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the median rate, spread, share of the limit and our median over the engine's, by workload and engine."""
    summary: dict[str, dict[str, dict[str, Any]]] = {}
    for index, workload in enumerate(workloads):
        rates = {name: [many[index]["output_tokens_per_s"] for many in all_runs] for name, all_runs in runs.items()}
        medians = {name: statistics.median(many) for name, many in rates.items()}
        summary[workload.name] = {
            name: {
                "output_tokens_per_s": median,
                "lowest": min(rates[name]),
                "highest": max(rates[name]),
                "share_of_limit": None if roofline is None else round(roofline.share(workload, median), 3),
                "ours_over_this": round(medians[OURS] / median, 3) if OURS in medians else None,
                "load_s": statistics.median(many[index]["load_s"] for many in runs[name]),
            }
            for name, median in medians.items()
        }
    return summary


def table(summary: dict[str, dict[str, dict[str, Any]]], limits: dict[str, float]) -> str:
    """Return the summary as text, a line for each workload and engine."""
    lines = [
        f"{'workload':10} {'engine':12} {'tok/s':>8} {'lowest':>8} {'highest':>8} {'limit %':>8} {'ours/it':>8} load s"
    ]
    for workload, engines in summary.items():
        for name, row in engines.items():
            share = "-" if row["share_of_limit"] is None else f"{100 * row['share_of_limit']:.1f}"
            ratio = "-" if row["ours_over_this"] is None else f"{row['ours_over_this']:.2f}"
            lines.append(
                f"{workload:10} {name:12} {row['output_tokens_per_s']:8.2f} {row['lowest']:8.2f} {row['highest']:8.2f} "
                f"{share:>8} {ratio:>8} {row['load_s']:6.1f}"
            )
        if workload in limits:
            lines.append(f"{workload:10} {'limit':12} {limits[workload]:8.1f}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the table, and write JSON to ``--out``."""
    parser = argparse.ArgumentParser(description="Our engine beside its peers.")
    parser.add_argument("workloads", nargs="*", help=f"names or files; default: {' '.join(DEFAULT_WORKLOADS)}")
    add_engine_arguments(parser)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON[,MODEL]", help=" | ".join(PEERS))
    parser.add_argument("--int8", action="store_true", help="run Pagoda with int8 weights as well")
    parser.add_argument("--no-limit", action="store_true", help="do not measure what the machine could do at most")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    try:
        workloads = [load_workload(item) for item in options.workloads or DEFAULT_WORKLOADS]
        contestants = [_ours(options), *(parse_peer(item, options.model) for item in options.peer)]
        if options.int8:
            contestants.insert(1, Contestant("pagoda int8", [*_ours(options).command, "--quantization", "int8"]))
    except ValueError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory(prefix="pg-compare") as directory:
        measured: Result = {"machine": describe(torch.device("cpu"))}
        roofline = None
        if not options.no_limit:
            measured = _measured_rates(options.model, Path(directory) / "rates.json")
            rates = Rates.from_json(measured["rates"])
            roofline = Roofline(ModelShape.from_checkpoint(options.model), rates, options.max_num_batched_tokens)
        files = [str(_written(workload, Path(directory))) for workload in workloads]
        runs = compare(contestants, files, options.repeats)
    summary = summarize(runs, workloads, roofline)
    limits = {} if roofline is None else {workload.name: roofline.limit(workload) for workload in workloads}
    print("\n" + table(summary, {name: limit.tokens_per_s for name, limit in limits.items()}))
    if options.out:
        document = {"machine": measured["machine"], "model": Path(options.model).name, "repeats": options.repeats}
        document |= {name: measured[name] for name in ("rates", "read_gb_s") if name in measured}
        document |= {"summary": summary, "runs": runs}
        document |= {"limits": {name: limit.to_json() for name, limit in limits.items()}}
        write_result(options.out, document)


def _ours(options: argparse.Namespace) -> Contestant:
    command = [sys.executable, "-m", "benchmarks.throughput", "--json-lines", "--model", options.model]
    command += ["--dtype", options.dtype, "--max-model-len", str(options.max_model_len)]
    command += ["--max-num-seqs", str(options.max_num_seqs)]
    command += ["--max-num-batched-tokens", str(options.max_num_batched_tokens)]
    command += ["--quantization", options.quantization] if options.quantization else []
    return Contestant(OURS, command + [f"--engine-option={item}" for item in options.engine_option])


def _measured_rates(model: str, out: Path) -> dict[str, Any]:
    """Measure in a process of its own, which gives its memory back."""
    command = [sys.executable, "-m", "benchmarks.roofline", "--model", model, "--out", str(out)]
    subprocess.run(command, cwd=ROOT, timeout=TIMEOUT_S, check=True)
    rates: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return rates


def _written(workload: Workload, directory: Path) -> Path:
    path = directory / f"{workload.name}.json"
    workload.write(path)
    return path


if __name__ == "__main__":
    main()
