"""A workshop that damages copies of a tiny checkpoint and tries to serve them.

A damaged checkpoint either serves or fails with an error that names the file and the remedy. No file
and no thread is left open after it.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from engine.errors import PagodaError
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from tests.engine.checkpoints import EXPERT_FAMILIES, FAMILIES, build_model, save_checkpoint
from tests.engine.models.adapter import tiny_models
from tests.engine.models.decoder.dense_families import build_dense_model
from tests.engine.models.decoder.gemma.gemma_families import GEMMA_FAMILIES, build_gemma_model
from tests.engine.models.decoder.latent.latent_families import LATENT_FAMILIES, build_latent_model
from tests.engine.models.decoder.recurrent.recurrent_families import RECURRENT_FAMILIES, build_recurrent_model
from tests.waiting import until

REMEDY = re.compile(r"[;:] (download|correct|set|give|choose|shorten)|supported: |lists what is served|convert it")
FIELDS = ("architecture", "hidden_act", "rope_type", "max_model_len", "eos_token_id", "partial_rotary_factor")
PROMPT = [5, 9, 17, 33]

Damage = Callable[[Path], None]


def build(name: str) -> PreTrainedModel:
    """Return a tiny model of a family, or of an architecture that transformers' modules compute."""
    if name in tiny_models.TINY_MODELS:
        return tiny_models.build_model(name)
    if name in RECURRENT_FAMILIES:
        return build_recurrent_model(name)
    if name in GEMMA_FAMILIES:
        return build_gemma_model(name)
    if name in LATENT_FAMILIES:
        return build_latent_model(name)
    return build_model(name) if name in FAMILIES | EXPERT_FAMILIES else build_dense_model(name)


def generate(path: Path, model_impl: str = "auto") -> list[int]:
    """Load the checkpoint and return some tokens."""
    llm = LLM(
        str(path), model_impl=model_impl, kv_cache_memory="1MiB", skip_tokenizer_init=True, use_tqdm_on_load=False
    )
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], SamplingParams(temperature=0.0, max_tokens=3))
    return output.outputs[0].token_ids


class Workshop:
    """A good checkpoint, in one file and sharded, of which copies are damaged.

    Args:
        root: an empty directory.
        name: of a family, or of an architecture that transformers' modules compute.
    """

    def __init__(self, root: Path, name: str = "qwen3") -> None:
        model = build(name)
        self.model_impl = "transformers" if name in tiny_models.TINY_MODELS else "auto"
        self.fields = sorted(json.loads(model.config.to_json_string(use_diff=False)))
        self.single = Path(save_checkpoint(model, root / "single"))
        self.sharded = Path(save_checkpoint(model, root / "sharded", max_shard_size="100KB"))
        self._copies = root / "copies"
        self.tokens = generate(self.single, self.model_impl)
        assert generate(self.sharded, self.model_impl) == self.tokens
        self._open_before = open_files_and_threads()

    def try_damaged(self, good: Path, damage: Damage) -> PagodaError | None:
        """Load a damaged copy of ``good``; return the error, or None if it serves. Any other error is raised."""
        copy = Path(shutil.copytree(good, self._copies))
        error: PagodaError | None = None
        try:
            damage(copy)
            try:
                assert generate(copy, self.model_impl)
            except PagodaError as raised:
                error = raised
                assert any(name in str(error) for name in (str(copy), "config.json", *FIELDS)), error
                assert REMEDY.search(str(error)), error
                error.__traceback__ = error.__context__ = error.__cause__ = None  # they hold what was loaded
            until(self._has_closed_all, "all files are closed", pause_s=0.001)  # transformers' loader leaves threads
        finally:
            shutil.rmtree(copy)
        return error

    def _has_closed_all(self) -> bool:
        """Return whether no more files and threads are open than at first; those of earlier tests may have ended."""
        if self._is_closed():
            return True
        gc.collect()  # takes a tenth of a second among all the modules of a test run
        return self._is_closed()

    def _is_closed(self) -> bool:
        return all(now <= before for now, before in zip(open_files_and_threads(), self._open_before, strict=True))


def open_files_and_threads() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0, threading.active_count()


@contextmanager
def little_memory() -> Iterator[None]:
    """Let this process take 1 GiB more than it has, at most: more fails with another error than ModelLoadError."""
    resource = pytest.importorskip("resource")
    before, pages = resource.getrlimit(resource.RLIMIT_AS), int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**30, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
