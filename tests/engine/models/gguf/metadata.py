"""GGUF files with the metadata of a model and an embedding, and no other weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

__all__ = ["write_metadata"]


def write_metadata(
    path: Path,
    architecture: str,
    *,
    layers: int = 1,
    key_length: int = 64,
    add: Callable[[Any], None] = lambda writer: None,
    **others: Any,
) -> None:
    """Write a file.

    Args:
        path: of the file.
        architecture: as llama.cpp names it.
        layers: their number.
        key_length: elements of a head.
        add: called with the writer.
        others: metadata of the architecture by key; None leaves a key out.
    """
    writer = gguf.GGUFWriter(path, architecture)
    numbers = {
        "block_count": layers, "context_length": 128, "embedding_length": 256, "feed_forward_length": 64,
        "attention.head_count": 2, "attention.head_count_kv": 1, "attention.key_length": key_length,
        "attention.value_length": key_length, "attention.sliding_window": 16,
    } | others  # fmt: skip
    for key, value in numbers.items():
        if value is None:
            continue
        method = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        method[type(value)](f"{architecture}.{key}", value)
    writer.add_layer_norm_rms_eps(1e-6)
    add(writer)
    writer.add_tensor("token_embd.weight", np.zeros((6, 256), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
