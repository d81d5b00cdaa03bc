"""PooledCheckpoint: what the files of an embedding model or a reranker say, before any weight is read.

It imports neither torch nor transformers, so that a launcher reports in milliseconds what an engine would refuse.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError, ModelLoadError, shown
from engine.models.config.files.config_json import num_positions, rope_of
from engine.models.config.files.json_file import read_json
from engine.models.config.values.limits import require_plausible
from engine.pooling.architectures import PooledArchitecture, architecture_of
from engine.pooling.config import PoolingConfig
from engine.pooling.info import PairTemplate
from engine.pooling.sentence_transformers import SentenceTransformer, read_sentence_transformer

__all__ = ["PooledCheckpoint"]

logger = logging.getLogger(__name__)

# The text that Qwen3-Reranker's model card puts around a pair; as rerankers the other language models have the same.
_YES_NO = PairTemplate(
    prefix="<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    pair="<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
    suffix="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    instruction="Given a web search query, retrieve relevant passages that answer the query",
)


@dataclass(frozen=True, slots=True)
class PooledCheckpoint:
    """A checkpoint's directory, as an engine with a task reads it.

    Attributes:
        path: the directory.
        config_json: its config.json.
        name: the architecture's.
        architecture: how it is computed.
        sentence: what sentence-transformers' files say.
        max_model_len: longest text in tokens.
        pooling_types: the vectors of a text that are joined.
        normalize: whether vectors have the length 1.
    """

    path: Path
    config_json: dict[str, Any]
    name: str
    architecture: PooledArchitecture
    sentence: SentenceTransformer
    max_model_len: int
    pooling_types: tuple[str, ...]
    normalize: bool

    @classmethod
    def read(cls, engine: EngineConfig, pooling: PoolingConfig) -> PooledCheckpoint:
        """Read the files of ``engine.model``.

        Raises:
            ConfigError: if the directory or its config.json is missing, or an option does not fit the model.
            ModelLoadError: if a file is malformed, or asks for what is not served with the task.
        """
        pooling.check_engine(engine)
        path = Path(engine.model)
        raw = _config_json(path)
        match raw.get("architectures"):
            case [str(name), *_]:
                architecture = architecture_of(name, pooling.task)
            case names:
                raise ModelLoadError(f"config.json of '{path}' has architectures={shown(names)}; name the model's")
        if "auto_map" in raw:
            logger.info("The code of '%s' (auto_map) is not run: %s is computed without it", path, name)
        sentence = read_sentence_transformer(path)
        by_default = ("mean",) if architecture.is_encoder else ("last",)
        types = (pooling.pooling_type,) if pooling.pooling_type else sentence.pooling_types or by_default
        normalize = sentence.normalize if sentence.normalize is not None else not architecture.is_encoder
        return cls(
            path,
            raw,
            name,
            architecture,
            sentence,
            _context_length(engine.max_model_len, raw, architecture, sentence.max_tokens),
            types,
            normalize if pooling.normalize is None else pooling.normalize,
        )

    @property
    def pair_template(self) -> PairTemplate | None:
        """The text around a pair; None if the tokenizer joins pairs."""
        return _YES_NO if self.architecture.answers_yes_or_no else None

    def matryoshka(self, wanted: bool | tuple[int, ...] | None, dimensions: int) -> tuple[int, ...]:
        """Return the lengths to which clients may cut vectors of ``dimensions``; empty: none.

        Args:
            wanted: the option; None takes ``matryoshka_dimensions`` or ``is_matryoshka`` of config.json.

        Raises:
            ConfigError: if a length is not between 1 and ``dimensions``.
        """
        if wanted is None:
            listed = self.config_json.get("matryoshka_dimensions")
            wanted = tuple(listed) if isinstance(listed, list) else bool(self.config_json.get("is_matryoshka"))
        if isinstance(wanted, bool):
            return tuple(range(1, dimensions + 1)) if wanted else ()
        if not all(type(length) is int and 1 <= length <= dimensions for length in wanted):
            raise ConfigError(
                f"has lengths that a vector of {dimensions} cannot be cut to",
                param="matryoshka",
                value=list(wanted),
                remedy=f"give lengths of 1..{dimensions}",
            )
        return tuple(sorted(wanted))


def _config_json(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise ConfigError(f"model '{path}' is not a directory; give the path of a Hugging Face checkpoint")
    file = path / "config.json"
    if not file.is_file():
        raise ConfigError(f"model '{path}' has no config.json; give the directory of a whole checkpoint")
    try:
        raw = read_json(file)
    except OSError as error:
        raise ModelLoadError(f"config.json of '{path}' could not be read: {error}") from error
    if "quantization_config" in raw:
        raise ModelLoadError(f"'{path}' is quantised, which embedding models may not be; give the original checkpoint")
    require_plausible(raw, path)
    return raw


def _context_length(
    requested: int | None, raw: dict[str, Any], architecture: PooledArchitecture, sentence_tokens: int | None
) -> int:
    """Return the longest text in tokens: ``requested``, else as sentence-transformers' files say, else all positions.

    Raises:
        ConfigError: if more is requested than the model has positions.
        ModelLoadError: if config.json does not say how many these are.
    """
    # NomicBERT's older files have GPT-2's names.
    longest = raw.get("max_position_embeddings", raw.get("n_positions"))
    if type(longest) is not int or longest < 1:
        raise ModelLoadError(f"config.json has max_position_embeddings={shown(longest)}; a number is expected")
    positions = num_positions(longest, rope_of(raw))
    if architecture.counts_after_padding:
        padding = raw.get("pad_token_id")
        positions -= (padding if type(padding) is int else 1) + 1
    if requested is not None and requested > positions:
        raise ConfigError(
            f"exceeds the model's {positions} positions", param="max_model_len", value=requested, remedy="lower it"
        )
    return requested or min(positions, sentence_tokens or positions)
