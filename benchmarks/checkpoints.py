"""Writes checkpoints with random weights, so that benchmarks need no download.

    python -m benchmarks.checkpoints DIR                    # the shape of Qwen3-0.6B, bfloat16, 1.2 GB
    python -m benchmarks.checkpoints DIR --shape qwen3-0.13b   # half as wide and deep: to draft for it, 0.27 GB
    python -m benchmarks.checkpoints DIR --shape qwen3-moe-3b  # 80 experts, 8 for each token, 6 GB
    python -m benchmarks.checkpoints DIR --shape qwen3.5-0.8b  # Gated DeltaNet, 1.5 GB
    python -m benchmarks.checkpoints DIR --shape gemma-4-e2b   # shared keys and values, embeddings of layers, 9 GB
    python -m benchmarks.checkpoints DIR --shape glm-4.7-flash-6  # latent attention, 6 of its 47 layers, 7.8 GB
    python -m benchmarks.checkpoints DIR --fp8              # linear layers in FP8, blocks of 128 x 128
    python -m benchmarks.checkpoints DIR --shape tiny       # to try out a benchmark

Weights are N(0, 0.02) with a fixed seed. Speed does not depend on what the weights are; answers are noise. The
tokenizer is a byte-level BPE of 2,048 tokens, learnt from the standard library's source; the rest of the vocabulary
has no text.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

__all__ = ["SHAPES", "keep_layers", "quantize_to_fp8", "write_checkpoint"]

_QWEN3_0_6B: dict[str, Any] = {
    "model_type": "qwen3",
    "rope_theta": 1_000_000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
_NARROW = {  # a draft model of Qwen3-0.6B, with 22% of its bytes
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 14,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
_EXPERTS = {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 384,
    "num_experts": 80,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN3_0_6B,
    "qwen3-0.13b": _QWEN3_0_6B | _NARROW,
    "qwen3-moe-3b": _QWEN3_0_6B | _EXPERTS,
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
    "gemma-4-e2b": {
        "model_type": "gemma4_text",
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 35,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 30.0,
    },
    "glm-4.7-flash-6": {"model_type": "glm4_moe_lite", "num_hidden_layers": 6, "tie_word_embeddings": False},
    "tiny": {
        "model_type": "qwen3",
        "rope_theta": 1_000_000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 2048,
        "max_position_embeddings": 8192,
    },
}
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
LEARNT_TOKENS = 2048
_BLOCK, _LARGEST_E4M3 = 128, 448
SOURCE_FILES = 60  # of the standard library
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_checkpoint(directory: Path, shape: dict[str, Any], *, seed: int = 0) -> int:
    """Write config, safetensors and tokenizer; returns the number of parameters."""
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(**{"rms_norm_eps": 1e-6, "tie_word_embeddings": True, **tokens, **shape})
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
    model.save_pretrained(directory, save_original_format=False)  # experts in stacks: splitting them takes memory
    _tokenizer().save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def quantize_to_fp8(directory: Path) -> None:
    """Quantize the linear layers of a checkpoint, as DeepSeek's and Qwen's FP8 checkpoints are."""
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            weight = tensors[name].float()
            blocks = [band.split(_BLOCK, dim=1) for band in weight.split(_BLOCK)]
            scales = torch.tensor([[float(block.abs().max()) / _LARGEST_E4M3 for block in band] for band in blocks])
            spread = scales.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
            codes = weight / spread[: weight.shape[0], : weight.shape[1]]
            tensors |= {name: codes.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}
        save_file(tensors, file, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK]}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")


def keep_layers(source: str | Path, directory: str | Path, count: int) -> None:
    """Write a checkpoint, of one file, with only its first ``count`` layers, and with its tokenizer."""
    source, directory = Path(source), Path(directory)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = count
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:count]
    shutil.copytree(source, directory, dirs_exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(source / "model.safetensors")
    indices = {name: int(name.split(".layers.")[1].split(".")[0]) for name in tensors if ".layers." in name}
    kept = {name: tensor for name, tensor in tensors.items() if indices.get(name, 0) < count}
    save_file(kept, directory / "model.safetensors", {"format": "pt"})


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=LEARNT_TOKENS,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _texts() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:SOURCE_FILES]:
        yield path.read_text(errors="ignore")


def main(arguments: list[str] | None = None) -> None:
    """Write a checkpoint."""
    parser = argparse.ArgumentParser(description="Write a checkpoint with random weights.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--fp8", action="store_true", help="quantize the linear layers")
    options = parser.parse_args(arguments)
    parameters = write_checkpoint(options.directory, SHAPES[options.shape])
    if options.fp8:
        quantize_to_fp8(options.directory)
    dtype = "FP8" if options.fp8 else "bfloat16"
    print(f"{options.directory}: {options.shape}, {parameters / 1e6:.1f} M parameters, {dtype}, random")


if __name__ == "__main__":
    main()
