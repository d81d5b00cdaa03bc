"""model_digest: what the KV of a text depends on beside its tokens, as one value that survives a restart.

Two fine-tuned models have files of the same names, sizes and headers. So the digest is that of the weights' content,
which takes about 0.1 s for each GiB that the page cache has (XXH3). It also covers the model's configuration, the
options that change what is computed, and the name of the model, from which routers derive the hashes of blocks.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from hashlib import blake2b
from itertools import chain
from pathlib import Path

from xxhash import xxh3_128

from engine.config import EngineConfig, EngineInfo

__all__ = ["model_digest"]

_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
_CONFIGS = ("config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json")
_CHUNK = 16 * 2**20


def model_digest(config: EngineConfig, info: EngineInfo) -> bytes:
    """Return 16 bytes; engines with equal ones compute the same keys, values and states for the same tokens.

    Args:
        config: the engine's options.
        info: the model, with what ``auto`` options were resolved to.
    """
    digest = blake2b(digest_size=16)
    options = (
        info.model,
        info.dtype,
        info.kv_cache_dtype,
        info.device.partition(":")[0],
        info.attention_backend,
        info.max_model_len,  # by which some models scale their positions
        config.quantization,
        config.model_impl,
    )
    digest.update(repr(options).encode())
    models = [config.model]
    if config.speculation is not None and config.speculation.model is not None:
        models.append(config.speculation.model)  # its keys and values are in the same pages
        digest.update(repr(config.speculation.quantization).encode())
    if config.speculation is not None and config.speculation.method == "mtp":
        digest.update(b"mtp")  # likewise
    for path in chain.from_iterable(_files(Path(model)) for model in models):
        digest.update(f"{path.name}:{path.stat().st_size}:".encode())
        digest.update(_content_hash(path))
    return digest.digest()


def _files(model: Path) -> Iterator[Path]:
    """Yield the files that the model's keys and values depend on."""
    if model.is_file():
        yield model
    elif model.is_dir():
        for path in sorted(model.iterdir()):
            if path.is_file() and (path.suffix in _WEIGHTS or path.name in _CONFIGS):
                yield path


def _content_hash(path: Path) -> bytes:
    content = xxh3_128()
    with path.open("rb") as file:
        if path.stat().st_size:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
                for start in range(0, len(view), _CHUNK):
                    with view[start : start + _CHUNK] as chunk:
                        content.update(chunk)
    return content.digest()
