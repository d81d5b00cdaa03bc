"""A workshop that damages copies of a tiny checkpoint and tries to serve them.

A damaged checkpoint either serves or fails within a second, with an error that names the file and the remedy. No file
and no thread is left open after it.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from engine.errors import PagodaError
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from tests.engine.checkpoints import build_model, save_checkpoint

MAX_CPU_SECONDS = 1.0
REMEDY = re.compile(r"[;:] (download|correct|set|give|choose)|supported: |lists what is served|convert it")
FIELDS = ("architecture", "hidden_act", "rope_type", "max_model_len", "eos_token_id", "partial_rotary_factor")
PROMPT = [5, 9, 17, 33]

Damage = Callable[[Path], None]


def generate(path: Path) -> list[int]:
    """Load the checkpoint and return some tokens."""
    llm = LLM(str(path), kv_cache_memory="1MiB", skip_tokenizer_init=True, use_tqdm_on_load=False)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], SamplingParams(temperature=0.0, max_tokens=3))
    return output.outputs[0].token_ids


class Workshop:
    """A good checkpoint, in one file and sharded, of which copies are damaged."""

    def __init__(self, root: Path) -> None:
        model = build_model("qwen3")
        self.single = Path(save_checkpoint(model, root / "single"))
        self.sharded = Path(save_checkpoint(model, root / "sharded", max_shard_size="100KB"))
        self._copies = root / "copies"
        self._count = 0
        self.tokens = generate(self.single)
        assert generate(self.sharded) == self.tokens
        self._open_before = open_files_and_threads()

    def try_damaged(self, good: Path, damage: Damage) -> PagodaError | None:
        """Load a damaged copy of ``good``; return the error, or None if it serves. Any other error is raised."""
        copy = Path(shutil.copytree(good, self._copies))
        error: PagodaError | None = None
        try:
            damage(copy)
            started = time.process_time()
            try:
                assert generate(copy)
            except PagodaError as raised:
                error = raised
                assert time.process_time() - started < MAX_CPU_SECONDS
                assert any(name in str(error) for name in (str(copy), "config.json", *FIELDS)), error
                assert REMEDY.search(str(error)), error
                error.__traceback__ = error.__context__ = error.__cause__ = None  # they hold what was loaded
            if not self._has_closed_all():
                gc.collect()
            assert self._has_closed_all()
        finally:
            shutil.rmtree(copy)
        return error

    def _has_closed_all(self) -> bool:
        """Return whether no more files and threads are open than at first; those of earlier tests may have ended."""
        return all(now <= before for now, before in zip(open_files_and_threads(), self._open_before, strict=True))


def open_files_and_threads() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0, threading.active_count()
