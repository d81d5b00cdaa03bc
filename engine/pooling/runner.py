"""PoolingRunner: the loaded model of a pooling engine, and what it says about itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

import torch

from engine.config import EngineConfig, EngineInfo
from engine.pooling.checkpoint import PooledCheckpoint
from engine.pooling.config import PoolingConfig
from engine.pooling.info import PoolingInfo
from engine.pooling.loader import load_pooled_model
from engine.pooling.model import PooledModel, Text
from engine.pooling.params import PoolingParams
from engine.worker.device import resolve_device, set_rank_threads
from kernels.cpu.library import library

__all__ = ["PoolingRunner"]

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 16


class PoolingRunner:
    """Loads a model and computes batches of texts.

    Args:
        config: the engine's options.
        pooling: those of its kind.

    Raises:
        ConfigError: if an option does not fit the model or the machine.
        ModelLoadError: if the checkpoint cannot be served.
    """

    def __init__(self, config: EngineConfig, pooling: PoolingConfig) -> None:
        started = perf_counter()
        checkpoint = PooledCheckpoint.read(config, pooling)
        device = resolve_device(config, rank=0)
        has_cpu_kernels = device.type == "cpu" and library() is not None
        set_rank_threads(config, 0, has_cpu_kernels=has_cpu_kernels)
        dtype: torch.dtype | None = None if config.dtype == "auto" else getattr(torch, config.dtype)
        self._model = load_pooled_model(checkpoint, pooling.task, dtype=dtype, device=device)
        if has_cpu_kernels:
            # What is left for torch is little, and its threads would spin on the cores that the kernels' need.
            torch.set_num_threads(1)
        self.info = _engine_info(config, checkpoint, self._model, _pooling_info(pooling, checkpoint, self._model))
        self.run([Text([0] * min(WARM_UP_TOKENS, checkpoint.max_model_len), PoolingParams())])  # compiles and allocates
        size = self._model.num_bytes / 2**30
        logger.info("Model loading took %.2f GiB and %.2f seconds", size, perf_counter() - started)
        _log_task(self.info)

    def run(self, texts: Sequence[Text]) -> list[bytes]:
        """Return the result of each text of a batch: little-endian float32."""
        return self._model.compute(texts)

    def check_health(self) -> None:
        """A model in this process cannot be lost without its process."""


def _pooling_info(pooling: PoolingConfig, checkpoint: PooledCheckpoint, model: PooledModel) -> PoolingInfo:
    info = PoolingInfo(pooling.task, model.dimensions, has_token_types=checkpoint.architecture.has_token_types)
    if pooling.task == "score":
        names = checkpoint.config_json.get("id2label")
        labels = tuple(str(name) for name in names.values()) if isinstance(names, dict) else ()
        return replace(info, template=checkpoint.pair_template, labels=labels if len(labels) == info.dimensions else ())
    return replace(
        info,
        pooling_type="+".join(checkpoint.pooling_types),
        normalize=checkpoint.normalize,
        matryoshka=checkpoint.matryoshka(pooling.matryoshka, model.dimensions),
        prompts=tuple(checkpoint.sentence.prompts.items()),
        default_prompt=checkpoint.sentence.default_prompt,
    )


def _engine_info(
    config: EngineConfig, checkpoint: PooledCheckpoint, model: PooledModel, pooling: PoolingInfo
) -> EngineInfo:
    return EngineInfo(
        model=config.model,
        block_size=checkpoint.max_model_len,
        num_blocks=0,
        num_host_blocks=0,
        max_model_len=checkpoint.max_model_len,
        vocab_size=checkpoint.config_json["vocab_size"],
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        attention_backend="packed",
        eos_token_ids=(),
        default_sampling={},
        pooling=pooling,
    )


def _log_task(info: EngineInfo) -> None:
    pooling = info.pooling
    assert pooling is not None
    if pooling.task == "embed":
        logger.info(
            "Serving task embed: vectors of %d numbers, pooling %s, %s, texts of at most %d tokens, prompts: %s",
            pooling.dimensions,
            pooling.pooling_type,
            "normalised" if pooling.normalize else "not normalised",
            info.max_model_len,
            ", ".join(name for name, _ in pooling.prompts) or "none",
        )
    else:
        way = "the answers yes and no" if pooling.template else f"a classifier with {pooling.dimensions} outputs"
        logger.info("Serving task score: %s, pairs of at most %d tokens", way, info.max_model_len)
