"""Stock load generators against our server, to compare with the figures of our own client.

GuideLLM and AIPerf are programs of virtual environments of their own (`pip install guidellm`, `pip install aiperf`).
They make prompts of text with the model's tokenizer, which they read from the checkpoint's directory.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["aiperf_command", "guidellm_command", "run_aiperf", "run_guidellm"]

CLIENTS, REQUESTS = 16, 64
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
TIMEOUT_S = 1200.0


def guidellm_command(program: str, url: str, model: str, model_name: str, report: Path) -> list[str]:
    """Return the command that keeps CLIENTS requests running and writes its report to that file."""
    backend = f"kind=openai_http,target={url},model={model_name},request_format=/v1/completions,http2=false"
    return [
        program,
        "run",
        "--disable-progress",
        "--backend",
        backend,
        "--profile",
        f"kind=concurrent,streams={CLIENTS}",
        "--constraint",
        f"kind=max_requests,count={REQUESTS}",
        "--tokenizer",
        f"kind=hf_auto,model={model}",
        "--data",
        f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "--output",
        f"kind=json,path={report}",
    ]


def aiperf_command(program: str, url: str, model: str, model_name: str, directory: Path) -> list[str]:
    """Return the command that keeps CLIENTS requests running and writes its reports to that directory."""
    return [
        program,
        "profile",
        "--ui",
        "none",
        "--model",
        model_name,
        "--url",
        url,
        "--endpoint-type",
        "completions",
        "--streaming",
        "--concurrency",
        str(CLIENTS),
        "--request-count",
        str(REQUESTS),
        "--tokenizer",
        model,
        "--synthetic-input-tokens-mean",
        str(PROMPT_TOKENS),
        "--synthetic-input-tokens-stddev",
        "0",
        "--output-tokens-mean",
        str(OUTPUT_TOKENS),
        "--output-tokens-stddev",
        "0",
        "--extra-inputs",
        "ignore_eos:true",
        "--artifact-dir",
        str(directory),
    ]


def run_guidellm(program: str, *, url: str, model: str, model_name: str) -> dict[str, Any]:
    """Run GuideLLM and return the figures that it shares with ours."""
    with tempfile.TemporaryDirectory(prefix="pg-guidellm") as directory:
        report = Path(directory) / "report.json"
        _run(guidellm_command(program, url, model, model_name, report), directory)
        return guidellm_figures(json.loads(report.read_text(encoding="utf-8")))


def guidellm_figures(report: dict[str, Any]) -> dict[str, Any]:
    """Return what a report says of the requests that succeeded."""
    metrics = report["benchmarks"][0]["metrics"]
    ttft, itl = (metrics[name]["successful"] for name in ("time_to_first_token_ms", "inter_token_latency_ms"))
    return {
        "output_tokens_per_s": round(metrics["output_tokens_per_second"]["successful"]["mean"], 2),
        "ttft_p50_ms": round(ttft["percentiles"]["p50"], 2),
        "ttft_p99_ms": round(ttft["percentiles"]["p99"], 2),
        "itl_p50_ms": round(itl["percentiles"]["p50"], 2),
        "itl_p99_ms": round(itl["percentiles"]["p99"], 2),
        "requests": metrics["request_totals"]["successful"],
        "failed": metrics["request_totals"]["errored"] + metrics["request_totals"]["incomplete"],
    }


def run_aiperf(program: str, *, url: str, model: str, model_name: str) -> dict[str, Any]:
    """Run AIPerf and return the figures that it shares with ours."""
    with tempfile.TemporaryDirectory(prefix="pg-aiperf") as directory:
        _run(aiperf_command(program, url, model, model_name, Path(directory)), directory)
        report = next(Path(directory).rglob("profile_export_aiperf.json"))
        return aiperf_figures(json.loads(report.read_text(encoding="utf-8")))


def aiperf_figures(report: dict[str, Any]) -> dict[str, Any]:
    """Return what a report says of the requests that succeeded."""
    ttft, itl = report["time_to_first_token"], report["inter_token_latency"]
    return {
        "output_tokens_per_s": round(report["output_token_throughput"]["avg"], 2),
        "ttft_p50_ms": round(ttft["p50"], 2),
        "ttft_p99_ms": round(ttft["p99"], 2),
        "itl_p50_ms": round(itl["p50"], 2),
        "itl_p99_ms": round(itl["p99"], 2),
        "requests": int(report["request_count"]["avg"]),
        "failed": int(report.get("error_request_count", {"avg": 0})["avg"]),
    }


def _run(command: list[str], directory: str) -> None:
    # AIPerf looks for a tokenizer's directory only in the hub's cache while the hub is said to be offline.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment |= dict.fromkeys(("no_proxy", "NO_PROXY"), "*")  # the server is on this machine
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{Path(command[0]).name} ended with code {done.returncode}:\n{done.stdout[-2000:]}")
