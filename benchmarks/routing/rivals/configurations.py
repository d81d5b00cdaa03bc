"""CONFIGURATIONS: each rival with the settings that it runs with, by the name on the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["CONFIGURATIONS", "ENVIRONMENTS", "ROUND_ROBIN", "Configuration"]

# environment -> the packages of requirements.txt that it gets
ENVIRONMENTS = {
    "dynamo": ("ai-dynamo-runtime", "pyzmq", "msgspec"),
    "vllm-router": ("vllm-router", "aiohttp", "pyzmq", "msgspec"),
    "smg": ("smg", "smg-grpc-proto", "grpcio", "aiohttp", "pyzmq", "msgspec"),
}


@dataclass(frozen=True)
class Configuration:
    """A rival's module, and what it is started with."""

    environment: str
    module: str  # of this package, run with the environment's Python
    options: dict[str, Any] = field(default_factory=dict)  # sent to the module
    variables: dict[str, str] = field(default_factory=dict)  # of the process's environment


def _dynamo(**settings: object) -> Configuration:
    variables = {f"DYN_ROUTER_{name.upper()}": str(value) for name, value in settings.items()}
    return Configuration("dynamo", "in_process", variables=variables)


def _vllm_router(policy: str, *reads: str) -> Configuration:
    options = {"package": "vllm-router", "policy": policy, "prompt": "tokens", "reads": list(reads)}
    return Configuration("vllm-router", "http_router", options)


def _smg_http(pace: int) -> Configuration:
    # The defaults, in simulated time: loads every 10 s, eviction every 60 s.
    arguments = ["--load-monitor-interval", str(10 // pace or 1), "--eviction-interval-secs", str(60 // pace)]
    options = {"package": "smg", "policy": "cache_aware", "prompt": "text", "reads": ["loads"]}
    return Configuration("smg", "http_router", {**options, "arguments": arguments, "pace": pace})


def _smg_grpc(pace: int, *arguments: str) -> Configuration:
    warm_up = ["--worker-warmup-secs", str(60 // pace)]  # the default, in simulated time
    options = {"package": "smg", "policy": "cache_aware", "prompt": "tokens", "reads": ["events", "loads"]}
    return Configuration("smg", "grpc_router", {**options, "arguments": [*warm_up, *arguments], "pace": pace})


ROUND_ROBIN = _vllm_router("round_robin")

CONFIGURATIONS = {
    "dynamo": _dynamo(),
    # The best of 20 settings on the conversation trace with free decodes.
    "dynamo-tuned": _dynamo(
        prefill_load_scale=16.0, kv_overlap_score_credit=1.5, queue_threshold=1.0, queue_policy="fcfs"
    ),
    "vllm-router-kv-aware": _vllm_router("kv_aware", "events"),
    "vllm-router-cache-aware": _vllm_router("cache_aware"),
    "smg-http": _smg_http(pace=10),
    "smg-grpc": _smg_grpc(20),
    "smg-grpc-decay-1": _smg_grpc(20, "--overlap-decay", "1"),
}
