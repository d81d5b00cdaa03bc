"""Throughput: tokens, requests and steps."""

from __future__ import annotations

from k8s.monitoring.panels import BLUE, GREEN, ORANGE, PURPLE, RED, TOKENS_PER_SECOND, Panel
from k8s.monitoring.promql import engine, quantile, rate, rate_or_zero

__all__ = ["THROUGHPUT"]

THROUGHPUT = [
    Panel(
        "Tokens",
        "Prompt tokens of started requests, prompt tokens served from the prefix cache, and generated tokens.",
        TOKENS_PER_SECOND,
        [
            ("prompt", rate(engine("prompt_tokens_total"))),
            ("cached", rate_or_zero(engine("prefix_cache_hit_tokens_total"))),
            ("generated", rate(engine("generation_tokens_total"))),
        ],
        colours={"prompt": BLUE, "cached": GREEN, "generated": PURPLE},
    ),
    Panel(
        "Finished requests",
        "By reason. stop and length: complete answers; abort: the client disconnected; error: "
        "no valid next token existed.",
        "reqps",
        [("{{reason}}", rate(engine("requests_finished_total"), "reason"))],
        stacked=True,
        colours={"stop": GREEN, "length": BLUE, "abort": ORANGE, "error": RED},
    ),
    Panel(
        "Size of requests",
        "Prompt tokens and generated tokens of a request.",
        "suffix: tok",
        [
            (f"{what} p{share * 100:.0f}", quantile(share, f"request_{name}_tokens"))
            for what, name in (("prompt", "prompt"), ("answer", "generation"))
            for share in (0.5, 0.9)
        ],
    ),
    Panel(
        "Time of a step",
        "Mean seconds of an engine step, by phase. Each running sequence of the batch gets a token in it.",
        "s",
        [
            (
                "{{phase}}",
                f"{rate(engine('step_seconds_sum'), 'phase')} / {rate(engine('step_seconds_count'), 'phase')}",
            )
        ],
        width=12,
        stacked=True,
        colours={"schedule": ORANGE, "forward": BLUE, "sample": PURPLE},
    ),
    Panel(
        "Tokens of a step",
        "Mean number of tokens computed in a step, decodes and prefill chunks together, by replica.",
        "suffix: tok",
        [
            (
                "{{replica}}",
                f"{rate(engine('step_tokens_sum'), 'replica')} / {rate(engine('step_tokens_count'), 'replica')}",
            )
        ],
        width=12,
    ),
]
