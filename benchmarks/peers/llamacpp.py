"""llama.cpp through llama-cpp-python: `PYTHON -m benchmarks.peers.llamacpp MODEL.gguf WORKLOAD ...`.

The high-level API answers one prompt at a time, so batches are made here as llama.cpp's own server makes them: in each
step one token of every running sequence, then as much of the waiting prompts as the batch still holds. Prefixes are
computed again for every sequence.
"""

from __future__ import annotations

import ctypes
from typing import Any

from benchmarks.peers import runner
from benchmarks.workloads import Request, Workload
from kernels.cgroup import available_cpus

UBATCH = 512  # tokens that llama.cpp computes at once, its default
EXTRA_SLOTS = 32  # of the KV cache, for each sequence


class _Sequence:
    """One request: its tokens in the KV cache, and the number of tokens still to generate."""

    def __init__(self, number: int, request: Request) -> None:
        self.number, self.prompt, self.remaining = number, request.prompt, request.out
        self.num_written = 0  # tokens in the KV cache
        self.last_token: int | None = None  # none until the prompt is computed


class _Batch:
    """llama_batch: the tokens of one decode call, and the indices whose logits are needed."""

    def __init__(self, lib: Any) -> None:
        self._batch = lib.llama_batch_init(runner.MAX_NUM_BATCHED_TOKENS, 0, 1)
        self.wanted: list[tuple[int, _Sequence]] = []

    @property
    def native(self) -> Any:
        return self._batch

    @property
    def is_full(self) -> bool:
        return bool(self._batch.n_tokens == runner.MAX_NUM_BATCHED_TOKENS)

    def clear(self) -> None:
        self._batch.n_tokens = 0
        self.wanted = []

    def put(self, sequence: _Sequence, token_id: int, *, is_last: bool) -> None:
        """Add a sequence's next token; logits are needed for its last known token."""
        batch, index = self._batch, self._batch.n_tokens
        batch.token[index], batch.pos[index] = token_id, sequence.num_written
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence.number
        batch.logits[index] = int(is_last)
        batch.n_tokens = index + 1
        sequence.num_written += 1
        if is_last:
            self.wanted.append((index, sequence))


def _fill(batch: _Batch, sequences: list[_Sequence]) -> None:
    batch.clear()
    for sequence in sequences:
        if sequence.last_token is not None:
            batch.put(sequence, sequence.last_token, is_last=True)
    for sequence in sequences:
        while sequence.last_token is None and sequence.num_written < len(sequence.prompt) and not batch.is_full:
            is_last = sequence.num_written == len(sequence.prompt) - 1
            batch.put(sequence, sequence.prompt[sequence.num_written], is_last=is_last)


def load(model: str, workloads: list[Workload]) -> runner.Generate:
    """Load a bf16 GGUF with a KV cache that holds the largest workload."""
    import llama_cpp as lib
    import numpy as np

    lib.llama_backend_init()
    silent = lib.llama_log_callback(lambda *_: None)
    lib.llama_log_set(silent, ctypes.c_void_p(0))
    weights = lib.llama_model_load_from_file(model.encode(), lib.llama_model_default_params())
    context = lib.llama_init_from_model(weights, _context_params(lib, workloads))
    if not context:
        raise RuntimeError(f"llama.cpp could not load {model}")
    vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(weights))
    batch = _Batch(lib)

    def argmax(index: int) -> int:
        return int(np.ctypeslib.as_array(lib.llama_get_logits_ith(context, index), (vocabulary,)).argmax())

    def generate(requests: list[Request], _keep: object = silent) -> int:
        running = [_Sequence(number, request) for number, request in enumerate(requests)]
        num_tokens = 0
        while running:
            _fill(batch, running)
            if lib.llama_decode(context, batch.native) != 0:
                raise RuntimeError("llama_decode failed; the KV cache may be too small")
            for index, sequence in batch.wanted:
                sequence.last_token, sequence.remaining = argmax(index), sequence.remaining - 1
            num_tokens += len(batch.wanted)
            running = [item for item in running if item.remaining]
        lib.llama_memory_clear(lib.llama_get_memory(context), False)
        return num_tokens

    return generate


def _context_params(lib: Any, workloads: list[Workload]) -> Any:
    params = lib.llama_context_default_params()
    extra_slots = [EXTRA_SLOTS * len(workload.requests) for workload in workloads]
    num_tokens = [workload.input_tokens + workload.output_tokens for workload in workloads]
    params.n_ctx = max(tokens + more for tokens, more in zip(num_tokens, extra_slots, strict=True))
    params.n_batch, params.n_ubatch = runner.MAX_NUM_BATCHED_TOKENS, UBATCH
    params.n_seq_max = min(runner.MAX_NUM_SEQS, max(2, *(len(workload.requests) for workload in workloads)))
    params.n_threads = params.n_threads_batch = available_cpus()
    params.kv_unified = True
    return params


if __name__ == "__main__":
    runner.main("llamacpp", load)
