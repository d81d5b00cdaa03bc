"""MtpDecoder: the checkpoint's own layer of multi-token prediction (MTP), with its part of the KV cache.

It caches, in the same blocks as the model: keys and values of one layer, and the model's last hidden state after each
token, which the layer reads. So a token that the layer has not computed yet can be computed later, whatever has become
of the step that computed it for the model: drafts that do not pay take no time for the layer.
"""

from __future__ import annotations

import logging
from time import perf_counter
from typing import Any

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv.kv_cache import CachedLayers, KVCache
from engine.kv.layer_cache import HiddenState, LayerCache, PrefixMark, joined, without_windows
from engine.models.config.model_config import ModelConfig
from engine.models.config.model_shape import ModelShape
from engine.models.decoder.cpu_decoder import CpuDecoder, can_run
from engine.models.decoder.forward_context import ForwardContext
from engine.models.gguf.file import is_gguf
from engine.models.mtp.cpu_mtp_head import CpuMtpHead
from engine.models.mtp.loader import count_mtp_layers, load_mtp_head
from engine.models.mtp.mtp_config import mtp_config
from kernels.attention.base import AttentionBackend
from kernels.attention_metadata import AttentionMetadata

__all__ = ["MtpDecoder", "new_mtp_decoder"]

logger = logging.getLogger(__name__)


def new_mtp_decoder(config: EngineConfig, target: ModelShape, **options: Any) -> MtpDecoder | None:
    """Return the layer that the options ask for; None if they do not. The arguments are those of MtpDecoder."""
    is_wanted = config.speculation is not None and config.speculation.method == "mtp"
    return MtpDecoder(config, target, **options) if is_wanted else None


class MtpDecoder:
    """A layer of multi-token prediction. The constructor checks that there is one, and loads no weights.

    Args:
        config: the engine's options, with the method ``mtp``.
        target: the shape of the model.
        dtype: of the model.
        device: on which it is computed.
        backend: of its attention.
        max_model_len: of the model.

    Attributes:
        shape: of the layer, as a model.
        max_len: tokens of the longest sequence that it drafts for.
        last_hidden: what the last ``compute`` returned logits of, [n, hidden_size], as hidden states to continue from.

    Raises:
        ConfigError: if there is no such layer, or it is not computed here.
    """

    model: CpuMtpHead
    last_hidden: torch.Tensor

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
        self.max_len, self.dtype, self.backend = max_model_len, dtype, backend
        self._path, self._quantization = config.model, config.quantization
        self.shape = mtp_config(_with_layer(config, target, dtype, device, backend))

    def load(self, target: object) -> None:
        """Load the weights of the layer of ``target``, the loaded model.

        Raises:
            ModelLoadError: if the checkpoint's layer cannot be served.
        """
        assert isinstance(target, CpuDecoder)
        started = perf_counter()
        self.model = load_mtp_head(self._path, target, dtype=self.dtype, quantization=self._quantization)
        size = (self.model.num_bytes - target.lm_head.num_bytes) / 2**20
        logger.info("MTP layer: loading took %.2f MiB and %.2f seconds", size, perf_counter() - started)
        self._target = target

    def joined_with(self, layers: tuple[LayerCache, ...]) -> tuple[LayerCache, ...]:
        """Return what the model caches, then what the layer caches of the same tokens: see ``DraftDecoder``."""
        own = without_windows(self.shape.layer_caches)
        return (*joined(layers, own), HiddenState(self.shape.hidden_size), PrefixMark(self.dtype.itemsize))

    def part_of(self, cache: KVCache) -> CachedLayers:
        """Return the layer's part of a cache, with the hidden states at its end."""
        end = len(cache.layers) - 1
        return cache.part(end - 1 - len(self.shape.layer_caches), end)

    @property
    def free_tokens(self) -> int | None:
        """As of ModelShard."""
        return self.model.free_tokens

    def keep(self, hidden: torch.Tensor, slots: torch.Tensor, cache: KVCache) -> None:
        """Write a step's hidden states to the cache.

        Args:
            hidden: what the model has returned, [num_tokens, hidden_size].
            slots: int64 [num_tokens], negative where a token is computed and not written.
            cache: of the model and the layer.
        """
        if int(slots.min()) < 0:
            written = slots >= 0
            hidden, slots = hidden[written], slots[written]
        states = cache.layers[-2][0]
        states.view(-1, states.shape[-1]).index_copy_(0, slots, self._target.normed(hidden).to(states.dtype))

    @torch.inference_mode()
    def compute(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        cache: CachedLayers,
        logit_indices: torch.Tensor,
        hidden_states: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Compute a batch; its keys and values go to ``cache``.

        Args:
            token_ids: int64 [num_tokens].
            positions: int64 [num_tokens], of the tokens before each of them, as are the slots of ``metadata``.
            logit_indices: int64 [n]: tokens whose logits are wanted.
            hidden_states: after the tokens at ``positions``, [num_tokens, hidden_size]; None: those of the cache.

        Returns:
            The logits of the tokens after these, float32 [n, vocab_size], valid until the next call; None if there are
            none.
        """
        if hidden_states is None:
            (states,) = cache.layers[-1]
            hidden_states = states.view(-1, states.shape[-1]).index_select(0, metadata.slot_mapping)
        context = ForwardContext(self.backend, metadata, CachedLayers(cache.layers[:-1], cache.block_size))
        hidden = self.model.predict(token_ids, hidden_states, positions, context)
        if not len(logit_indices):
            return None
        self.last_hidden = self.model.normed(hidden[logit_indices])
        return self.model.compute_logits(hidden, logit_indices)


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
