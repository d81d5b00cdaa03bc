"""estimate_capacity: what an engine will take and hold, from its options and the headers of the checkpoint's files.

It computes what the engine's log says after the start, by the same functions, and loads no weights. On a GPU without
``kv_cache_memory`` the size of the KV cache is measured after the warm-up, so it is not known before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.config import EngineConfig
from engine.kv.layer_cache import CacheDtype
from engine.kv.pool_sizes import PageSizes
from engine.models.config.model_config import ModelConfig
from engine.worker.memory import host_memory_for_cache, pools_of_blocks, pools_that_fit
from engine.worker.model_shard import ModelShard
from engine.worker.rank_sizes import weight_bytes

__all__ = ["Capacity", "estimate_capacity"]


@dataclass(frozen=True, slots=True)
class Capacity:
    """One engine, all of its ranks together.

    Attributes:
        architecture: of the model.
        device: ``cpu``, or the first GPU.
        dtype: of weights, and of the KV cache unless ``kv_cache_dtype`` is ``fp8``.
        backend: of attention.
        max_model_len: tokens of context.
        weight_bytes: None for a quantised model, whose size in memory depends on the kernels.
        block_size: tokens of a KV block.
        num_blocks: KV blocks; None: measured at the start.
        kv_bytes: of the KV cache, windows and states included; None likewise.
        bytes_per_token: of the layers that attend to everything; None: transformers' modules compute the model, and
            tell it when they are made.
    """

    architecture: str
    device: str
    dtype: str
    backend: str
    max_model_len: int
    weight_bytes: int | None
    block_size: int
    num_blocks: int | None = None
    kv_bytes: int | None = None
    bytes_per_token: int | None = None
    kv_cache_dtype: CacheDtype = "auto"

    @property
    def num_tokens(self) -> int | None:
        """Tokens that the KV cache holds."""
        return None if self.num_blocks is None else self.num_blocks * self.block_size


def estimate_capacity(config: EngineConfig, *, on_several_hosts: bool = False) -> Capacity:
    """Return the capacity of an engine that is started with these options on this machine.

    Args:
        config: options of the engine.
        on_several_hosts: whether its ranks may run on other machines, so that this one needs one GPU.

    Raises:
        ConfigError: an option does not fit the model or the machine, or the KV cache holds no sequence.
        ModelLoadError: the checkpoint cannot be served.
    """
    shard = ModelShard(config, 0, owns_host=on_several_hosts)
    config = config.on_device(shard.device.type)
    known = Capacity(
        shard.model_config.architecture,
        str(shard.device),
        str(shard.dtype).removeprefix("torch."),
        shard.backend.name,
        shard.max_model_len,
        weight_bytes(config, shard.dtype),
        shard.block_size,
        kv_cache_dtype=shard.kv_cache_dtype,
    )
    if not isinstance(shard.model_config, ModelConfig):
        return known
    return _with_cache(known, config, shard, shard.model_config)


def _with_cache(known: Capacity, config: EngineConfig, shard: ModelShard, model: ModelConfig) -> Capacity:
    ranks = config.tensor_parallel_size
    layers = shard.declared((model.shard(ranks) if ranks > 1 else model).layer_caches)
    sizes = PageSizes.of(layers, shard.block_size, shard.dtype.itemsize)
    known = replace(known, bytes_per_token=sizes.block // shard.block_size * ranks)
    if config.num_blocks is not None:
        pools = pools_of_blocks(config, sizes)
    elif shard.device.type == "cpu" or config.kv_cache_memory is not None:
        pools = pools_that_fit(config, sizes, host_memory_for_cache(config), shard.max_model_len)
    else:
        return known
    return replace(known, num_blocks=pools.num_blocks, kv_bytes=sizes.num_bytes(pools) * ranks)
