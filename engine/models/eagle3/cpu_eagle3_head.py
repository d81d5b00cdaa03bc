"""CpuEagle3Head: an EAGLE-3 head, computed by the C kernels on packed weights.

Of token t at position p it reads the embedding e, and a state h of the token before it. That is a projection of the
model's hidden states before some of its layers, a low, a middle and a high one; or, where these are not known yet, the
output for that token:

    h = fc(concat(hidden states))
    attention(concat(input_layernorm(e), hidden_norm(h))) + h  ->  feed-forward  ->  output  ->  norm  ->  lm_head

The head has a vocabulary of its own, a part of the model's.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from engine.models.checkpoint.stored_parts import EMBEDDING, HEAD
from engine.models.decoder.coded_plan import CodedPlan
from engine.models.decoder.cpu_decoder import CpuDecoder
from engine.models.decoder.forward_context import ForwardContext
from engine.models.eagle3.eagle3_config import Eagle3Config
from engine.models.mtp.hidden_state_head import HiddenStateHead
from engine.models.tensor_parallel import TensorParallel
from kernels.coded_weight import Weight
from kernels.cpu.coded_linear import packed_linear
from kernels.cpu.gather import gather_rows
from kernels.cpu.linear import PackedLinear, WeightKind, linear

__all__ = ["CpuEagle3Head", "own_shapes"]

_LAYER = "layers.0."


def own_shapes(config: Eagle3Config, num_aux: int) -> dict[str, list[int]]:
    """Return the shapes of a head's parameters that a decoder of one layer lacks, or has in another shape, by name."""
    shape, width = config.shape, config.target_hidden_size
    qkv = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    shapes = {
        f"{_LAYER}self_attn.qkv_proj.weight": [qkv, 2 * shape.hidden_size],
        f"{_LAYER}hidden_norm.weight": [shape.hidden_size],
        "fc.weight": [shape.hidden_size, num_aux * width],
        HEAD: [config.draft_vocab_size, shape.hidden_size],
    }
    if config.norm_before_fc:
        shapes["input_norm.weight"] = [num_aux * width]
    if config.has_layer_norms:
        shapes |= {f"fc_norm.{index}.weight": [width] for index in range(num_aux)}
    return shapes


class CpuEagle3Head(HiddenStateHead):
    """A head, which shares the embedding with the model ``target`` unless it gets its own.

    Args:
        target: the model for which it drafts.
        config: of the head.
        rope: the tables of its layer.
        num_aux: how many of a token's hidden states it reads.
        dtype: of the KV cache.
        kind: the type of the linear layers' packed weights.
        plan: which weights stay codes; not that of ``fc``.
    """

    def __init__(
        self,
        target: CpuDecoder,
        config: Eagle3Config,
        rope: list[torch.Tensor],
        num_aux: int,
        dtype: torch.dtype,
        kind: WeightKind,
        plan: CodedPlan,
    ) -> None:
        size = config.shape.hidden_size
        head = packed_linear(kind, size, config.draft_vocab_size, sections=plan.sections.get(HEAD))
        parallel = TensorParallel()
        super().__init__(
            target.embed_tokens, config.shape, rope, parallel, dtype, kind, plan, head, mixer_inputs=2 * size
        )
        self._target, self._options, self._num_aux = target, config, num_aux
        self._fc = PackedLinear(kind, num_aux * config.target_hidden_size, size)
        self._norms: dict[str, torch.Tensor] = {}
        self._embedding: torch.Tensor | None = None
        self._token_ids: torch.Tensor | None = None

    def set_weight(self, name: str, weight: Weight) -> None:
        """Set one parameter, by its name in decoder.py's Decoder or in `own_shapes`."""
        of_head = (f"{_LAYER}input_layernorm.weight", f"{_LAYER}hidden_norm.weight", "input_norm.weight")
        if name == EMBEDDING:
            assert isinstance(weight, torch.Tensor)
            self._embedding = weight
        elif name == "fc.weight":
            self._fc.set_weight(weight)
        elif name in of_head or name.startswith("fc_norm."):
            assert isinstance(weight, torch.Tensor)
            self._norms[name.removeprefix(_LAYER).removesuffix(".weight")] = self._norm_weight(weight)
        else:
            super().set_weight(name, weight)

    def set_token_ids(self, token_ids: torch.Tensor) -> None:
        """Set the model's id of each token of the head's vocabulary, int64 [draft_vocab_size]; else they are equal."""
        self._token_ids = token_ids

    @property
    def num_loaded_bytes(self) -> int:
        """Bytes of all of its weights; ``num_bytes`` are those that a pass reads."""
        return self.num_bytes + self._fc.num_bytes

    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the state of each token, float32 [num_tokens, hidden_size].

        Args:
            hidden: the model's hidden states of one token side by side, [num_tokens, num_aux * target_hidden_size].
        """
        if self._options.norm_before_fc:
            hidden = self._normed("input_norm", hidden)
        if self._options.has_layer_norms:
            parts = enumerate(hidden.chunk(self._num_aux, dim=1))
            hidden = torch.cat([self._normed(f"fc_norm.{index}", part) for index, part in parts], dim=1)
        return linear(hidden, self._fc)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of the model's token ids as they are stored, without the model's factor."""
        if self._embedding is None:
            return self._target.stored_embeddings(token_ids)
        return gather_rows(self._embedding, token_ids)

    def predict(
        self, token_ids: torch.Tensor, hidden_states: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """See HiddenStateHead."""
        states = hidden_states.float()
        normed = self._normed("hidden_norm", states)
        mixer_input = torch.cat((self._normed("input_layernorm", self.embed(token_ids)), normed), dim=1)
        stream = normed if self._options.norm_before_residual else states.clone()
        return self.compute(stream, token_ids, positions, context, mixer_input)

    def next_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output, before its last norm unless the head was trained otherwise."""
        return self.normed(hidden) if self._options.norm_output else hidden

    def compute_logits(self, hidden: torch.Tensor, token_indices: torch.Tensor) -> torch.Tensor | None:
        """Return logits of the model's vocabulary: tokens that the head lacks have -inf."""
        logits = super().compute_logits(hidden, token_indices)
        assert logits is not None
        if self._token_ids is None:
            return logits
        spread = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        return spread.index_copy_(1, self._token_ids, logits)

    def _normed(self, name: str, values: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(values, values.shape[-1:], self._norms[name], self.config.rms_norm_eps)
