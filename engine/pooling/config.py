"""PoolingConfig: the options of an engine that computes embeddings or scores, checked once.

It imports no torch, so that a launcher checks a file with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.pooling.info import PoolingTask

__all__ = ["POOLING_TYPES", "PoolingConfig", "PoolingType"]

PoolingType = Literal["cls", "mean", "last", "max", "mean_sqrt_len", "weighted_mean"]
POOLING_TYPES: tuple[str, ...] = get_args(PoolingType)


@dataclass(frozen=True, kw_only=True)
class PoolingConfig:
    """The options that an engine has beside those of ``EngineConfig``.

    Attributes:
        task: ``embed``: texts become vectors; ``score``: pairs of texts become scores, or texts classes.
        pooling_type: how the hidden states of a text become one vector; None: as the checkpoint's files say, else
            ``mean`` for an encoder and ``last`` for a decoder.
        normalize: whether vectors have the length 1; None: as the checkpoint's files say.
        matryoshka: the lengths to which clients may cut vectors (``dimensions``): all (True), none (False) or these;
            None: as config.json says.
    """

    task: PoolingTask
    pooling_type: PoolingType | None = None
    normalize: bool | None = None
    matryoshka: bool | tuple[int, ...] | None = None

    def check_engine(self, engine: EngineConfig) -> None:
        """Refuse options of an engine that this kind does not have, instead of ignoring them.

        Raises:
            ConfigError: for a GGUF file, quantization, several ranks, or speculative decoding.
        """
        if engine.model.endswith(".gguf"):
            raise ConfigError(
                f"is a GGUF file, which task '{self.task}' does not read",
                param="model",
                value=engine.model,
                remedy="give the directory of a Hugging Face checkpoint",
            )
        for name, plain in (("quantization", None), ("tensor_parallel_size", 1), ("speculative_config", None)):
            if (value := getattr(engine, name)) != plain:
                raise ConfigError(
                    f"is not available for task '{self.task}'", param=name, value=value, remedy="leave it out"
                )
