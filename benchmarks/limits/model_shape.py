"""The sizes of a decoder-only model that say how much one step reads and computes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.models.config.files.config_json import read_config_json

__all__ = ["WEIGHT_BYTES", "ModelShape"]

WEIGHT_BYTES = 2  # bfloat16


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only model that say how much there is to read and to compute for one token.

    With experts, ``intermediate_size`` is that of the experts that compute a token, all together.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_experts: int = 1
    experts_per_token: int = 1

    @classmethod
    def from_checkpoint(cls, directory: str | Path) -> ModelShape:
        """Read config.json, or the metadata of a GGUF file."""
        config = read_config_json(directory)
        heads = config["num_attention_heads"]
        return cls(
            config["hidden_size"],
            config.get("moe_intermediate_size", config["intermediate_size"]) * config.get("num_experts_per_tok", 1),
            config["num_hidden_layers"],
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or config["hidden_size"] // heads,
            config["vocab_size"],
            config.get("num_experts", 1),
            config.get("num_experts_per_tok", 1),
        )

    @property
    def expert_size(self) -> int:
        """Features of one expert."""
        return self.intermediate_size // self.experts_per_token

    def weights_read(self, num_tokens: int) -> float:
        """Weights of all layers' linears that ``num_tokens`` read, if each chooses its experts at random."""
        share = self.experts_per_token / self.num_experts
        chosen = (1 - (1 - share) ** num_tokens) / share  # as many times those of one token
        feed_forward = self.num_layers * 3 * self.hidden_size * self.intermediate_size
        return self.layer_parameters + (chosen - 1) * feed_forward

    @property
    def layer_linears(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of one layer's four linears: QKV, attention output, gate and up, down."""
        attention = self.num_heads * self.head_dim
        return [
            (attention + 2 * self.num_kv_heads * self.head_dim, self.hidden_size),
            (self.hidden_size, attention),
            (2 * self.intermediate_size, self.hidden_size),
            (self.hidden_size, self.intermediate_size),
        ]

    @property
    def head_parameters(self) -> int:
        """Weights between the last hidden state and the logits; only tokens that are sampled from need them."""
        return self.vocab_size * self.hidden_size

    @property
    def layer_parameters(self) -> int:
        """Weights of all layers' linears."""
        return self.num_layers * sum(outputs * inputs for outputs, inputs in self.layer_linears)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token in all layers, in bfloat16."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * WEIGHT_BYTES
