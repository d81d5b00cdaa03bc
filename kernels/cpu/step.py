"""Computing a step in C (csrc/layer/layer.h): decoder layers, all at once or a half at a time, and the logits."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from kernels.attention.window import Window
from kernels.attention_metadata import AttentionMetadata
from kernels.cpu.bindings import CLayerCache, CStep, address, pointers
from kernels.cpu.layer import PackedLayer
from kernels.cpu.library import require
from kernels.cpu.linear import PackedLinear
from kernels.cpu.scratch import Scratch
from kernels.cpu.sequences import CpuSequences
from kernels.recurrent_metadata import RecurrentMetadata

__all__ = ["CpuStep", "add_attention", "add_mlp", "add_own_input", "all_layers", "logits", "mixer_half", "mlp_half"]


class CpuStep:
    """One step's batch for the kernels.

    Args:
        hidden: float32 [num_tokens, hidden_size], the residual stream, which the halves add to.
        positions: int64 [num_tokens].
        metadata: the step's attention.
        block_size: tokens in a KV block.
        scratch: grows to the step's size if necessary.
        addend: like ``hidden``; if given, the halves write there what tensor-parallel ranks must sum and add. Layers
            with experts beside a dense feed-forward write [2, num_tokens, hidden_size].
        recurrent: the step's batch for layers with states.
        windows: as ``metadata``, of the pages of windows; layers with another window use those of ``metadata``.
        own_inputs: float32 [num_layers, num_tokens, own_width], if layers have inputs of their own.
        top_k: tokens that a query attends to at most in sparse latent attention; None: the model has none.
        streams: float32 [num_streams, num_tokens, hidden_size], the residual streams of a model with several, which
            the layers change; ``hidden`` is then memory for the one that they compute.
        mixer_input: float32 [num_tokens, inputs of qkv], what attention reads in place of the normalized ``hidden``.
        aux_layers: int32 [num_aux], ascending: ``all_layers`` copies the residual stream before each of these layers,
            and with the number of layers that after the last one.
        aux_states: float32 [num_tokens, num_aux * hidden_size], where to.

    Attributes:
        chosen: the slots that each token attends to, int32 [num_tokens, top_k], written by a layer with an indexer, and
            how many these are; empty if no sequence has more tokens.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        block_size: int,
        scratch: Scratch,
        addend: torch.Tensor | None = None,
        recurrent: RecurrentMetadata | None = None,
        windows: Mapping[Window, AttentionMetadata] | None = None,
        own_inputs: torch.Tensor | None = None,
        top_k: int | None = None,
        streams: torch.Tensor | None = None,
        mixer_input: torch.Tensor | None = None,
        aux_layers: torch.Tensor | None = None,
        aux_states: torch.Tensor | None = None,
    ) -> None:
        scratch.reserve(hidden.shape[0])
        self._metadata, self._windows = metadata, windows or {}
        assert hidden.is_contiguous()
        assert metadata.cu_seqlens_q.dtype == metadata.seq_lens.dtype == torch.int32
        assert positions.dtype == torch.int64
        for paged in (metadata, *self._windows.values()):
            assert paged.block_tables.is_contiguous()
            assert paged.block_tables.dtype == torch.int32
            assert paged.slot_mapping.dtype == torch.int64
            assert paged.block_tables.shape == metadata.block_tables.shape
        # The structure holds addresses only, so these tensors must live as long as it does.
        sequences = None if recurrent is None else CpuSequences(recurrent)
        most_chosen = top_k if top_k is not None and metadata.max_seq_len > top_k else 0
        num_chosen = hidden.shape[0] if most_chosen else 0
        self.chosen = (
            torch.empty(num_chosen, most_chosen, dtype=torch.int32),
            torch.empty(num_chosen, dtype=torch.int32),
        )
        token_starts = torch.arange(num_chosen + 1, dtype=torch.int32)
        aux = (aux_layers, aux_states)
        self._kept = (hidden, positions, metadata, addend, sequences, scratch, own_inputs, token_starts, streams, aux)
        self._mixer_input = mixer_input
        assert streams is None or (streams.is_contiguous() and streams.shape[1:] == hidden.shape)
        assert own_inputs is None or (own_inputs.is_contiguous() and own_inputs.dtype == torch.float32)
        assert mixer_input is None or (mixer_input.is_contiguous() and mixer_input.dtype == torch.float32)
        assert aux_layers is None or aux_layers.dtype == torch.int32
        num_aux = 0 if aux_layers is None else len(aux_layers)
        assert aux_states is None or aux_states.shape == (hidden.shape[0], num_aux * hidden.shape[1])
        assert aux_states is None or (aux_states.is_contiguous() and aux_states.dtype == torch.float32)
        self.c_step = CStep(
            hidden.data_ptr(),
            address(streams),
            address(addend),
            positions.data_ptr(),
            metadata.cu_seqlens_q.data_ptr(),
            metadata.seq_lens.data_ptr(),
            hidden.shape[0],
            metadata.num_seqs,
            metadata.block_tables.shape[1],
            block_size,
            most_chosen,
            *(part.data_ptr() if most_chosen else None for part in (*self.chosen, token_starts)),
            None if sequences is None else ctypes.pointer(sequences.c_sequences),
            address(own_inputs),
            address(mixer_input),
            address(aux_layers),
            address(aux_states),
            num_aux,
            scratch.words.data_ptr(),
            scratch.row_scales.data_ptr(),
            scratch.wide.data_ptr(),
            scratch.query.data_ptr(),
            scratch.attended.data_ptr(),
            scratch.mixed.data_ptr(),
        )

    def paging(self, layer: PackedLayer) -> tuple[int | None, int]:
        """Return where the slots, if it stores, and the block tables of a layer's keys and values are."""
        metadata = self._metadata if layer.window is None else self._windows.get(layer.window, self._metadata)
        return metadata.slot_mapping.data_ptr() if layer.stores else None, metadata.block_tables.data_ptr()


def mixer_half(layer: PackedLayer, step: CpuStep, caches: Iterable[Sequence[torch.Tensor]]) -> None:
    """Add a layer's attention, or what its recurrent layer computes, or both, to the hidden states.

    Attention stores the step's keys and values in the cache first; a recurrent layer updates its states.

    Args:
        layer: the layer.
        step: the batch.
        caches: of attention keys and values, [num_blocks, block_size, num_kv_heads, head_dim] each, or latents,
            [num_blocks, block_size, rank + rope_dim], and an indexer's keys, [num_blocks, block_size, head_dim]; then
            of a recurrent layer the states of `kernels.recurrent.base.RecurrentOps`, that of the convolution first. Of
            an iterator those of this layer are taken.
    """
    require().pagoda_mixer_half(layer.c_layer, step.c_step, CLayerCache(*_addresses(layer, step, iter(caches))))


def mlp_half(layer: PackedLayer, step: CpuStep) -> None:
    """Add a layer's feed-forward to the hidden states."""
    require().pagoda_mlp_half(layer.c_layer, step.c_step)


def add_own_input(layer: PackedLayer, step: CpuStep) -> None:
    """Add a layer's own input to the hidden states, after its feed-forward; nothing if it has none."""
    require().pagoda_add_own_input(layer.c_layer, step.c_step)


def add_attention(layer: PackedLayer, hidden: torch.Tensor, attended: torch.Tensor) -> None:
    """Add to the hidden states what the ranks' attention halves wrote to their addends, summed."""
    shape = layer.c_layer
    _add(layer, hidden, attended, shape.attention_output_norm, shape.attention_output_scale)


def add_mlp(layer: PackedLayer, hidden: torch.Tensor, computed: torch.Tensor) -> None:
    """Add to the hidden states what the ranks' feed-forward halves wrote to their addends, summed.

    Of a dense feed-forward and experts side by side that is [2, num_tokens, hidden_size], and is changed.
    """
    if not layer.has_dense_and_experts:
        _add(layer, hidden, computed, layer.c_layer.mlp_output_norm, layer.c_layer.output_scale)
        return
    dense, of_experts = computed
    assert hidden.is_contiguous()
    assert computed.is_contiguous()
    assert hidden.dtype == computed.dtype == torch.float32
    require().pagoda_add_dense_and_experts(
        layer.c_layer, hidden.data_ptr(), dense.data_ptr(), of_experts.data_ptr(), len(hidden)
    )


def _add(layer: PackedLayer, hidden: torch.Tensor, addend: torch.Tensor, norm: int | None, scale: float) -> None:
    assert hidden.is_contiguous()
    assert addend.is_contiguous()
    assert hidden.dtype == addend.dtype == torch.float32
    shape = layer.c_layer
    require().pagoda_add_to_residual(
        hidden.data_ptr(), addend.data_ptr(), *hidden.shape, norm, shape.eps, shape.residual_multiplier, scale
    )


def all_layers(layers: Sequence[PackedLayer], step: CpuStep, caches: Sequence[Sequence[torch.Tensor]]) -> None:
    """Compute every layer in one call; ``caches`` are those of one layer after another.

    A call releases the interpreter's lock and waits for it at the end: with one call a layer, an event loop in the same
    process would delay a step at every layer.
    """
    remaining = iter(caches)
    c_caches = (CLayerCache * len(layers))(*(CLayerCache(*_addresses(layer, step, remaining)) for layer in layers))
    require().pagoda_layers(pointers([layer.c_layer for layer in layers]), len(layers), step.c_step, c_caches)


def _addresses(layer: PackedLayer, step: CpuStep, caches: Iterator[Sequence[torch.Tensor]]) -> list[int | None]:
    """Return the fields of a layer's CLayerCache; takes the layer's own from ``caches``."""
    attention: list[int | None] = [None] * 5
    if layer.has_attention:
        keys, *values = (part.data_ptr() for part in next(caches))
        attention[:4] = [keys, values[0] if values else keys, *step.paging(layer)]  # a value is how its key begins
    if layer.latent is not None and layer.latent.indexer is not None:
        (index_keys,) = next(caches)
        attention[4] = index_keys.data_ptr()
    if layer.recurrent is None:
        return [*attention, None, None]
    conv_state, *rest = next(caches)
    return [*attention, conv_state.data_ptr(), rest[0].data_ptr() if rest else None]


def logits(
    output: torch.Tensor,
    hidden: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    head: PackedLinear,
    scratch: Scratch,
    softcap: float | None = None,
) -> None:
    """Write the float32 logits [num_rows, vocab_size] of hidden states [num_rows, hidden_size] to ``output``.

    With a ``softcap`` C they are C * tanh(logits / C).
    """
    assert hidden.is_contiguous()
    assert hidden.dtype == torch.float32
    num_rows = hidden.shape[0]
    scratch.reserve(num_rows)
    require().pagoda_logits(
        output.data_ptr(),
        hidden.data_ptr(),
        num_rows,
        norm.data_ptr(),
        eps,
        head.c_weight,
        softcap or 0.0,
        scratch.words.data_ptr(),
        scratch.row_scales.data_ptr(),
    )
