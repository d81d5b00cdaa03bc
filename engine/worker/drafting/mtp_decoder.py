"""MtpDecoder: the checkpoint's own layer of multi-token prediction (MTP)."""

from __future__ import annotations

import logging
from time import perf_counter

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.config.model_config import ModelConfig
from engine.models.config.model_shape import ModelShape
from engine.models.decoder.cpu_decoder import CpuDecoder, can_run
from engine.models.gguf.file import is_gguf
from engine.models.mtp.loader import count_mtp_layers, load_mtp_head
from engine.models.mtp.mtp_config import mtp_config
from engine.worker.drafting.hidden_state_decoder import HiddenStateDecoder
from kernels.attention.base import AttentionBackend

__all__ = ["MtpDecoder"]

logger = logging.getLogger(__name__)


class MtpDecoder(HiddenStateDecoder):
    """A layer of multi-token prediction. The constructor checks that there is one, and loads no weights.

    Args:
        config: the engine's options, with the method ``mtp``.
        target: the shape of the model.
        dtype: of the model.
        device: on which it is computed.
        backend: of its attention.
        max_model_len: of the model.

    Raises:
        ConfigError: if there is no such layer, or it is not computed here.
    """

    def __init__(
        self,
        config: EngineConfig,
        target: ModelShape,
        *,
        dtype: torch.dtype,
        device: torch.device,
        backend: AttentionBackend,
        max_model_len: int,
    ) -> None:
        shape = mtp_config(_with_layer(config, target, dtype, device, backend))
        super().__init__(shape, max_len=max_model_len, dtype=dtype, backend=backend)
        self._path, self._quantization = config.model, config.quantization

    def load(self, target: object) -> None:
        """See HiddenStateDecoder."""
        assert isinstance(target, CpuDecoder)
        started = perf_counter()
        self.model = load_mtp_head(self._path, target, dtype=self.dtype, quantization=self._quantization)
        size = (self.model.num_bytes - target.lm_head.num_bytes) / 2**20
        logger.info("MTP layer: loading took %.2f MiB and %.2f seconds", size, perf_counter() - started)
        self._target = target

    def states_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the model's hidden states after its last norm."""
        return self._target.normed(hidden)


def _with_layer(
    config: EngineConfig, target: ModelShape, dtype: torch.dtype, device: torch.device, backend: AttentionBackend
) -> ModelConfig:
    """Return the shape of a model that has an MTP layer which is computed here.

    Raises:
        ConfigError: if it has none, or it is not.
    """
    if device.type != "cpu":
        raise _refused(f"runs on CPUs, and the device is {device}")
    if is_gguf(config.model):
        raise _refused("needs a checkpoint of safetensors, and the model is a GGUF file")
    if not isinstance(target, ModelConfig):
        raise _refused(f"needs our own decoder, and transformers' modules compute '{target.architecture}'")
    if target.family.mtp is None:
        raise _refused(f"does not support the layers of '{target.architecture}'")
    if not backend.uses_cpu_kernels or not can_run(mtp_config(target), dtype, device):
        raise _refused("needs the C kernels, which cannot compute this model here")
    count = count_mtp_layers(config.model, target)
    if count != 1:
        raise _refused(f"needs a checkpoint with one MTP layer, and '{config.model}' has {count or 'none'}")
    return target


def _refused(problem: str) -> ConfigError:
    return ConfigError(
        problem, param="speculative_config", part="method", value="mtp", remedy="choose ngram, suffix or draft_model"
    )
