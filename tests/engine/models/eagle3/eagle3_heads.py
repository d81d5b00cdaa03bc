"""Tiny EAGLE-3 heads, stored as published ones are, and what they compute: the oracle's torch, without a cache."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from tests.engine.checkpoints import build_model, save_checkpoint

HEADS, HEAD_DIM = 6, 16


@dataclass(frozen=True)
class HeadForm:
    """A head and its model.

    Attributes:
        family: of the model.
        options: of the model.
        layers: what the head reads, as the config names it; None: it names nothing.
        read: the same as indices of layers.
        is_speculators: it is stored as speculators do, else as EAGLE.
        hidden_size: of the head.
        layer: further fields of the layer's config.
        fields: further fields of the head's config.
        has_own_embedding: the checkpoint has one.
        part: of the vocabulary that the head drafts.
    """

    family: str = "llama"
    options: dict[str, Any] = field(default_factory=lambda: {"num_hidden_layers": 8})
    layers: dict[str, Any] = field(default_factory=dict)
    read: tuple[int, ...] = (2, 4, 5)
    is_speculators: bool = False
    hidden_size: int = 96
    layer: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    has_own_embedding: bool = False
    part: float = 0.75


_IDS = "eagle_aux_hidden_state_layer_ids"
HEAD_FORMS = {
    "eagle": HeadForm(),
    "two layers": HeadForm(options={"num_hidden_layers": 2}, layers={_IDS: [0, 1, 2]}, read=(0, 1, 2), part=0.95),
    "speculators": HeadForm(
        "qwen3",
        {"num_hidden_layers": 4},
        {_IDS: [0, 1, 4]},
        (0, 1, 4),
        is_speculators=True,
        layer={"model_type": "qwen3"},
        fields={"norm_before_residual": True, "norm_before_fc": True},
        has_own_embedding=True,
    ),
    "another width": HeadForm(
        "qwen2",
        {"num_hidden_layers": 3, "use_sliding_window": False},
        {"eagle_config": {_IDS: [0, 2]}},
        (1, 3),
        hidden_size=48,
        fields={"fc_norm": True, "norm_output": True, "target_hidden_size": 96},
        has_own_embedding=True,
        part=1.0,
    ),
}


class Eagle3Oracle:
    """A model with a head, both computed without a cache.

    Attributes:
        model: of transformers.
        weights: of the head, by their names in EAGLE's checkpoints.
        token_ids: the model's id of each token that the head can draft.
    """

    def __init__(self, form: HeadForm = HEAD_FORMS["eagle"], **options: Any) -> None:
        self.form, self.model = form, build_model(form.family, **form.options | options)
        config = self.model.config
        self.config: dict[str, Any] = {
            "model_type": "llama",
            "hidden_size": form.hidden_size,
            "intermediate_size": 104,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "head_dim": HEAD_DIM,
            "num_hidden_layers": 1,
            "vocab_size": config.vocab_size,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500.0,
            "hidden_act": "silu",
            "attention_bias": form.layer.get("model_type") != "qwen3",
            **form.layer,
        }
        generator = torch.Generator().manual_seed(2)
        count = round(config.vocab_size * form.part)
        self.token_ids = torch.randperm(config.vocab_size, generator=generator)[:count].sort().values
        self.weights = self._random_weights(generator, count)

    def _random_weights(self, generator: torch.Generator, draft_vocab: int) -> dict[str, torch.Tensor]:
        size, width, own = self.form.hidden_size, self.model.config.hidden_size, HEADS * HEAD_DIM
        num_aux = len(self.form.read)
        matrices = {
            "fc": (size, num_aux * width),
            "lm_head": (draft_vocab, size),
            **{f"midlayer.self_attn.{name}_proj": (own, 2 * size) for name in "qkv"},
            "midlayer.self_attn.o_proj": (size, own),
            "midlayer.mlp.gate_proj": (104, size),
            "midlayer.mlp.up_proj": (104, size),
            "midlayer.mlp.down_proj": (size, 104),
        }
        norms = {"norm": size} | {f"midlayer.{name}": size for name in ("input_layernorm", "hidden_norm")}
        norms["midlayer.post_attention_layernorm"] = size
        if self.form.fields.get("norm_before_fc"):
            norms["input_norm"] = num_aux * width
        if self.form.fields.get("fc_norm"):
            norms |= {f"fc_norm.{index}": width for index in range(num_aux)}
        if self.config["model_type"] == "qwen3":
            norms |= {f"midlayer.self_attn.{name}_norm": HEAD_DIM for name in "qk"}
        biases = {f"midlayer.self_attn.{name}_proj": own for name in "qkv"} | {"midlayer.self_attn.o_proj": size}
        if not self.config["attention_bias"]:
            biases = {}
        normal = partial(torch.randn, generator=generator)
        weights = {f"{name}.weight": 0.15 * normal(shape) for name, shape in matrices.items()}
        weights |= {f"{name}.weight": 0.5 + torch.rand(count, generator=generator) for name, count in norms.items()}
        weights |= {f"{name}.bias": 0.3 * normal(count) for name, count in biases.items()}
        if self.form.has_own_embedding:
            weights["embed_tokens.weight"] = normal(self.model.config.vocab_size, size)
        return weights

    @torch.no_grad()
    def let_agree(self) -> None:
        """Let drafts be right often, but not always.

        The embedding of the last token decides nearly alone about the next one, in the model and in the head, whose
        queries attend to their own position.
        """
        for name, parameter in self.model.named_parameters():
            if "o_proj." in name or "down_proj." in name:
                parameter *= 0.05
        embedding, size = self.model.get_input_embeddings().weight, self.form.hidden_size
        embedding /= embedding.square().mean(dim=1, keepdim=True).sqrt().clamp(min=1e-6)
        own, layer = self.weights, "midlayer."
        for name in ("fc.weight", f"{layer}mlp.down_proj.weight"):
            own[name] *= 0.05
        for name in "qk":
            own[f"{layer}self_attn.{name}_proj.weight"] *= 0.05
            of_heads = own[f"{layer}self_attn.{name}_proj.bias"].fill_(0.0).view(HEADS, 2, HEAD_DIM // 2)
            of_heads[:, :, :3] = 6.0  # those that RoPE rotates most
        own[f"{layer}self_attn.v_proj.weight"] = torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1)
        own[f"{layer}self_attn.o_proj.weight"] = torch.eye(size)
        for name in "vo":
            own[f"{layer}self_attn.{name}_proj.bias"].fill_(0.0)
        own[f"{layer}input_layernorm.weight"].fill_(1.0)
        own["norm.weight"] = self.model.model.norm.weight.detach().clone()
        own["lm_head.weight"] = self.model.lm_head.weight.detach()[self.token_ids].clone()

    # --- what it computes -------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def draft_logits(self, token_ids: list[int], num_drafted: int) -> torch.Tensor:
        """Return the logits from which the next draft token is chosen, [vocab_size].

        Args:
            token_ids: of the sequence, the draft so far included.
            num_drafted: how many of these are the draft.
        """
        states = self._states(token_ids[: len(token_ids) - num_drafted])[:-1]
        for count in range(num_drafted + 1):
            tokens = torch.tensor(token_ids[1 : len(states) + 1])
            output = self._layer(tokens, states)[-1:]
            if count < num_drafted:
                next_state = self._norm("norm", output) if self.form.fields.get("norm_output") else output
                states = torch.cat((states, next_state))
        logits = torch.full((self.model.config.vocab_size,), -torch.inf)
        logits[self.token_ids] = (self._norm("norm", output) @ self.weights["lm_head.weight"].T)[0]
        return logits

    def _states(self, token_ids: list[int]) -> torch.Tensor:
        """Return what the head reads of the model after each token, [num_tokens, hidden_size]."""
        inputs: list[torch.Tensor] = []
        modules = [*self.model.model.layers, self.model.model.norm]  # the norm reads what the last layer gives

        def keep(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs.append((args[0] if args else kwargs["hidden_states"])[0])

        hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in modules]
        self.model.model(torch.tensor([token_ids]))
        for hook in hooks:
            hook.remove()
        read = [inputs[layer] for layer in self.form.read]
        if self.form.fields.get("fc_norm"):
            read = [self._norm(f"fc_norm.{index}", part) for index, part in enumerate(read)]
        hidden = torch.cat(read, dim=1)
        if self.form.fields.get("norm_before_fc"):
            hidden = self._norm("input_norm", hidden)
        return hidden @ self.weights["fc.weight"].T

    def _layer(self, token_ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the layer's output for tokens, each with the state of the token before it."""
        table = self.weights.get("embed_tokens.weight", self.model.get_input_embeddings().weight)
        normed = self._norm("midlayer.hidden_norm", states)
        attended = self._attention(torch.cat((self._norm("midlayer.input_layernorm", table[token_ids]), normed), dim=1))
        stream = attended + (normed if self.form.fields.get("norm_before_residual") else states)
        inner = self._norm("midlayer.post_attention_layernorm", stream)
        gate, up = (self._linear(f"mlp.{name}_proj", inner) for name in ("gate", "up"))
        return stream + self._linear("mlp.down_proj", F.silu(gate) * up)

    def _attention(self, inputs: torch.Tensor) -> torch.Tensor:
        count = len(inputs)
        query, key, value = (
            self._linear(f"self_attn.{name}_proj", inputs).view(count, HEADS, HEAD_DIM) for name in "qkv"
        )
        if self.config["model_type"] == "qwen3":
            query = self._norm("midlayer.self_attn.q_norm", query)
            key = self._norm("midlayer.self_attn.k_norm", key)
        fields = {name: self.config[name] for name in ("rope_theta", "head_dim", "hidden_size", "num_attention_heads")}
        rotary = LlamaRotaryEmbedding(LlamaConfig(**fields))
        cos, sin = rotary(inputs[None], torch.arange(count)[None])
        query, key = apply_rotary_pos_emb(query[None], key[None], cos, sin, unsqueeze_dim=2)
        query, key, value = (part.view(count, HEADS, HEAD_DIM).transpose(0, 1) for part in (query, key, value))
        attended = F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True)[0]
        return self._linear("self_attn.o_proj", attended.transpose(0, 1).reshape(count, -1))

    def _linear(self, name: str, values: torch.Tensor) -> torch.Tensor:
        bias = self.weights.get(f"midlayer.{name}.bias")
        return F.linear(values, self.weights[f"midlayer.{name}.weight"], bias)

    def _norm(self, name: str, values: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(values, values.shape[-1:], self.weights[f"{name}.weight"], self.config["rms_norm_eps"])

    # --- files ------------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> str:
        """Save the model, and the head in a directory of its own; return the model's path."""
        saved = save_checkpoint(self.model, path)
        head = Path(self.head_path(saved))
        head.mkdir()
        (head / "config.json").write_text(json.dumps(self.head_config()))
        save_file(self.head_tensors(), head / "model.safetensors", {"format": "pt"})
        return saved

    def head_path(self, saved: str) -> str:
        """Return where the head of a saved model is."""
        return f"{saved}/head"

    def speculation(self, saved: str, num_tokens: int) -> dict[str, Any]:
        """Return the options of an engine of a saved model."""
        return {"method": "eagle3", "model": self.head_path(saved), "num_speculative_tokens": num_tokens}

    def head_config(self) -> dict[str, Any]:
        """Return the head's config.json."""
        of_head = {**self.form.layers, **self.form.fields, "draft_vocab_size": len(self.token_ids)}
        if not self.form.is_speculators:
            return {"architectures": ["LlamaForCausalLMEagle3"], **self.config, **of_head}
        names = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
        return {**names, "transformer_layer_config": self.config, **of_head}

    def head_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the head's checkpoint."""
        layer = "layers.0." if self.form.is_speculators else "midlayer."
        tensors = {name.replace("midlayer.", layer): weight.contiguous() for name, weight in self.weights.items()}
        if self.form.part < 1:
            is_drafted = torch.zeros(self.model.config.vocab_size, dtype=torch.bool)
            is_drafted[self.token_ids] = True
            tensors |= {"d2t": self.token_ids - torch.arange(len(self.token_ids)), "t2d": is_drafted}
        return tensors
