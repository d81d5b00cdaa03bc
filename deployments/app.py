"""build_app: the application builder that serve_config.yaml names as ``import_path``.

It turns the typed arguments into two deployments, the ingress and the engines, with the resources that each requires.
It starts nothing itself.
"""

from __future__ import annotations

import math
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import LoggingConfig

from deployments.api.api_keys import ApiKeys
from deployments.config import AppConfig
from deployments.ingress import Ingress
from deployments.replica import EngineReplica
from deployments.request_log.tracing import require_exporter
from deployments.serve.rank_placement import placement_options, require_room
from deployments.serve.router import PrefixRouter

__all__ = ["build_app"]

CONSTRUCTOR_RETRIES = 2  # a model that does not fit at once will not fit later
SHUTDOWN_WAIT_S = 0.1  # that Serve waits for calls to an engine that shuts down
METRICS_INTERVAL_S, LOOK_BACK_S = 1.0, 5.0  # between two samples of an engine's pressure; averaging window
MAX_PER_NODE = 100  # Serve accepts no larger max_replicas_per_node
ROUNDING = 1e-6
INGRESS_CONCURRENCY = 10_000  # requests wait in the engines' queues, which order them by priority


def build_app(args: dict[str, Any]) -> Application:
    """Return the application that ``args`` describe.

    Raises:
        ConfigError: for an unknown key, a value out of range, a missing model, too few GPUs, tracing without its
            packages, or invalid API keys.
    """
    config = AppConfig.parse(args)
    config.require_model()
    if config.tracing.otlp_endpoint is not None:
        require_exporter()
    engines = _engine_deployment(config).bind(
        config.engine_config,
        config.limits.max_concurrent_requests_per_engine,
        config.pooling_config,
        graceful_shutdown_s=config.limits.graceful_shutdown_s,
        kv_replication=config.router.kv_replication,
    )
    return _ingress_deployment(config).bind(engines, config, needs_key=bool(ApiKeys.from_environment()))


def _engine_deployment(config: AppConfig) -> serve.Deployment:
    limits, router, replicas = config.limits, config.router, config.replicas
    gpus = config.gpus_per_engine(sum(_of_nodes("GPU")))
    autoscales = config.autoscaling.max_replicas is not None
    require_room(replicas.placement_strategy, gpus, _of_nodes("GPU"), autoscales=autoscales)
    ranks = config.engine_config.tensor_parallel_size
    declare = serve.deployment(
        name="engine",
        **_number_of_engines(config),
        **_limit_per_node(config),
        max_ongoing_requests=limits.max_concurrent_requests_per_engine,
        max_constructor_retry_count=CONSTRUCTOR_RETRIES,
        graceful_shutdown_timeout_s=limits.graceful_shutdown_s,
        graceful_shutdown_wait_loop_s=SHUTDOWN_WAIT_S,
        health_check_period_s=limits.health_check_period_s,
        health_check_timeout_s=limits.health_check_timeout_s,
        **placement_options(replicas.placement_strategy, ranks, replicas.cpus_per_engine, gpus),
        logging_config=_logging(config),
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,  # type: ignore[arg-type]
            request_router_kwargs=router.model_dump(include={"first_token_weight"}),
        ),
    )
    return declare(EngineReplica)


def _number_of_engines(config: AppConfig) -> dict[str, Any]:
    """Return Serve's options for a fixed or an autoscaled number of replicas."""
    scaling = config.autoscaling
    if scaling.max_replicas is None:
        return {"num_replicas": config.replicas.num_engine_replicas}
    policy = {
        "policy_function": "deployments.serve.autoscaling:KVPressure",
        "policy_kwargs": scaling.model_dump(include={"target_queued_prefill_s", "target_kv_usage"}),
    }
    return {
        "autoscaling_config": {
            "min_replicas": scaling.min_replicas,
            "initial_replicas": config.replicas.num_engine_replicas,
            "max_replicas": scaling.max_replicas,
            "upscale_delay_s": scaling.upscale_delay_s,
            "downscale_delay_s": scaling.downscale_delay_s,
            "look_back_period_s": LOOK_BACK_S,
            "metrics_interval_s": METRICS_INTERVAL_S,
            "policy": policy,
        }
    }


def _limit_per_node(config: AppConfig) -> dict[str, Any]:
    """Return Serve's option for as many engines as fit beside the ingresses on the only node; none if all of them do.

    Ray places the engines first. If they took all CPUs, no ingress would start and the server would never answer.
    """
    replicas, nodes = config.replicas, _of_nodes("CPU")
    engines = config.autoscaling.max_replicas or replicas.num_engine_replicas
    if len(nodes) != 1 or not replicas.cpus_per_engine or replicas.placement_strategy != "STRICT_PACK":
        return {}
    for_engines = nodes[0] - replicas.num_ingress_replicas * replicas.cpus_per_ingress
    number = math.floor(for_engines / replicas.cpus_per_engine + ROUNDING)
    return {"max_replicas_per_node": number} if 1 <= number < min(engines, MAX_PER_NODE) else {}


def _ingress_deployment(config: AppConfig) -> serve.Deployment:
    limits = config.limits
    declare = serve.deployment(
        name="ingress",
        num_replicas=config.replicas.num_ingress_replicas,
        max_ongoing_requests=INGRESS_CONCURRENCY,
        graceful_shutdown_timeout_s=limits.graceful_shutdown_s,
        health_check_period_s=limits.health_check_period_s,
        health_check_timeout_s=limits.health_check_timeout_s,
        ray_actor_options={"num_cpus": config.replicas.cpus_per_ingress},
        logging_config=_logging(config),
    )
    return declare(serve.ingress()(Ingress))


def _logging(config: AppConfig) -> LoggingConfig:
    return LoggingConfig(enable_access_log=False, encoding=config.logging.encoding)


def _of_nodes(resource: str) -> list[float]:
    """Return the amounts of a resource on the nodes that have any; empty if there is no cluster yet."""
    if not ray.is_initialized():
        return []
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node["Resources"][resource] for node in nodes if node["Alive"] and node["Resources"].get(resource)]
