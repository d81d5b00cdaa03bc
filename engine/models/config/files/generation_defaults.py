"""GenerationDefaults: how a checkpoint's answers end and are sampled, unless a request says otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelLoadError, RequestError
from engine.models.config.files.json_file import read_json
from engine.models.config.files.tokenizer_eos import tokenizer_eos_id
from engine.models.gguf.config import gguf_generation_config
from engine.models.gguf.file import is_gguf, open_gguf
from engine.sampling_params import SamplingParams

__all__ = ["GenerationDefaults"]


@dataclass(frozen=True)
class GenerationDefaults:
    """How answers end and are sampled, as generation_config.json (or else config.json) has it, and the tokenizer."""

    eos_token_ids: tuple[int, ...]
    sampling: dict[str, Any]

    @classmethod
    def load(cls, path: str | Path, hf_config: Any, *, with_tokenizer: bool = False) -> GenerationDefaults:
        """Read the EOS ids, one or many, and the sampling defaults (temperature, top_p, top_k, min_p).

        Args:
            path: the checkpoint's directory.
            hf_config: its config.json, as transformers reads it.
            with_tokenizer: whether the tokenizer's EOS token ends answers, too. One without a logit is ignored.

        Raises:
            ModelLoadError: if the file is malformed, an id is outside the vocabulary or a default out of range.
        """
        file = Path(path) if is_gguf(path) else Path(path) / "generation_config.json"
        raw = _generation_config(file) if file.is_file() else {}
        eos = raw.get("eos_token_id")
        eos = hf_config.eos_token_id if eos is None else eos
        ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < hf_config.vocab_size:
                raise ModelLoadError(
                    f"eos_token_id {token_id!r} of '{path}' is outside the vocabulary of {hf_config.vocab_size}; "
                    "correct its generation_config.json or config.json"
                )
        extra = tokenizer_eos_id(path) if with_tokenizer else None
        if extra is not None and extra not in ids and extra < hf_config.vocab_size:
            ids = (*ids, extra)
        sampling = {key: raw[key] for key in ("temperature", "top_p", "top_k", "min_p") if raw.get(key) is not None}
        if raw.get("do_sample") is False:
            sampling = {"temperature": 0.0}
        if isinstance(sampling.get("top_k"), float) and sampling["top_k"].is_integer():
            sampling["top_k"] = int(sampling["top_k"])
        try:
            SamplingParams(**sampling)
        except RequestError as error:
            raise ModelLoadError(f"'{file}' sets defaults that are not valid: {error}") from error
        return cls(ids, sampling)


def _generation_config(file: Path) -> dict[str, Any]:
    return gguf_generation_config(open_gguf(file)) if is_gguf(file) else read_json(file)
