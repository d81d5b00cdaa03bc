"""Eagle3Decoder: an EAGLE-3 head, which drafts from hidden states of several of the model's layers."""

from __future__ import annotations

import logging
from time import perf_counter

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.config.model_config import ModelConfig
from engine.models.config.model_shape import ModelShape
from engine.models.decoder.cpu_decoder import CpuDecoder, can_run
from engine.models.decoder.forward_context import AuxStates
from engine.models.eagle3.cpu_eagle3_head import CpuEagle3Head
from engine.models.eagle3.eagle3_config import Eagle3Config, read_eagle3_config, refused_head
from engine.models.eagle3.loader import load_eagle3_head, require_eagle3_weights
from engine.worker.drafting.hidden_state_decoder import HiddenStateDecoder
from kernels.attention.base import AttentionBackend

__all__ = ["Eagle3Decoder"]

logger = logging.getLogger(__name__)


class Eagle3Decoder(HiddenStateDecoder):
    """An EAGLE-3 head. The constructor checks it against the model, and loads no weights.

    Args:
        config: the engine's options, with the method ``eagle3``.
        target: the shape of the model.
        dtype: of the model.
        device: on which it is computed.
        backend: of its attention.
        max_model_len: of the model.

    Raises:
        ConfigError: if the head does not fit the model, or is not computed here.
        ModelLoadError: if its checkpoint cannot be served.
    """

    model: CpuEagle3Head

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
        options = config.speculation
        assert options is not None
        assert options.model is not None
        self._path, self._quantization = options.model, options.quantization
        self._config, num_layers = _fitting(config, options.model, target, dtype, device, backend)
        super().__init__(self._config.shape, max_len=max_model_len, dtype=dtype, backend=backend)
        layers = self._config.aux_layers_of(num_layers)
        self._aux_layers = torch.tensor(layers, dtype=torch.int32)
        self._aux_width = len(layers) * self._config.target_hidden_size

    def load(self, target: object) -> None:
        """See HiddenStateDecoder."""
        assert isinstance(target, CpuDecoder)
        started = perf_counter()
        self.model = load_eagle3_head(
            self._path,
            self._config,
            target,
            len(self._aux_layers),
            dtype=self.dtype,
            max_model_len=self.max_len,
            quantization=self._quantization,
        )
        size = self.model.num_loaded_bytes / 2**20
        logger.info("EAGLE-3 head: loading took %.2f MiB and %.2f seconds", size, perf_counter() - started)

    def new_aux_states(self, num_tokens: int) -> AuxStates:
        """See HiddenStateDecoder."""
        return AuxStates(self._aux_layers, torch.empty(num_tokens, self._aux_width, dtype=torch.float32))

    def states_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the head reads of the auxiliary hidden states, projected once for each token."""
        return self.model.fuse(hidden)


def _fitting(
    config: EngineConfig,
    path: str,
    target: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    backend: AttentionBackend,
) -> tuple[Eagle3Config, int]:
    """Return the config of the head in ``path``, which fits the model, and how many layers the model has.

    Raises:
        ConfigError: if it does not fit, or one of the two is not computed here.
        ModelLoadError: if the checkpoint of the head cannot be opened.
    """
    if device.type != "cpu":
        raise _refused_method(f"runs on CPUs, and the device is {device}")
    if not isinstance(target, ModelConfig):
        raise _refused_method(f"needs our own decoder, and transformers' modules compute '{target.architecture}'")
    if target.altup is not None:
        raise _refused_method(f"does not support '{target.architecture}', which has several residual streams")
    head = read_eagle3_config(path)
    if not backend.uses_cpu_kernels or not all(can_run(shape, dtype, device) for shape in (target, head.shape)):
        raise _refused_method("needs the C kernels, which cannot compute this model, or the head, here")
    for name, own, expected in (
        ("hidden states of {} numbers (target_hidden_size)", head.target_hidden_size, target.hidden_size),
        ("a vocabulary of {} tokens (vocab_size)", head.shape.vocab_size, target.vocab_size),
    ):
        if own != expected:
            raise refused_head(path, f"is for {name.format(own)}, and '{config.model}' has {expected}")
    layers = head.aux_layers_of(target.num_layers)  # refuses those that the model does not have
    require_eagle3_weights(path, head, len(layers))
    return head, target.num_layers


def _refused_method(problem: str) -> ConfigError:
    return ConfigError(
        problem, param="speculative_config", part="method", value="eagle3", remedy="choose ngram, suffix or draft_model"
    )
