"""MtpFormat: how a family's checkpoints store a layer that predicts further tokens (multi-token prediction, MTP).

The layer reads a token's embedding and the hidden state after the token before it (DeepSeek-AI, 2024, arXiv 2412.19437,
section 2.2): a projection of both, normalized each, is the input of one more decoder layer, whose output gives the
logits of the token after the next one.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEEPSEEK_MTP", "MIMO_MTP", "QWEN_MTP", "MtpFormat"]


@dataclass(frozen=True)
class MtpFormat:
    """The names of one family's layers, and in what its computation differs.

    Attributes:
        prefix: before the names of all of its weights.
        layer: name of the first such decoder layer; ``{}`` is the number of the model's layers before it.
        embedding_norm, hidden_norm: the norms of the embedding and of the hidden state; ``{}`` is ``layer``.
        projection: of both.
        norm: before the head.
        hidden_first: the projection reads the hidden state before the embedding.
    """

    prefix: str
    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    hidden_first: bool = False

    def layer_name(self, num_layers: int, index: int = 0) -> str:
        """Return the stored name of such a layer of a model of ``num_layers`` others, without ``prefix``."""
        start, _, number = self.layer.format(num_layers).rpartition(".")
        return f"{start}.{int(number) + index}"

    def stored_names(self, num_layers: int) -> dict[str, str]:
        """Return the names of the first layer's modules, by those that our decoder and CpuMtpHead have for them."""
        layer = self.layer_name(num_layers)
        modules = ("embedding_norm", "hidden_norm", "projection", "norm")
        return {"layers.0": layer} | {name: getattr(self, name).format(layer) for name in modules}


QWEN_MTP = MtpFormat(  # Qwen3-Next, Qwen3.5
    prefix="mtp.",
    layer="layers.0",
    embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    projection="fc",
    norm="norm",
)
DEEPSEEK_MTP = MtpFormat(  # DeepSeek V3, GLM-4.7-Flash
    prefix="model.",
    layer="layers.{}",
    embedding_norm="{}.enorm",
    hidden_norm="{}.hnorm",
    projection="{}.eh_proj",
    norm="{}.shared_head.norm",
)
MIMO_MTP = MtpFormat(  # MiMo-7B
    prefix="model.",
    layer="mtp_layers.0",
    embedding_norm="{}.token_layernorm",
    hidden_norm="{}.hidden_layernorm",
    projection="{}.input_proj",
    norm="{}.final_layernorm",
    hidden_first=True,
)
