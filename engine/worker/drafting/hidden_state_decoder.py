"""HiddenStateDecoder: what drafts from the model's hidden states, with its part of the KV cache.

It caches, in the same blocks as the model: keys and values of one layer, and for each token the hidden state that this
layer reads. So a token that the layer has not computed yet can be computed later, whatever has become of the step that
computed it for the model: drafts that do not pay take no time for the layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from engine.kv.kv_cache import CachedLayers, KVCache
from engine.kv.layer_cache import HiddenState, LayerCache, PrefixMark, joined, without_windows
from engine.models.config.model_config import ModelConfig
from engine.models.decoder.forward_context import AuxStates, ForwardContext
from engine.models.mtp.hidden_state_head import HiddenStateHead
from kernels.attention.base import AttentionBackend
from kernels.attention_metadata import AttentionMetadata

__all__ = ["HiddenStateDecoder"]


class HiddenStateDecoder(ABC):
    """A layer that drafts from hidden states, as `MtpDecoder` and `Eagle3Decoder` load it.

    Args:
        shape: of the layer, as a model of the vocabulary for which it drafts.
        max_len: tokens of the longest sequence that it drafts for.
        dtype: of the model.
        backend: of the model's attention.

    Attributes:
        model: the layer, after ``load``.
        last_hidden: what the last ``compute`` returned logits of, [n, hidden_size], as hidden states to continue from.
    """

    model: HiddenStateHead
    last_hidden: torch.Tensor

    def __init__(self, shape: ModelConfig, *, max_len: int, dtype: torch.dtype, backend: AttentionBackend) -> None:
        self.shape, self.max_len, self.dtype, self.backend = shape, max_len, dtype, backend

    @abstractmethod
    def load(self, target: object) -> None:
        """Load the weights of the layer of ``target``, the loaded model.

        Raises:
            ModelLoadError: if the checkpoint's layer cannot be served.
        """

    def new_aux_states(self, num_tokens: int) -> AuxStates | None:
        """Return memory for the auxiliary hidden states of a step; None: the model's last hidden states are read."""
        return None

    @abstractmethod
    def states_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what is cached, [num_tokens, hidden_size], of the model's last or auxiliary hidden states."""

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
        """Write the hidden states of a step to the cache.

        Args:
            hidden: what the model has returned, [num_tokens, hidden_size], or its auxiliary hidden states.
            slots: int64 [num_tokens], negative where a token is computed and not written.
            cache: of the model and the layer.
        """
        if int(slots.min()) < 0:
            written = slots >= 0
            hidden, slots = hidden[written], slots[written]
        states = cache.layers[-2][0]
        states.view(-1, states.shape[-1]).index_copy_(0, slots, self.states_of(hidden).to(states.dtype))

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
        self.last_hidden = self.model.next_states(hidden[logit_indices])
        return self.model.compute_logits(hidden, logit_indices)
