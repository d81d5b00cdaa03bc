"""Output tokens per second of the offline LLM on a workload whose requests all arrive at the start.

    python -m benchmarks.throughput --model DIR w1 w16 wshare --out result.json

A process loads the model once and runs each workload once, after a warm-up of three tokens. For a
median, start it several times; `python -m benchmarks.compare` does that, alternating with other engines.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engine_options import add_engine_arguments, engine_options
from benchmarks.peers import runner
from benchmarks.result_file import write_result
from benchmarks.workloads import Request, Workload
from benchmarks.workloads import load as load_workload

__all__ = ["load_engine", "main"]


def load_engine(model: str, workloads: list[Workload], **options: Any) -> runner.Generate:
    """Import and load the engine; both are part of the load time."""
    from engine.llm import LLM
    from engine.sampling_params import SamplingParams

    llm = LLM(model, **options)

    def generate(requests: list[Request]) -> int:
        outputs = llm.generate(
            [{"prompt_token_ids": request.prompt} for request in requests],
            [SamplingParams(temperature=0.0, max_tokens=request.out, ignore_eos=True) for request in requests],
            use_tqdm=False,
        )
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table or JSON lines, and write JSON to ``--out``."""
    parser = argparse.ArgumentParser(description="Tokens per second of the offline LLM.")
    parser.add_argument("workloads", nargs="+", help="names (w1, w16, wshare) or files")
    add_engine_arguments(parser)
    parser.add_argument(
        "--json-lines", action="store_true", help="print JSON lines like the peers' runners, instead of a table"
    )
    parser.add_argument("--out", type=Path)
    parsed = parser.parse_args(arguments)
    try:
        workloads = [load_workload(workload) for workload in parsed.workloads]
        options = engine_options(parsed)
    except ValueError as error:
        parser.error(str(error))
    results = []
    if not parsed.json_lines:
        print(f"{'workload':10} {'output tok/s':>13} {'total tok/s':>12} {'seconds':>9} {'load s':>8}")
    for item in runner.run_workloads("pagoda", parsed.model, partial(load_engine, **options), workloads):
        results.append(item)
        print(json.dumps(item) if parsed.json_lines else _row(item), flush=True)
    if parsed.out:
        _write(parsed.out, parsed.model, options, results)


def _row(result: dict[str, Any]) -> str:
    return (
        f"{result['workload']:10} {result['output_tokens_per_s']:13.1f} {result['total_tokens_per_s']:12.1f} "
        f"{result['seconds']:9.2f} {result['load_s']:8.2f}"
    )


def _write(path: Path, model: str, options: dict[str, Any], results: list[dict[str, Any]]) -> None:
    import torch  # late: the engine's load time has its import in it

    from benchmarks.machine import describe

    document = {
        "machine": describe(torch.device("cpu")),
        "model": Path(model).name,
        "options": options,
        "results": results,
    }
    write_result(path, document)


if __name__ == "__main__":
    main()
