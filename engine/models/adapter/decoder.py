"""TransformersDecoder: a causal language model of transformers on our paged KV cache, with decoder.py's interface.

The model is divided in two. The backbone computes the hidden states of all tokens of a step. The rest computes the
logits of the tokens whose logits are wanted, with its own scaling and soft-cap. Tokens are packed: transformers sees a
step as one sequence in which every token has its own position. Only the attention layers distinguish the sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from engine.errors import ModelLoadError
from engine.kv.layer_cache import KeyValue, LayerCache, SharedWith
from engine.models.adapter.attention import AttentionCall, attention_by
from engine.models.config.model_shape import AttentionShape
from engine.models.config.transformers_config import TransformersConfig
from engine.models.decoder.forward_context import ForwardContext
from engine.models.tensor_parallel import TensorParallel
from kernels.attention.base import AttentionInputs
from kernels.cache.store_kvcache import store_kvcache

__all__ = ["TransformersDecoder"]

_PROBE_TOKENS = 3


class TransformersDecoder:
    """A decoder-only language model of transformers.

    Args:
        model: with weights, and with adapter/attention.py's attention implementation.
        config: its config.
        parallel: this rank and its group, for which the modules of ``model`` are connected already.

    Attributes:
        attention: the shape of its attention layers, as measured.
        layer_caches: what each of them caches.

    Raises:
        ModelLoadError: if a layer asks for attention that the paged cache does not serve.
    """

    def __init__(self, model: Any, config: TransformersConfig, parallel: TensorParallel) -> None:
        self.config, self.parallel = config, parallel
        self._model = model
        self._backbone = _backbone(model)
        self._given = _GivenHiddenStates()
        name = next(name for name, module in model.named_modules() if module is self._backbone)
        model.set_submodule(name, self._given)
        probe = self._measure()
        self.attention, self.layer_caches = probe.shape(config), probe.layer_caches()

    def _measure(self) -> _Probe:
        """Compute a few tokens and their logits: checks that it works, and notes what the attention layers ask for."""
        probe = _Probe()
        tokens = torch.arange(_PROBE_TOKENS, device=self._model.device)
        try:
            with torch.inference_mode(), attention_by(probe):
                logits = self.compute_logits(self._hidden_states(tokens, tokens), tokens)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise self._not_servable(f"its modules could not compute a few tokens: {error}") from error
        if logits is not None and logits.isnan().any(dim=1).all():  # a single token may never have been trained
            raise self._not_servable("the logits of a few tokens are not numbers")
        return probe

    def _not_servable(self, problem: str) -> ModelLoadError:
        return ModelLoadError(
            f"'{self.config.architecture}' cannot be served with this config.json: {problem}; correct it"
        )

    @property
    def num_bytes(self) -> int:
        """Bytes that the weights take."""
        parameters = [*self._backbone.parameters(), *self._model.parameters()]
        sizes: dict[int, int] = {weight.data_ptr(): weight.nbytes for weight in parameters}  # tied weights count once
        return sum(sizes.values())

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Return the last hidden states [num_tokens, hidden_size] of ``token_ids`` at ``positions`` [num_tokens]."""
        layers = _PagedLayers(context, self.layer_caches, self._model.dtype)
        with attention_by(layers):
            hidden = self._hidden_states(token_ids, positions)
        assert layers.num_computed == len(self.layer_caches)
        return hidden

    def _hidden_states(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # A mask of ones, or transformers would take a jump in the positions for the start of another sequence.
        mask = torch.ones_like(token_ids)[None]
        output = self._backbone(
            input_ids=token_ids[None], attention_mask=mask, position_ids=positions[None], use_cache=False
        )
        hidden: torch.Tensor = output[0][0]
        return hidden

    def compute_logits(self, hidden: torch.Tensor, token_indices: torch.Tensor) -> torch.Tensor | None:
        """Return float32 logits [len(token_indices), vocab_size] on rank 0, None on the others.

        Args:
            hidden: [num_tokens, hidden_size].
            token_indices: int64, the tokens of ``hidden`` whose logits are wanted.
        """
        if self.parallel.rank > 0:
            return None  # every rank has the whole head
        with self._given.hidden_states(hidden.index_select(0, token_indices)[None]):
            logits: torch.Tensor = self._model(input_ids=token_indices[None], use_cache=False).logits[0]
        return logits.float()[:, : self.config.vocab_size]  # in this order: see Decoder.compute_logits


def _backbone(model: Any) -> Any:
    """Return the part of a causal language model that computes hidden states."""
    from transformers import PreTrainedModel  # slow to import

    decoder = model.get_decoder()  # where the model calls a decoder inside its base model, as OPT does
    return decoder if isinstance(decoder, PreTrainedModel) and decoder is not model else model.base_model


class _GivenHiddenStates(nn.Module):
    """Replaces the backbone in a model, and returns hidden states that were computed before."""

    def __init__(self) -> None:
        super().__init__()
        self._output: _BackboneOutput | None = None

    @contextmanager
    def hidden_states(self, hidden: torch.Tensor) -> Iterator[None]:
        """Return ``hidden`` [1, num_tokens, hidden_size] inside the ``with``, and drop it afterwards."""
        self._output = _BackboneOutput(hidden)
        try:
            yield
        finally:
            self._output = None

    def forward(self, *_: object, **__: object) -> _BackboneOutput:
        assert self._output is not None
        return self._output


class _BackboneOutput:
    """The output of a backbone of any class, with the hidden states as its only attribute."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        assert index == 0
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


class _PagedLayers:
    """Computes the attention layers of one step, in the model's order, with the step's backend and cache.

    Args:
        dtype: of queries, and of keys and values before they are rounded to a cache of FP8.
    """

    checks_masks = False

    def __init__(self, context: ForwardContext, layer_caches: Sequence[LayerCache], dtype: torch.dtype) -> None:
        self._context, self._layer_caches, self._dtype = context, layer_caches, dtype
        self.num_computed = 0

    def attend(self, call: AttentionCall) -> torch.Tensor:
        context = self._context
        key_cache, value_cache = context.kv_cache.layers[self.num_computed]
        stores = not isinstance(self._layer_caches[self.num_computed], SharedWith)
        self.num_computed += 1
        dtype = self._dtype  # a module may have computed its keys in float32
        metadata = context.metadata_for(call.sliding_window)
        # All keys of the step are written before any is read: sequences of one step may share a block it fills.
        if stores:
            store_kvcache(call.key.to(dtype), call.value.to(dtype), key_cache, value_cache, metadata.slot_mapping)
        inputs = AttentionInputs(
            call.query.to(dtype),
            key_cache,
            value_cache,
            metadata,
            call.scale,
            call.sliding_window,
            call.softcap,
            None if call.sinks is None else call.sinks.float(),
        )
        return context.backend.forward(inputs).to(call.query.dtype)


class _Probe:
    """Notes what the attention layers ask for; returns zeros, or NaN for a token whose query or key is not finite."""

    checks_masks = True

    def __init__(self) -> None:
        self._calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self._calls.append(call)
        zeros = 0 * (call.query.float().sum((1, 2)) + call.key.float().sum((1, 2)))
        answers: torch.Tensor = zeros[:, None, None].expand(*call.query.shape[:2], call.value.shape[2])
        return answers.to(call.query.dtype)

    def shape(self, config: TransformersConfig) -> AttentionShape:
        """Return the shape that all layers have in common.

        Raises:
            ModelLoadError: if they differ in the heads of queries, or ask for what the config does not.
        """
        asked = f"'{config.architecture}' cannot be served with this config.json: "
        num_heads = {call.query.shape[1] for call in self._calls}
        if len(num_heads) != 1:
            raise ModelLoadError(asked + "its layers differ in their attention heads, or it has no attention layer")
        options = {"softcap" for call in self._calls if call.softcap is not None}
        options |= {"sinks" for call in self._calls if call.sinks is not None}
        options |= {"value_dims" for call in self._calls if call.value.shape[2] != call.key.shape[2]}
        if unexpected := options - config.attention_options:
            raise ModelLoadError(f"{asked}its layers have an unexpected {' and '.join(sorted(unexpected))}")
        return AttentionShape(
            num_heads=num_heads.pop(),
            windows=frozenset(call.sliding_window for call in self._calls),
        )

    def layer_caches(self) -> tuple[LayerCache, ...]:
        """Return what each layer caches: nothing, if it attends to the keys and values of an earlier one (Gemma 3n)."""
        first: dict[tuple[int, int], int] = {}
        caches: list[LayerCache] = []
        for index, call in enumerate(self._calls):
            own = KeyValue(call.key.shape[1], call.key.shape[2], call.value.shape[2], call.sliding_window)
            source = first.setdefault((call.key.data_ptr(), call.value.data_ptr()), index)  # DiffLlama's values differ
            caches.append(own if source == index else SharedWith(source))
        return tuple(caches)
