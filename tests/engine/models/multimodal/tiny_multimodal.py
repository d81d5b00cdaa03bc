"""TinyMultimodal: what one published kind of multimodal checkpoint is like, and a tiny random model of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel

from engine.models.config.families.architectures import MODEL_TYPES, PROVEN
from engine.models.config.families.table import ARCHITECTURES, Family
from engine.models.config.files.text_parts import TEXT_ARCHITECTURES
from tests.engine.models.adapter.tiny_models import VOCAB_SIZE, WINDOW

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MISTRAL = TEXT | {"model_type": "mistral", "head_dim": 16, "rope_theta": 1e5, "sliding_window": None}
YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "llama_4_scaling_beta": 0.5,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": []}
GATED_DELTA: dict[str, Any] = {
    "head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "full_attention_interval": 2,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
        "rope_type": "default",
        "rope_theta": 1e5,
        "partial_rotary_factor": 0.25,
    },
}
LATENT: dict[str, Any] = TEXT | {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
PLAIN_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
SIGLIP = PLAIN_VISION | {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14}
CLIP = SIGLIP | {"model_type": "clip_vision_model", "projection_dim": 8}
PIXTRAL = PLAIN_VISION | {"model_type": "pixtral", "head_dim": 8, "image_size": 28, "patch_size": 14}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
GEMMA4: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "use_bidirectional_attention": "vision",
    "final_logit_softcapping": 30.0,
    "eos_token_id": 1,
}
GEMMA4_TOKENS = {"image_token_id": 258880, "video_token_id": 258884, "audio_token_id": 258881, "eos_token_id": [1, 106]}
IMAGE_TOKENS = {"image_token_id": 110, "video_token_id": 111, "vision_start_token_id": 112, "vision_end_token_id": 113}


@dataclass(frozen=True)
class TinyMultimodal:
    """One published kind of checkpoint.

    Attributes:
        published: names of checkpoints of this kind.
        architecture, model_type: of the whole model.
        text: the fields of its text part.
        others: the other fields of config.json, with the towers.
        names: some of the tensors' names in the published files.
        vision_prefix: what published names of the vision tower begin with, where transformers has ``vision_tower.``.
        is_flat: the fields of the text part are at the top.
        published_as: the architecture in published files, where it is another name.
        experts_are_turned: stacked experts are stored as [num_experts, inputs, outputs].
        generates_with: the module that is compared: the whole class, or its text part where that fails without images.
    """

    published: str
    architecture: str
    model_type: str
    text: dict[str, Any]
    others: dict[str, Any]
    names: tuple[str, ...]
    vision_prefix: str = "vision_tower."
    is_flat: bool = False
    experts_are_turned: bool = False
    published_as: str | None = None
    generates_with: str = ""

    @property
    def text_type(self) -> str:
        """The model type of the text part."""
        model_type = str(self.text.get("model_type", f"{self.model_type}_text"))
        return MODEL_TYPES.get(model_type, model_type)

    @property
    def has_states(self) -> bool:
        """Whether the text part has recurrent layers, which only our own decoder computes."""
        return ARCHITECTURES.get(TEXT_ARCHITECTURES[self.text_type], Family()).recurrent is not None

    @property
    def implementations(self) -> tuple[str, ...]:
        """The values of model_impl that serve it, one for each implementation."""
        return ("auto", "transformers") if TEXT_ARCHITECTURES[self.text_type] in PROVEN else ("auto",)

    @property
    def config_json(self) -> dict[str, Any]:
        """The fields of config.json."""
        fields = self.text if self.is_flat else {"text_config": self.text}
        return (
            {
                "architectures": [self.published_as or self.architecture],
                "model_type": self.model_type,
                "dtype": "float32",
            }
            | self.others
            | fields
        )

    def build(self) -> PreTrainedModel:
        """Return a seeded random float32 model whose attention, biases and norms all matter to its answers."""
        torch.manual_seed(0)
        config = CONFIG_MAPPING[self.model_type].from_dict(self.config_json)
        model: PreTrainedModel = getattr(transformers, self.architecture)(config).eval()
        with torch.no_grad():
            buffers = dict(model.named_buffers())
            for name, parameter in (*model.named_parameters(), *model.named_buffers()):
                kind = name.rpartition(".")[2]
                if kind in ("scale", "per_expert_scale", "layer_scalar"):  # of Gemma 4
                    parameter.uniform_(0.5, 1.5)
                elif name in buffers:
                    continue
                elif parameter.dim() == 1 and name.endswith("weight"):  # a norm
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(0.0, 0.2)
        return model
