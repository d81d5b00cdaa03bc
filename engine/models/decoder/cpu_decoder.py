"""CpuDecoder: the model of decoder.py, computed by the C kernels on packed weights.

It computes the same function through the same interface. One call computes all layers. Tensor-parallel ranks sum their
results after each half of a layer, so they make two calls for each layer. The residual stream is float32, and so are
norms, rotations and sums, whatever the weights are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from time import perf_counter

import torch
from torch import nn
from torch.nn import functional as F

from engine.models.checkpoint.stored_parts import EMBEDDING, HEAD
from engine.models.config.model_config import ModelConfig
from engine.models.decoder.coded_plan import NO_CODES, CodedPlan
from engine.models.decoder.cpu_layers import packed_layer, set_parameter
from engine.models.decoder.forward_context import ForwardContext
from engine.models.decoder.gemma.cpu_layer_inputs import CpuLayerInputs
from engine.models.decoder.gemma.cpu_streams import CpuStreams
from engine.models.decoder.parallel_layers import VocabParallelEmbedding
from engine.models.decoder.query_growth import growth_factors
from engine.models.tensor_parallel import TensorParallel
from kernels.attention import c_kernel
from kernels.coded_weight import Weight
from kernels.cpu.coded_linear import packed_linear
from kernels.cpu.experts import experts
from kernels.cpu.gather import gather_packed_rows, gather_rows
from kernels.cpu.layer import NormName, PackedLayer
from kernels.cpu.linear import LANES, PackedLinear, WeightKind
from kernels.cpu.scratch import Scratch
from kernels.cpu.step import CpuStep, add_attention, add_mlp, add_own_input, all_layers, logits, mixer_half, mlp_half

__all__ = ["CpuDecoder", "can_run", "head_is_embedding"]

_TIMES_MEASURED = 3
_LAYERS_MEASURED = 4  # together, the experts of one token are larger than the processor's caches
_MANY_TOKENS = 32  # with this many tokens, computing takes longer than reading weights on any processor
_MOST_FREE_TOKENS = 256
_ANY_HEAD_DIM = 16

_NORMS: dict[str, NormName] = {  # by the module's name in decoder.py
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "post_attention_norm",
    "attention_output_norm": "attention_output_norm",
    "mlp_output_norm": "mlp_output_norm",
    "dense_norm": "post_attention_norm",
    "sparse_norm": "experts_norm",
    "dense_output_norm": "dense_output_norm",
    "sparse_output_norm": "experts_output_norm",
    "per_layer_output_norm": "own_output_norm",
    "post_laurel_norm": "laurel_norm",
    "q_norm": "query_norm",
    "k_norm": "key_norm",
}


def can_run(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the C kernels are available on this machine and can compute this model on this device."""
    dims = {(dim, dim) for dim in config.head_dims} or {(_ANY_HEAD_DIM, _ANY_HEAD_DIM)}  # no layer may have attention
    if config.latent is not None:
        dims = {(config.latent.cache.elements_per_token, config.latent.rank)}
    are_supported = all(c_kernel.is_supported(dtype, *of_layer) for of_layer in dims)
    has_whole_vectors = config.per_layer_width % LANES == 0
    return device.type == "cpu" and has_whole_vectors and are_supported


def head_is_embedding(config: ModelConfig, parallel: TensorParallel, kind: WeightKind) -> bool:
    """Return whether the embedding is read from the head's packed weights, so that memory holds them once."""
    return config.tie_word_embeddings and parallel.size == 1 and kind is not WeightKind.INT8


class CpuDecoder:
    """A decoder-only language model on a CPU.

    Args:
        embed_tokens: the embedding, whose weights are set later; it is not used where ``head_is_embedding``.
        config: the whole model's shape.
        rope: tables of the cosines and sines of every position it may see, float32 [length, 2, head_dim // 2].
        parallel: this rank and its group.
        dtype: of the KV cache, float32 or bfloat16.
        kind: the type of the linear layers' packed weights.
        plan: which weights stay codes.
        lm_head: the head of another model, which this one shares; None: it has its own.
        mixer_inputs: numbers that attention reads of each token, given to ``compute``; 0: the normalized hidden states.

    Attributes:
        attention: the shape of this rank's attention layers.
        layer_caches: what each layer caches on this rank.
        rope: as the argument.
    """

    def __init__(
        self,
        embed_tokens: VocabParallelEmbedding,
        config: ModelConfig,
        rope: Sequence[torch.Tensor],
        parallel: TensorParallel,
        dtype: torch.dtype,
        kind: WeightKind,
        plan: CodedPlan = NO_CODES,
        lm_head: PackedLinear | None = None,
        mixer_inputs: int = 0,
    ) -> None:
        self.embed_tokens, self.rope = embed_tokens, rope
        self.config, self.parallel = config, parallel
        self._head_is_embedding = head_is_embedding(config, parallel, kind)
        self._embedding_multiplier = config.embedding_multiplier_in(dtype)
        own = config.shard(parallel.size)
        self.attention, self.layer_caches = own.attention, own.layer_caches
        self.layers = [packed_layer(own, index, kind, dtype, plan, mixer_inputs) for index in range(config.num_layers)]
        for layer, table in zip(self.layers, config.rope.tables, strict=True):
            if table is None and own.query_growth is not None:
                layer.set_growth(growth_factors(own.query_growth, torch.arange(len(rope[0]))))
            if table is not None:
                layer.set_rope(rope[table])
                if layer.latent is not None and own.latent is not None and own.latent.query_growth is not None:
                    layer.latent.set_growth(growth_factors(own.latent.query_growth, torch.arange(len(rope[table]))))
        self.norm = torch.empty(0)
        of_head = plan.sections.get(EMBEDDING if self._head_is_embedding else HEAD)
        self.lm_head = lm_head or packed_linear(
            kind, config.hidden_size, self.embed_tokens.num_embeddings, sections=of_head
        )
        self._layer_inputs = CpuLayerInputs(config, parallel, dtype, kind) if config.per_layer_width else None
        self._streams = None if config.altup is None else CpuStreams(config.altup, config.hidden_size, kind)
        self._scales_stream = config.altup is not None and config.altup.scales_output
        kinds = {kind, self.lm_head.kind} | ({WeightKind.CODED} if plan.sections else set())
        index = None if config.latent is None else config.latent.index
        self._top_k = None if index is None else index.top_k
        if index is not None:
            kinds |= {WeightKind.FLOAT32}  # of its heads' weights
        self._scratch = _scratch(own, self.layers, kinds, dtype)
        self._logits = torch.empty(0)

    # --- weights ------------------------------------------------------------------------------------------------

    def set_weight(self, name: str, weight: Weight) -> None:
        """Set one parameter, by its name in decoder.py's Decoder.

        The packed layers copy it. The embedding keeps the tensor itself, which may be mapped from a file; where the
        head's weights are the embedding, setting the embedding sets them, and the head is not set separately.
        """
        match name.split("."):
            case ["embed_tokens", "weight"] if self._head_is_embedding:
                self.lm_head.set_weight(weight)
            case ["embed_tokens", "weight"]:
                assert isinstance(weight, torch.Tensor)
                self.embed_tokens.weight = nn.Parameter(weight, requires_grad=False)
            case ["norm", "weight"]:
                assert isinstance(weight, torch.Tensor)
                self.norm = self._norm_weight(weight) / self.config.logits_divisor
            case ["per_layer_inputs", module, "weight"]:
                assert self._layer_inputs is not None
                assert isinstance(weight, torch.Tensor)
                self._layer_inputs.set_weight(module, weight)
            case ["streams", module, index, "weight"]:
                assert self._streams is not None
                assert isinstance(weight, torch.Tensor)
                self._streams.set_weight(module, int(index), weight)
            case ["layers", _, "altup", "output_scale"] if not self._scales_stream:
                return
            case ["lm_head", "weight"]:
                self.lm_head.set_weight(weight)
            case ["layers", index, "self_attn", "indexer", *rest]:
                set_parameter(self.layers[int(index)], ["self_attn", "indexer", *rest], weight, is_first_rank=True)
            case ["layers", index, *_, module, "weight"] if module in _NORMS:
                assert isinstance(weight, torch.Tensor)
                self.layers[int(index)].set_norm(_NORMS[module], self._norm_weight(weight))
            case ["layers", index, *rest]:
                set_parameter(self.layers[int(index)], rest, weight, is_first_rank=self.parallel.rank == 0)
            case _:
                raise AssertionError(f"no parameter is called {name}")

    def _norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Return what a norm multiplies by, float32."""
        weight = weight.float().contiguous()
        return 1.0 + weight if self.config.norms_add_one else weight

    def reserve(self, num_tokens: int) -> None:
        """Allocate the scratch memory of a step of ``num_tokens``, so that no step waits for it."""
        self._scratch.reserve(num_tokens)

    @property
    def num_bytes(self) -> int:
        """Bytes that the packed weights take."""
        own_inputs = 0 if self._layer_inputs is None else self._layer_inputs.num_bytes
        streams = 0 if self._streams is None else self._streams.num_bytes
        return self.lm_head.num_bytes + own_inputs + streams + sum(layer.num_bytes for layer in self.layers)

    # --- a step -------------------------------------------------------------------------------------------------

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Return the hidden states before the last norm, float32 [num_tokens, hidden_size]."""
        return self.compute(self.embed(token_ids), token_ids, positions, context)

    def compute(
        self,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        mixer_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute all layers on the input ``hidden`` of the first one, which becomes the result: see ``__call__``.

        With ``mixer_inputs``, attention reads ``mixer_input`` [num_tokens, mixer_inputs].
        """
        addend = hidden.new_empty(2, *hidden.shape) if self.parallel.size > 1 else None
        block_size = context.kv_cache.block_size
        own_inputs = None if self._layer_inputs is None else self._layer_inputs(token_ids, hidden)
        streams = None if self._streams is None else self._streams.start(hidden)
        aux = context.aux_states
        assert aux is None or (addend is None and streams is None), "this residual stream is not copied"
        step = CpuStep(
            hidden,
            positions,
            context.metadata,
            block_size,
            self._scratch,
            addend,
            context.recurrent,
            context.windows,
            own_inputs,
            self._top_k,
            streams,
            mixer_input,
            None if aux is None else aux.layers,
            None if aux is None else aux.states,
        )
        if addend is None:
            all_layers(self.layers, step, context.kv_cache.layers)
            return hidden if self._streams is None or streams is None else self._streams.merge(streams)
        caches = iter(context.kv_cache.layers)
        for layer in self.layers:
            if layer.has_mixer:
                mixer_half(layer, step, caches)
                add_attention(layer, hidden, self.parallel.all_reduce(addend[0]))
            if layer.has_mlp:
                mlp_half(layer, step)
                add_mlp(layer, hidden, self.parallel.all_reduce(addend if layer.has_dense_and_experts else addend[0]))
            add_own_input(layer, step)
        return hidden

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens, float32 [num_tokens, hidden_size]."""
        if self.parallel.size == 1:
            return self.stored_embeddings(token_ids, self._embedding_multiplier)
        hidden: torch.Tensor = self.embed_tokens(token_ids)  # which also sums over the ranks
        return hidden.float() * self._embedding_multiplier

    def stored_embeddings(self, token_ids: torch.Tensor, multiplier: float = 1.0) -> torch.Tensor:
        """Return rows of the stored embedding times a number, float32 [num_tokens, hidden_size]; one rank only."""
        if self._head_is_embedding:
            return gather_packed_rows(self.lm_head, token_ids, multiplier)
        return gather_rows(self.embed_tokens.weight, token_ids, multiplier)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states after the last norm, from which the logits are computed."""
        return F.rms_norm(hidden, hidden.shape[-1:], self.norm, self.config.rms_norm_eps)

    def compute_logits(self, hidden: torch.Tensor, token_indices: torch.Tensor) -> torch.Tensor | None:
        """Return float32 logits [len(token_indices), vocab_size] on rank 0, else None; valid until the next call.

        Args:
            hidden: [num_tokens, hidden_size].
            token_indices: int64, the tokens of ``hidden`` whose logits are wanted.
        """
        gathered = self.parallel.gather_columns(self._compute_own_logits(gather_rows(hidden, token_indices)))
        return None if gathered is None else gathered[:, : self.config.vocab_size]

    def _compute_own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the vocabulary, [num_tokens, own part]."""
        num_tokens = hidden.shape[0]
        if self._logits.shape[0] < num_tokens:
            self._logits = torch.empty(num_tokens, self.lm_head.out_features)
        config = self.config
        logits(self._logits, hidden, self.norm, config.rms_norm_eps, self.lm_head, self._scratch, config.logits_softcap)
        return self._logits[:num_tokens]

    # --- speed --------------------------------------------------------------------------------------------------

    @cached_property
    def free_tokens(self) -> int:
        """Tokens that a step computes in about the time of one, because reading the weights takes longer.

        Measured once, on the head: the largest weights except experts', as small ones would come from the processor's
        caches. Each further token needs other experts, whose weights are read as well. So the experts of some layers
        are measured too, with random tokens, which are spread over many experts.
        """
        few, many = (self._seconds_of_weights(num_tokens) for num_tokens in (1, _MANY_TOKENS))
        return min(max(round(_MANY_TOKENS * few / many), 1), _MOST_FREE_TOKENS)

    def _seconds_of_weights(self, num_tokens: int) -> float:
        """Return about how long the products with all weights take; those with the head suffice without experts."""
        hidden = torch.randn(num_tokens, self.config.hidden_size, generator=torch.Generator().manual_seed(0))
        seconds = _fastest(lambda: self._compute_own_logits(hidden))
        sparse = [layer.experts for layer in self.layers if layer.experts is not None]
        if not sparse:
            return seconds
        num_dense_bytes = self.num_bytes - sum(layer_experts.num_bytes for layer_experts in sparse)
        measured, norm = sparse[:_LAYERS_MEASURED], torch.ones(self.config.hidden_size)

        def compute_experts() -> None:
            for layer_experts in measured:
                experts(hidden, layer_experts, norm, self.config.rms_norm_eps)

        of_experts = _fastest(compute_experts) * len(sparse) / len(measured)
        return seconds * num_dense_bytes / self.lm_head.num_bytes + of_experts


def _fastest(compute: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several runs, because disturbances only make them longer."""
    times = []
    for _ in range(_TIMES_MEASURED):
        started = perf_counter()
        compute()
        times.append(perf_counter() - started)
    return min(times)


def _scratch(config: ModelConfig, layers: list[PackedLayer], kinds: set[WeightKind], dtype: torch.dtype) -> Scratch:
    """Return scratch memory for the widest layers of a rank's share."""
    hidden, attention_width = config.hidden_size, config.num_heads * max(config.head_dims, default=0)
    latents = [layer.latent.sizes for layer in layers if layer.latent is not None]
    of_latents = [config.num_heads * max(sizes.nope_dim + sizes.rope_dim, sizes.value_dim) for sizes in latents]
    widest_mlp = max(layer.intermediate_size for layer in layers)
    recurrent = [layer.recurrent.sizes for layer in layers if layer.recurrent is not None]
    laurel_rank = 0 if config.altup is None else config.altup.laurel_rank
    with_cutoffs = [layer.intermediate_size for layer in layers if layer.c_layer.num_gates]
    mixed_width = max(
        hidden if any(layer.has_dense_and_experts for layer in layers) else 0,
        *with_cutoffs,
        *(sizes.inner_size for sizes in recurrent),
        *(sizes.query_rank or 0 for sizes in latents),
        0,
    )
    return Scratch(
        *kinds,
        width=max(
            hidden,
            attention_width,
            widest_mlp,
            mixed_width,
            config.per_layer_width,
            laurel_rank,
            *(layer.qkv.in_features for layer in layers),
            *of_latents,
        ),
        outputs=max(
            hidden,
            widest_mlp,
            config.per_layer_width,
            laurel_rank,
            *(2 * width for width in with_cutoffs),
            *(layer.qkv.out_features for layer in layers),
            *(sizes.row_width for sizes in recurrent),
            *of_latents,
        ),
        attention_width=max([attention_width, *(config.num_heads * sizes.cached_dim for sizes in latents)]),
        cache_dtype=dtype,
        mixed_width=mixed_width,
    )
