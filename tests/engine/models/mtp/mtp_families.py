"""Tiny models with a layer of multi-token prediction (MTP), stored as published ones are.

transformers leaves the layer out when it loads a model. The oracle is its MtpModel, which its own `generate` uses for
some families, on random weights: MtpOracle gives it the options that the configs of other families do not have.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from tests.engine.checkpoints import build_model, save_checkpoint
from tests.engine.models.decoder.latent.latent_families import build_latent_model
from tests.engine.models.decoder.recurrent.recurrent_families import build_recurrent_model

LAST_IS_FULL = {"layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"]}
_QWEN = {"mtp_block.": "layers.0.", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
_QWEN |= {"eh_proj": "fc", "post_norm": "norm"}
_DEEPSEEK = {"mtp_block.": "", "post_norm": "shared_head.norm"}
_MIMO = {"mtp_block.": "", "enorm": "token_layernorm", "hnorm": "hidden_layernorm"}
_MIMO |= {"eh_proj": "input_proj", "post_norm": "final_layernorm"}


@dataclass(frozen=True)
class MtpFamily:
    """How a family is built and stored.

    Attributes:
        build: returns a seeded random model of transformers without the layer.
        prefix: of the layer's names.
        names: what the names of MtpModel begin with, and what published ones have instead.
        has_own_copies: the embedding and the head are stored once more.
        stores_experts_apart: each expert's matrices are tensors of their own.
        options: of MtpModel, which the config lacks.
        fields: of config.json, which transformers does not know.
    """

    build: Callable[[], PreTrainedModel]
    prefix: str
    names: dict[str, str]
    has_own_copies: bool = False
    stores_experts_apart: bool = False
    options: tuple[tuple[str, Any], ...] = (("mtp_layer_types", ["full_attention"]),)
    fields: tuple[tuple[str, Any], ...] = ()


def _mimo() -> PreTrainedModel:
    return build_model("qwen2", use_sliding_window=False)


MTP_FAMILIES: dict[str, MtpFamily] = {
    "qwen3.5": MtpFamily(lambda: build_recurrent_model("qwen3.5", **LAST_IS_FULL), "mtp.", _QWEN),
    "qwen3.5-moe": MtpFamily(lambda: build_recurrent_model("qwen3.5-moe", **LAST_IS_FULL), "mtp.", _QWEN),
    "qwen3-next": MtpFamily(
        lambda: build_recurrent_model("qwen3-next", **LAST_IS_FULL), "mtp.", _QWEN, stores_experts_apart=True
    ),
    "deepseek-v3": MtpFamily(
        lambda: build_latent_model("deepseek-v3"),
        "model.layers.3.",
        _DEEPSEEK,
        has_own_copies=True,
        stores_experts_apart=True,
        options=(),
    ),
    "glm-4.7-flash": MtpFamily(
        lambda: build_latent_model("glm-4.7-flash"),
        "model.layers.3.",
        _DEEPSEEK,
        options=(("mtp_mlp_layer_types", ["sparse"]),),
    ),
    "mimo": MtpFamily(
        _mimo,
        "model.mtp_layers.0.",
        _MIMO,
        options=(("mtp_layer_types", ["full_attention"]), ("mtp_hidden_states_first", True)),
        fields=(("architectures", ["MiMoForCausalLM"]), ("model_type", "mimo")),
    ),
}


class MtpOracle:
    """A model with its layer, computed by transformers without a cache.

    Attributes:
        model: without the layer.
        layer: the layer.
    """

    def __init__(self, family: MtpFamily) -> None:
        self.family, self.model = family, family.build()
        for name, value in (("num_mtp_layers", 1), ("num_nextn_predict_layers", 1), *family.options):
            setattr(self.model.config, name, value)
        torch.manual_seed(1)
        self.layer = MtpModel(self.model, 1).eval()
        self.adds_one = family.prefix == "mtp."
        with torch.no_grad():
            for name, parameter in (*self.layer.named_parameters(), *self.layer.named_buffers()):
                if not name.startswith("layers."):
                    continue
                if "bias" in name:
                    parameter.normal_(0.0, 0.3)
                elif "norm" in name:
                    parameter.uniform_(-0.5, 0.5) if self.adds_one else parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(0.0, 0.15)

    @torch.no_grad()
    def let_agree(self) -> None:
        """Let the layer's drafts be right often, but not always.

        The embedding of the last token decides nearly alone about the next one, in the model and in the layer.
        """
        for name, parameter in (*self.model.named_parameters(), *self.layer.named_parameters()):
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")):
                parameter *= 0.05
        size, embedding = self.model.config.hidden_size, self.model.get_input_embeddings().weight
        embedding /= embedding.square().mean(dim=1, keepdim=True).sqrt().clamp(min=1e-6)
        self.layer.layers[0].enorm.weight.fill_(0.0 if self.adds_one else 1.0)
        self.layer.layers[0].post_norm.weight.copy_(self.model.model.norm.weight)
        projection = self.layer.layers[0].eh_proj.weight
        projection *= 0.05
        own = projection[:, size:] if "mtp_layers" in self.family.prefix else projection[:, :size]
        own += torch.eye(size)

    @torch.inference_mode()
    def draft_logits(self, token_ids: list[int], num_drafted: int) -> torch.Tensor:
        """Return the logits from which the next draft token is chosen, [vocab_size].

        Args:
            token_ids: of the sequence, the draft so far included.
            num_drafted: how many of these are the draft.
        """
        known = torch.tensor([token_ids[: len(token_ids) - num_drafted]])
        hidden = self.model.model(known).last_hidden_state[:, :-1]
        for count in range(num_drafted + 1):
            tokens = torch.tensor([token_ids[1 : known.shape[1] + count]])
            positions = torch.arange(tokens.shape[1])[None]
            output = self.layer.forward_layer(0, hidden, positions, None, input_ids=tokens)
            hidden = torch.cat((hidden, output[:, -1:]), dim=1)
        logits: torch.Tensor = self.model.lm_head(hidden[0, -1])
        return logits

    def save(self, path: Path) -> str:
        """Save the model with its layer as published; return the path."""
        saved, file = save_checkpoint(self.model, path), path / "model.safetensors"
        config = path / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | dict(self.family.fields)))
        weights = load_file(file)
        for name, weight in self.layer.state_dict().items():
            if name.startswith("layers.0."):
                weights |= self._published(name.removeprefix("layers.0."), weight)
        if self.family.has_own_copies:
            weights[f"{self.family.prefix}embed_tokens.weight"] = self.model.get_input_embeddings().weight.clone()
            weights[f"{self.family.prefix}shared_head.head.weight"] = self.model.lm_head.weight.clone()
        save_file({name: weight.contiguous() for name, weight in weights.items()}, file, {"format": "pt"})
        return saved

    def speculation(self, saved: str, num_tokens: int) -> dict[str, Any]:
        """Return the options of an engine of a saved model."""
        return {"method": "mtp", "num_speculative_tokens": num_tokens}

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters of the model and the layer, by their published names; those of no stacked experts."""
        named = dict(self.model.named_parameters())
        for name, parameter in self.layer.named_parameters():
            if name.startswith("layers.0.") and ".experts." not in name:
                (published,) = self._published(name.removeprefix("layers.0."), parameter)
                named[published] = parameter
        return named

    def _published(self, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        own, stored = next((pair for pair in self.family.names.items() if name.startswith(pair[0])), ("", ""))
        name = self.family.prefix + stored + name.removeprefix(own)
        module, experts, matrix = name.rpartition(".experts.")
        if not experts or not self.family.stores_experts_apart:
            return {name: weight}
        parts = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else (matrix,)
        return {
            f"{module}.experts.{expert}.{part}.weight": rows.clone()
            for expert, matrices in enumerate(weight)
            for part, rows in zip(parts, matrices.chunk(len(parts)), strict=True)
        }
