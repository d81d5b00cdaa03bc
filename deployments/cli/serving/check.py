"""`pagoda config check`: validates a config file, and says what it would start on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from deployments.cli.console import open_console
from deployments.config import AppConfig
from deployments.launcher.preflight import Endpoint, check_document, read_document
from engine.errors import ConfigError, ModelLoadError
from kernels.cgroup import available_cpus

if TYPE_CHECKING:
    from engine.worker.capacity import Capacity

__all__ = ["check_file", "describe"]

MIB, GIB = 2**20, 2**30


def check_file(path: Path) -> int:
    """Print what a config file would start; return the exit code.

    Raises:
        ConfigError: one line that names the file, the first mistake and the remedy.
        ModelLoadError: likewise, of a mistake in the model's files.
    """
    document = read_document(path)
    try:
        endpoint, config = check_document(document)
        facts = list(describe(endpoint, config))
    except (ConfigError, ModelLoadError) as error:
        raise type(error)(f"{path}: {error}") from None
    console = open_console()
    console.print(f"{path}: valid; it would start", markup=False, soft_wrap=True)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=12)
    table.add_column(overflow="fold")
    for name, text in facts:
        table.add_row(f"  {name}", text)
    console.print(table, markup=False)
    return 0


def describe(endpoint: Endpoint, config: AppConfig) -> Iterator[tuple[str, str]]:
    """Yield what would be started, as a name and a text each.

    Raises:
        ConfigError: an option does not fit the model or this machine.
        ModelLoadError: the checkpoint cannot be served.
    """
    page = f", page at {endpoint.url}/" if endpoint.has_page else ""
    yield "server", f"{config.served_name} ({config.task}) at {endpoint.url}/v1{page}"
    yield "replicas", _replicas(config)
    yield "CPUs", _cpus(config)
    if config.pooling_config is not None:
        yield "engine", "of vectors or scores: no KV cache; its memory is measured at the start"
        return
    from engine.worker.capacity import estimate_capacity  # imports torch, which a mistake before need not wait for

    capacity = estimate_capacity(config.engine_config, on_several_hosts=_on_several_hosts(config))
    yield from _engine(config, capacity)
    yield from _memory(config, capacity)


def _replicas(config: AppConfig) -> str:
    replicas, autoscaling = config.replicas, config.autoscaling
    engines, ingresses = replicas.num_engine_replicas, replicas.num_ingress_replicas
    text = f"{engines} engine{'s' * (engines > 1)}, {ingresses} ingress{'es' * (ingresses > 1)}"
    if autoscaling.max_replicas is None:
        return text
    return f"{text}; autoscaling from {autoscaling.min_replicas} to {autoscaling.max_replicas} engines"


def _cpus(config: AppConfig) -> str:
    replicas, cpus = config.replicas, available_cpus()
    bundles = config.engine_config.tensor_parallel_size if _on_several_hosts(config) else 1
    wanted = replicas.num_engine_replicas * bundles * replicas.cpus_per_engine
    wanted += replicas.num_ingress_replicas * replicas.cpus_per_ingress
    if _on_several_hosts(config):
        return f"Ray reserves {wanted:g} of all nodes, {replicas.cpus_per_engine:g} for each rank"
    text = f"Ray reserves {wanted:g} of {cpus} on this machine"
    return text if wanted <= cpus else f"{text}: some replicas would wait for room; lower replicas.cpus_per_engine"


def _on_several_hosts(config: AppConfig) -> bool:
    return config.replicas.placement_strategy != "STRICT_PACK"


def _engine(config: AppConfig, capacity: Capacity) -> Iterator[tuple[str, str]]:
    options = config.engine_config
    ranks = f" x {options.tensor_parallel_size}" if options.tensor_parallel_size > 1 else ""
    fp8 = "" if capacity.kv_cache_dtype == "auto" else f" (keys and values {capacity.kv_cache_dtype})"
    yield (
        "one engine",
        f"{capacity.architecture} on {capacity.device}{ranks}, {capacity.dtype}{fp8}, attention {capacity.backend}; "
        f"context {capacity.max_model_len:,} tokens; at most {options.max_num_seqs} sequences and "
        f"{options.on_device(capacity.device.partition(':')[0]).tokens_per_step:,} tokens a step",
    )
    size = capacity.weight_bytes
    yield "weights", "quantised; measured at the start" if size is None else _size(size)
    if capacity.num_tokens is None or capacity.kv_bytes is None:
        each = capacity.bytes_per_token
        of_token = "" if each is None else f"; {each / 1024:g} KiB a token"
        share = options.gpu_memory_utilization
        yield "KV cache", f"measured at the start: {share:g} of the GPU less weights and activations{of_token}"
        return
    tokens = capacity.num_tokens
    fit = tokens / capacity.max_model_len
    yield (
        "KV cache",
        f"{capacity.num_blocks:,} blocks of {capacity.block_size} = {tokens:,} tokens in {_size(capacity.kv_bytes)}: "
        f"{fit:.1f} requests of full length",
    )
    if host_bytes := _host_bytes(config, capacity):
        yield "host cache", f"{_size(host_bytes)} for preempted requests and evicted prefixes"
    if options.disk_cache_path is not None:
        yield "disk cache", f"{options.disk_cache_gib:g} GiB of each engine in {options.disk_cache_path}"
    if options.shared_cache_path is not None:
        most = options.shared_cache_gib
        limit = "without a limit" if most is None else f"at most {most:g} GiB"
        yield "shared cache", f"{limit} in {options.shared_cache_path}"


def _host_bytes(config: AppConfig, capacity: Capacity) -> int:
    """Return the bytes of an engine's host pools."""
    swap_space_gib = config.engine_config.swap_space_gib
    if swap_space_gib is not None:
        return int(swap_space_gib * GIB)
    from engine.worker.memory import default_swap_space  # imports torch

    return default_swap_space(capacity.kv_bytes or 0) if capacity.device.startswith("cpu") else 0


def _memory(config: AppConfig, capacity: Capacity) -> Iterator[tuple[str, str]]:
    if capacity.weight_bytes is None or capacity.kv_bytes is None or not capacity.device.startswith("cpu"):
        return
    one = capacity.weight_bytes + capacity.kv_bytes + _host_bytes(config, capacity)
    engines = config.replicas.num_engine_replicas
    yield "memory", f"{_size(one * engines)} for weights and caches of all engines, beside Python, torch and Ray"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"
