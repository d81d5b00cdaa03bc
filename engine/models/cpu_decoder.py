"""CpuDecoder: the decoder of decoder.py, computed by the C kernels on packed weights.

It computes the same function with the same interface. All layers are one call; tensor-parallel ranks, which have
something to do between the two halves of a layer, make two for each. The residual stream is float32, and so are norms,
rotations and sums, whatever the weights are.
"""

from __future__ import annotations

from functools import cached_property
from time import perf_counter

import torch
from torch import nn

from engine.models.config import ModelConfig
from engine.models.decoder import VocabParallelEmbedding
from engine.models.forward_context import ForwardContext
from engine.models.tensor_parallel import TensorParallel
from kernels.cpu import attention
from kernels.cpu.layer import CLayer, CpuStep, Scratch, all_layers, attention_half, logits, mlp_half
from kernels.cpu.linear import LANES, PackedLinear, WeightKind, has_int8
from kernels.cpu.rows import gather_rows

__all__ = ["CpuDecoder", "can_run"]

_TIMES_MEASURED = 3
_MANY_ROWS = 32  # with so many, computing takes longer than reading weights on any processor
_MOST_FREE = 256


def can_run(config: ModelConfig, dtype: torch.dtype, kind: WeightKind, device: torch.device) -> bool:
    """Return whether the kernels compute this model on this device, and are to be had on this machine."""
    if device.type != "cpu" or not attention.is_supported(dtype, config.head_dim):
        return False
    return kind is not WeightKind.INT8 or has_int8()


class CpuDecoder:
    """A decoder-only language model on a CPU.

    Args:
        embed_tokens: without weights so far.
        config: the whole model's shape.
        rope: cosines and sines of every position it may see, float32 [length, 2, head_dim // 2].
        parallel: which rank's share this is.
        dtype: of the KV cache, float32 or bfloat16.
        kind: how the weights of linear layers are kept.
    """

    def __init__(
        self,
        embed_tokens: VocabParallelEmbedding,
        config: ModelConfig,
        rope: torch.Tensor,
        parallel: TensorParallel,
        dtype: torch.dtype,
        kind: WeightKind,
    ) -> None:
        self.embed_tokens = embed_tokens
        self.config, self.parallel, self.rope = config, parallel, rope.contiguous()
        own = config.shard(parallel.size)
        self.layers = [_Layer(own, index, parallel, dtype, kind) for index in range(config.num_layers)]
        self.norm = torch.empty(0)
        self.lm_head = PackedLinear(kind, config.hidden_size, self.embed_tokens.num_embeddings)
        self._scratch = Scratch(
            kind,
            width=max(config.hidden_size, own.num_heads * own.head_dim, self.layers[0].intermediate_size),
            outputs=max(self.layers[0].qkv.out_features, self.layers[0].intermediate_size),
            attention_width=own.num_heads * own.head_dim,
            cache_dtype=dtype,
        )
        self._logits = torch.empty(0)

    def set_weight(self, name: str, weight: torch.Tensor) -> None:
        """Take one parameter, by its name in decoder.py's Decoder; the tensor is not needed afterwards, but the
        embedding's, which stays as it is."""
        match name.split("."):
            case ["embed_tokens", "weight"]:
                self.embed_tokens.weight = nn.Parameter(weight, requires_grad=False)
            case ["norm", "weight"]:
                self.norm = weight.float().contiguous()
            case ["lm_head", "weight"]:
                self.lm_head.set_weight(weight)
            case ["layers", index, *_, module, kind]:
                self.layers[int(index)].set_weight(module, kind, weight)
            case _:
                raise AssertionError(f"no parameter is called {name}")

    def reserve(self, num_tokens: int) -> None:
        """Have the memory that the layers of a step of ``num_tokens`` compute in, so that none has to wait for it."""
        self._scratch.reserve(num_tokens)

    @property
    def num_bytes(self) -> int:
        """Bytes that the packed weights take."""
        return self.lm_head.num_bytes + sum(layer.num_bytes for layer in self.layers)

    @cached_property
    def free_tokens(self) -> int:
        """Tokens that a step computes in about the time of one: as long as reading the weights takes longer.

        Measured once, on the largest weights there are: what the caches hold would seem to be read in no time.
        """
        few, many = (self._seconds_of_logits(rows) for rows in (1, _MANY_ROWS))
        return min(max(round(_MANY_ROWS * few / many), 1), _MOST_FREE)

    def _seconds_of_logits(self, rows: int) -> float:
        hidden = torch.ones(rows, self.config.hidden_size)
        times = []
        for _ in range(_TIMES_MEASURED):
            started = perf_counter()
            self._compute_own_logits(hidden)
            times.append(perf_counter() - started)
        return min(times)  # whatever disturbs only makes it longer

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Return the hidden states before the last norm, float32 [num_tokens, hidden_size]."""
        hidden = self._embed(token_ids)
        partial = torch.empty_like(hidden) if self.parallel.size > 1 else None
        block_size = context.kv_cache.block_size
        step = CpuStep(hidden, positions, self.rope, context.metadata, block_size, self._scratch, partial)
        if partial is None:
            all_layers([layer.c_layer for layer in self.layers], step, context.kv_cache.layers)
            return hidden
        for layer, (key_cache, value_cache) in zip(self.layers, context.kv_cache.layers, strict=True):
            attention_half(layer.c_layer, step, key_cache, value_cache)
            hidden += self.parallel.all_reduce(partial)
            mlp_half(layer.c_layer, step)
            hidden += self.parallel.all_reduce(partial)
        return hidden

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.parallel.size == 1:
            return gather_rows(self.embed_tokens.weight, token_ids)
        hidden: torch.Tensor = self.embed_tokens(token_ids)  # which also sums what the ranks have
        return hidden.float()

    def compute_logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
        """Return float32 logits [len(rows), vocab_size] of some rows, int64, of the hidden states [any, hidden_size];
        only rank 0 has them.

        They stay valid until the next call.
        """
        gathered = self.parallel.gather_columns(self._compute_own_logits(gather_rows(hidden, rows)))
        return None if gathered is None else gathered[:, : self.config.vocab_size]

    def _compute_own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return this rank's columns."""
        rows = hidden.shape[0]
        if self._logits.shape[0] < rows:
            self._logits = torch.empty(rows, self.lm_head.out_features)
        logits(self._logits, hidden, self.norm, self.config.rms_norm_eps, self.lm_head, self._scratch)
        return self._logits[:rows]


class _Layer:
    """One layer's weights, and the structure that tells the kernels where they are."""

    def __init__(
        self, config: ModelConfig, index: int, parallel: TensorParallel, dtype: torch.dtype, kind: WeightKind
    ) -> None:
        self._config, self._adds_bias = config, parallel.rank == 0  # what ranks compute is summed
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        hidden = config.hidden_size
        self.intermediate_size = -(-config.intermediate_size // LANES) * LANES
        self.qkv = PackedLinear(kind, hidden, (heads + 2 * kv_heads) * head_dim, has_bias=config.qkv_bias)
        self.output = PackedLinear(kind, heads * head_dim, hidden, has_bias=config.output_bias)
        self.gate_up = PackedLinear(kind, hidden, 2 * self.intermediate_size, has_bias=config.mlp_bias)
        self.down = PackedLinear(kind, self.intermediate_size, hidden, has_bias=config.mlp_bias)
        self._norms: dict[str, torch.Tensor] = {}
        self.c_layer = CLayer(
            self.qkv.c_weight,
            self.output.c_weight,
            self.gate_up.c_weight,
            self.down.c_weight,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            hidden_size=hidden,
            intermediate_size=self.intermediate_size,
            sliding_window=config.sliding_windows[index] or 0,
            is_bf16=dtype == torch.bfloat16,
            eps=config.rms_norm_eps,
            scale=head_dim**-0.5,
        )

    @property
    def num_bytes(self) -> int:
        return sum(one.num_bytes for one in (self.qkv, self.output, self.gate_up, self.down))

    def set_weight(self, module: str, kind: str, weight: torch.Tensor) -> None:
        if module in _NORMS:
            self._norms[module] = weight.float().contiguous()  # the structure has its address only
            setattr(self.c_layer, _NORMS[module], self._norms[module].data_ptr())
        elif module == "gate_up_proj":
            for offset, half in enumerate(weight.chunk(2)):
                if kind == "weight":
                    self.gate_up.set_weight(half, every=2, offset=offset)
                else:
                    self.gate_up.set_bias(half, every=2, offset=offset)
        else:
            linear = {"qkv_proj": self.qkv, "o_proj": self.output, "down_proj": self.down}[module]
            if kind == "weight":
                padding = linear.in_features - weight.shape[1]
                linear.set_weight(nn.functional.pad(weight, (0, padding)) if padding else weight)
            elif module == "qkv_proj" or self._adds_bias:
                linear.set_bias(weight)


_NORMS = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "post_attention_norm",
    "q_norm": "query_norm",
    "k_norm": "key_norm",
}
