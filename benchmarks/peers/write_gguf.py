"""Write a checkpoint of benchmarks.checkpoints as a bf16 GGUF: `PYTHON -m benchmarks.peers.write_gguf DIR MODEL.gguf`.

llama.cpp's own converter knows tokenizers by name and refuses one that it has never seen. PYTHON must have gguf, torch
and safetensors. Qwen3 only.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

__all__ = ["gguf_name", "write_gguf"]

_WHOLE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str | None:
    """Return what a tensor of the checkpoint is called in a GGUF; None for the tied head, which is not stored."""
    if name == "lm_head.weight":
        return None
    if name in _WHOLE:
        return _WHOLE[name]
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    if match is None or match[2] not in _IN_LAYER:
        raise ValueError(f"tensor '{name}' is not in a Qwen3 checkpoint")
    return f"blk.{match[1]}.{_IN_LAYER[match[2]]}.weight"


def write_gguf(directory: Path, out: Path) -> None:
    """Convert config, vocabulary and weights; matrices stay bf16, vectors become float32."""
    import gguf

    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(str(out), "qwen3")
    _add_sizes(writer, config)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    _add_vocabulary(writer, json.loads((directory / "tokenizer.json").read_text(encoding="utf-8")), config)
    _add_weights(writer, directory / "model.safetensors")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: Any, config: dict[str, Any]) -> None:
    writer.add_name("random Qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(float(rope["rope_theta"]))


def _add_vocabulary(writer: Any, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    """Add the learnt tokens, and names without text for the rest of the embedding's rows."""
    import gguf

    texts = {token_id: text for text, token_id in tokenizer["model"]["vocab"].items()}
    special = {token["id"] for token in tokenizer["added_tokens"]}
    size = config["vocab_size"]
    types = [
        gguf.TokenType.UNUSED
        if token_id not in texts
        else gguf.TokenType.CONTROL
        if token_id in special
        else gguf.TokenType.NORMAL
        for token_id in range(size)
    ]
    writer.add_tokenizer_model("gpt2")  # byte-level BPE
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([texts.get(token_id, f"[UNUSED{token_id}]") for token_id in range(size)])
    writer.add_token_types(types)
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def _add_weights(writer: Any, path: Path) -> None:
    import gguf
    import torch
    from safetensors import safe_open

    with safe_open(path, "pt") as checkpoint:
        for name in checkpoint.keys():  # noqa: SIM118  # it is not a dict
            stored, tensor = gguf_name(name), checkpoint.get_tensor(name)
            if stored is None:
                continue
            if tensor.ndim == 1:
                writer.add_tensor(stored, tensor.float().numpy())
            else:  # numpy has no bfloat16: hand over the bytes
                data = tensor.contiguous().view(torch.uint8).numpy()
                writer.add_tensor(stored, data, raw_dtype=gguf.GGMLQuantizationType.BF16)


def main() -> None:
    """Convert a checkpoint."""
    parser = argparse.ArgumentParser(description="Write a Qwen3 checkpoint as a bf16 GGUF.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    write_gguf(options.directory, options.out)
    print(options.out, f"{options.out.stat().st_size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
