"""The cost of HTTP, Ray Serve and the ingress around one engine: throughput, time to first token, gaps between tokens.

    python -m benchmarks.serve --model DIR --out result.json
    python -m benchmarks.serve --model DIR --peer vllm=PYTHON --repeats 2 --out result.json
    python -m benchmarks.serve --model DIR --peer ours:target_inter_token_ms=null --repeats 2 --out result.json

With ``--peer`` the script compares our server with that one and measures nothing else. Without:

- throughput: the requests of w16, each from a client of its own, all at once, beside the offline LLM on the same
  requests. The LLM runs before the server starts and after it has ended. It does not limit prefills beside decodes;
  the server does.
- first token: one request at a time to an idle server, beside an AsyncEngine in this process with the same prompts,
  which runs before the server starts and after it has ended, so that drift of the machine cancels out.
- gaps: the time between two events of running streams while a long prompt is prefilled.

Client and server share this machine, so the client's own work counts against the server. The engine gets as many
threads as there are cores: OMP_NUM_THREADS reaches the replica through the environment. Where it is unset, Ray sets it
to the replica's ``cpus_per_engine``, rounded down, at least 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import torch

from benchmarks.compare import parse_results
from benchmarks.engine_options import add_engine_arguments, engine_options
from benchmarks.machine import describe
from benchmarks.result_file import write_result
from benchmarks.serving.comparison import compare_servers, contestants, summarize, table
from benchmarks.serving.load_generators import run_aiperf, run_guidellm
from benchmarks.serving.measures import (
    MODEL_NAME,
    engine_first_tokens,
    http_first_tokens,
    http_gaps,
    http_tokens_per_s,
)
from benchmarks.serving.server import ROOT, Server, serve
from benchmarks.workloads import Workload, make
from deployments.cli.bench.prompts import random_ids
from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.engine import Engine
from kernels.cgroup import available_cpus

__all__ = ["main"]

FIRST_TOKEN_REQUESTS = 20

Prompts: TypeAlias = list[list[list[int]]]  # several of each length


def offline_tokens_per_s(arguments: argparse.Namespace, workload: Workload) -> float:
    """Run the workload with the offline LLM in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.throughput", workload.name, "--json-lines", "--model", arguments.model]
    command += [f"--engine-option={name}={json.dumps(value)}" for name, value in engine_options(arguments).items()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the offline LLM ended with code {done.returncode}:\n{done.stderr[-2000:]}")
    return float(parse_results(done.stdout)[0]["output_tokens_per_s"])


def in_process_first_tokens(config: EngineConfig, prompts: Prompts) -> list[list[float]]:
    """Return the seconds to the first token for each length of prompt, with an engine in this process."""

    async def run() -> list[list[float]]:
        inner = Engine.from_config(config)
        engine = AsyncEngine(inner)
        await engine_first_tokens(engine, prompts[0][:3])  # warm
        engine.call_in_step_thread(inner.reset_prefix_cache)
        seconds = [await engine_first_tokens(engine, of_length) for of_length in prompts]
        await engine.shutdown()
        return seconds

    return asyncio.run(run())


def _setting(arguments: argparse.Namespace) -> Callable[[dict[str, Any]], None]:
    def change(args: dict[str, Any]) -> None:
        args["model"], args["model_name"] = str(Path(arguments.model).resolve()), MODEL_NAME
        args["replicas"] |= {"num_engine_replicas": 1, "cpus_per_engine": 1, "cpus_per_ingress": 0.2}
        args["engine"] = engine_options(arguments)

    return change


def _measure_server(server: Server, arguments: argparse.Namespace, prompts: Prompts) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        warm_up = random.Random(12345)
        await http_first_tokens(server.url, [random_ids(warm_up, len(prompts[0][0])) for _ in range(3)])
        first = [await http_first_tokens(server.url, of_length) for of_length in prompts]
        # Other ids each time, so that nothing is cached; the offline LLM uses 0.
        rates = [await http_tokens_per_s(server.url, make("w16").shifted(turn)) for turn in range(arguments.repeats)]
        gaps = [
            await http_gaps(server.url, streams, arguments.gap_tokens, arguments.long_prompt)
            for streams in arguments.streams
        ]
        return {"first_token_s": first, "tokens_per_s": rates, "gaps": [asdict(gap) for gap in gaps]}

    measured = asyncio.run(run())
    load = {"url": server.url, "model": str(Path(arguments.model).resolve()), "model_name": MODEL_NAME}
    if arguments.guidellm:
        measured["guidellm"] = run_guidellm(arguments.guidellm, **load)
    if arguments.aiperf:
        measured["aiperf"] = run_aiperf(arguments.aiperf, **load)
    return measured


def _first_token(prompt_tokens: int, http_s: list[float], engine_s: list[float]) -> dict[str, float]:
    http, engine = statistics.median(http_s), statistics.median(engine_s)
    return {
        "prompt_tokens": prompt_tokens,
        "http_ttft_ms": round(1e3 * http, 2),
        "engine_ttft_ms": round(1e3 * engine, 2),
        "difference_ms": round(1e3 * (http - engine), 2),
    }


def _summary(
    measured: dict[str, Any], offline: list[float], engine_s: list[list[float]], lengths: list[int]
) -> dict[str, Any]:
    http, alone = statistics.median(measured["tokens_per_s"]), statistics.median(offline)
    return {
        "http_tokens_per_s": round(http, 2),
        "offline_tokens_per_s": round(alone, 2),
        "http_over_offline": round(http / alone, 3),
        "first_token": [_first_token(*item) for item in zip(lengths, measured["first_token_s"], engine_s, strict=True)],
        "gaps": measured["gaps"],
    }


def _print_generators(measured: dict[str, Any]) -> None:
    for name in ("guidellm", "aiperf"):
        if figures := measured.get(name):
            print(
                f"{name}: {figures['output_tokens_per_s']:.1f} tokens/s, first token p50 {figures['ttft_p50_ms']:.0f} "
                f"and p99 {figures['ttft_p99_ms']:.0f} ms, between tokens p50 {figures['itl_p50_ms']:.1f} and p99 "
                f"{figures['itl_p99_ms']:.1f} ms; {figures['requests']} requests, {figures['failed']} failed"
            )


def _print(summary: dict[str, Any]) -> None:
    print(
        f"w16: {summary['http_tokens_per_s']:.1f} tokens/s through HTTP, {summary['offline_tokens_per_s']:.1f} "
        f"offline: {summary['http_over_offline']:.3f}"
    )
    for item in summary["first_token"]:
        print(
            f"first token, {item['prompt_tokens']} tokens of prompt: {item['http_ttft_ms']:.1f} ms through HTTP, "
            f"{item['engine_ttft_ms']:.1f} in the process: {item['difference_ms']:.1f} ms more"
        )
    print(
        f"\n{'streams':>8} {'gap ms p50':>11} {'p99':>9} {'max':>9} {'calm p50':>9} {'long TTFT s':>12} {'failed':>7}"
    )
    for item in summary["gaps"]:
        print(
            f"{item['streams']:8} {item['p50_ms']:11.1f} {item['p99_ms']:9.1f} {item['max_ms']:9.1f} "
            f"{item['calm_p50_ms']:9.1f} {item['long_ttft_s']:12.2f} {item['failed']:7}"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="The cost of HTTP, Ray Serve and the ingress around one engine.")
    add_engine_arguments(parser)
    parser.add_argument("--repeats", type=int, default=3, help="of the throughput, through HTTP and offline")
    parser.add_argument(
        "--prompt-tokens", type=int, nargs="+", default=[16, 128], help="of the requests whose first token is timed"
    )
    parser.add_argument(
        "--streams", type=int, nargs="+", default=[1, 8], help="number of streams that run when the long prompt arrives"
    )
    parser.add_argument("--gap-tokens", type=int, default=128, help="of each of them")
    parser.add_argument("--long-prompt", type=int, default=2048, help="tokens")
    parser.add_argument("--guidellm", metavar="PATH", help="run GuideLLM against the server too")
    parser.add_argument("--aiperf", metavar="PATH", help="run AIPerf against the server too")
    parser.add_argument(
        "--peer",
        action="append",
        metavar="vllm=PYTHON|ours:KEY=VALUE",
        help="compare with this server, or ours with another option of the engine, and only that",
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load on a compared server")
    parser.add_argument("--out", type=Path)
    return parser


def _compare(parsed: argparse.Namespace) -> None:
    """Compare our server with its peers, print the table, and write JSON to ``--out``."""
    runs = contestants(parsed.model, parsed.peer, engine_options(parsed))
    results = compare_servers(runs, parsed.repeats, parsed.seconds)
    summary = summarize(results)
    print("\n" + table(summary))
    if parsed.out:
        document: dict[str, Any] = {"machine": describe(torch.device("cpu")), "model": Path(parsed.model).name}
        document |= {"options": engine_options(parsed), "summary": summary}
        document["runs"] = {
            load: {name: [asdict(measured) for measured in many] for name, many in servers.items()}
            for load, servers in results.items()
        }
        write_result(parsed.out, document)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the figures, and write JSON to ``--out``."""
    parsed = _parser().parse_args(arguments)
    if parsed.peer:
        _compare(parsed)
        return
    os.environ.setdefault("OMP_NUM_THREADS", str(available_cpus()))
    rng = random.Random(0)
    prompts = [[random_ids(rng, length) for _ in range(FIRST_TOKEN_REQUESTS)] for length in parsed.prompt_tokens]
    config = EngineConfig.from_options(parsed.model, engine_options(parsed))
    half = parsed.repeats // 2
    offline = [offline_tokens_per_s(parsed, make("w16")) for _ in range(parsed.repeats - half)]
    before = in_process_first_tokens(config, prompts)
    with serve(_setting(parsed)) as server:
        measured = _measure_server(server, parsed, prompts)
    after = in_process_first_tokens(config, prompts)
    engine_s = [first + second for first, second in zip(before, after, strict=True)]
    offline += [offline_tokens_per_s(parsed, make("w16")) for _ in range(half)]
    summary = _summary(measured, offline, engine_s, parsed.prompt_tokens)
    _print(summary)
    _print_generators(measured)
    if parsed.out:
        document: dict[str, Any] = {"machine": describe(torch.device("cpu")), "model": Path(parsed.model).name}
        document |= {"options": engine_options(parsed), "summary": summary, "offline_tokens_per_s": offline}
        document |= {"engine_first_token_s": engine_s, "measured": measured}
        write_result(parsed.out, document)


if __name__ == "__main__":
    main()
