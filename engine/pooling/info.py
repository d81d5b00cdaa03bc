"""PoolingInfo: what a pooling engine serves, as its front end needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["PairTemplate", "PoolingInfo", "PoolingTask"]

PoolingTask = Literal["embed", "score"]


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """The text around a query and a document. Its special tokens count; those spelled out in the texts do not."""

    prefix: str
    pair: str  # with {instruction}, {query} and {document}
    suffix: str
    instruction: str  # if the request gives none


@dataclass(frozen=True, slots=True)
class PoolingInfo:
    """What a pooling engine serves. It pickles.

    Attributes:
        task: as configured.
        dimensions: length of a vector; for ``score``, the number of scores of a text or a pair.
        pooling_type: how hidden states become one vector, as the log and /server_info say it.
        normalize: whether vectors have the length 1.
        matryoshka: the lengths to which a client may cut a vector; empty: none.
        prompts: texts that are put before an input, by their names.
        default_prompt: name of the one that is put before inputs whose request names none.
        template: the text around the pair of a reranker that is a language model; None: the tokenizer joins pairs.
        labels: names of the classes, in the order of the scores.
        has_token_types: whether the model tells the two texts of a pair apart.
    """

    task: PoolingTask
    dimensions: int
    pooling_type: str = ""
    normalize: bool = False
    matryoshka: tuple[int, ...] = ()
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str | None = None
    template: PairTemplate | None = None
    labels: tuple[str, ...] = ()
    has_token_types: bool = False
