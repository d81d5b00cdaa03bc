"""EngineConfig: every option of the engine, checked once at the edge and immutable afterwards.

It knows nothing of a checkpoint's contents: what depends on them (``dtype='auto'``, the context length, the number of
blocks) is resolved when the model is loaded. It is a plain dataclass so that the engine runs where only torch and
transformers are installed.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError
from engine.speculative_config import SpeculativeConfig

__all__ = ["EngineConfig", "parse_memory"]

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_memory(value: int | str, name: str) -> int:
    """Return bytes from an int or from text such as ``"512MiB"`` or ``"4 GiB"``.

    Raises:
        ConfigError: if the text is no size, or the size is not positive.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(value))
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or not isinstance(value, int | str) or isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} is no memory size; give bytes or text such as '512MiB' or '4GiB'")
    size = float(match[1]) * unit
    if not 1 <= size < 2**63:
        raise ConfigError(f"{name}={value!r} is no amount of memory that a machine has; give, say, '512MiB'")
    return int(size)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of one engine. Names and meanings follow vLLM's.

    Attributes:
        model: directory of a Hugging Face checkpoint (config.json, safetensors, tokenizer).
        dtype: of weights and KV cache; ``auto`` takes the checkpoint's.
        quantization: ``int8`` keeps the weights of linear layers as int8, quantized while they are loaded, on a CPU;
            None keeps them in ``dtype``.
        max_model_len: context length in tokens; None takes the model's.
        max_num_seqs: sequences that run in one step, at most.
        max_num_batched_tokens: tokens computed in one step, at most; longer prompts are chunked.
        long_prefill_threshold: tokens of one prompt computed in one step, at most, so that others get their turn; 0
            sets no such limit.
        max_decode_slowdown: how many times longer than with its decodes alone a step may take, about, for what it
            computes of a prompt beside them, unless more prompts could start than sequences decode; None, the default
            of ``LLM``, sets no such limit. It is for CPUs, where a token of a prompt costs nearly as much time as a
            step of decodes, and has no effect on a GPU.
        max_queued_requests: requests that may wait in an AsyncEngine, at most, besides those that the next step has
            places for; another one is refused, or a waiting one of lower priority gives way. None sets no such
            limit; ``LLM`` queues whatever it is given.
        max_queued_prefill_tokens: prompt tokens that may wait to be computed in an AsyncEngine, at most, without those
            that the prefix cache holds; likewise. A request that finds nobody waiting is taken however long it is.
        block_size: tokens per KV block; None takes the attention backend's default.
        num_blocks: size of the KV pool in blocks; None derives it from memory.
        kv_cache_memory: bytes (or text such as "2GiB") for the KV pool; None measures what is free. It is the whole
            engine's: tensor-parallel ranks take equal parts of it.
        gpu_memory_utilization: share of each GPU's memory that the engine may use.
        enable_prefix_caching: keep full blocks under their prefix hash and reuse them.
        use_tqdm_on_load: show a progress bar while the weights load, if stderr is a terminal.
        skip_tokenizer_init: token ids in, token ids out; no tokenizer files are needed.
        enforce_eager: never capture CUDA graphs; none are captured so far, so it changes nothing yet.
        tensor_parallel_size: GPUs, or on a CPU processes, that share one model; all on this host.
        swap_space_gib: host memory in GiB that preempted requests are swapped to; without room there they are
            computed again. It is the whole engine's too.
        served_model_name: what metrics call the model; None takes the path.
        step_timeout_s: seconds after which a step that does not end makes AsyncEngine.check_health() fail.
        seed: of the engine's own generator, from which requests without a seed draw theirs.
        speculative_config: guess tokens and let the model check several in one step, which makes greedy answers faster
            where they copy what is there already, and changes none. A map of SpeculativeConfig's options, such as
            ``{"method": "ngram", "num_speculative_tokens": 4}``; None guesses nothing.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        num_threads: threads that compute on a CPU, all ranks' together; None takes OMP_NUM_THREADS, else one for each
            core. Engines of one process share them.
        attention_backend: ``auto``, ``cpu``, ``triton`` or ``flash_attn``.

    Raises:
        ConfigError: for any value out of range.
    """

    model: str
    dtype: str = "auto"
    quantization: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    long_prefill_threshold: int = 0
    max_decode_slowdown: float | None = 1.4
    max_queued_requests: int | None = None
    max_queued_prefill_tokens: int | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    kv_cache_memory: int | str | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    use_tqdm_on_load: bool = True
    skip_tokenizer_init: bool = False
    enforce_eager: bool = False
    tensor_parallel_size: int = 1
    swap_space_gib: float = 0.0
    served_model_name: str | None = None
    step_timeout_s: float = 300.0
    seed: int = 0
    speculative_config: SpeculativeConfig | dict[str, Any] | None = None
    device: str = "auto"
    num_threads: int | None = None
    attention_backend: str = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model={self.model!r} must be the path of a checkpoint directory")
        if self.served_model_name is not None and (
            not isinstance(self.served_model_name, str) or not self.served_model_name
        ):
            raise ConfigError(f"served_model_name={self.served_model_name!r} must be a name, or null")
        for name in ("max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size"):
            self._require_positive_int(name)
        for name in (
            "max_model_len",
            "block_size",
            "num_blocks",
            "max_queued_requests",
            "max_queued_prefill_tokens",
            "num_threads",
        ):
            if getattr(self, name) is not None:
                self._require_positive_int(name)
        for name in ("enable_prefix_caching", "use_tqdm_on_load", "skip_tokenizer_init", "enforce_eager"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be true or false")
        if self.dtype not in _DTYPES:
            raise ConfigError(f"dtype={self.dtype!r} is unknown; choose one of {', '.join(_DTYPES)}")
        if self.quantization not in (None, "int8"):
            raise ConfigError(f"quantization={self.quantization!r} is unknown; choose int8, or leave it out")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(self.device)):
            raise ConfigError(f"device={self.device!r} is unknown; choose auto, cpu, cuda or cuda:N")
        self._check_numbers()
        if self.speculative_config is not None and not isinstance(self.speculative_config, SpeculativeConfig):
            object.__setattr__(self, "speculative_config", SpeculativeConfig.from_options(self.speculative_config))
        if self.kv_cache_memory is not None:
            object.__setattr__(self, "kv_cache_memory", parse_memory(self.kv_cache_memory, "kv_cache_memory"))

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """``speculative_config``, checked."""
        assert not isinstance(self.speculative_config, dict)
        return self.speculative_config

    def _require_positive_int(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}={value!r} must be an integer of at least 1")

    def _check_numbers(self) -> None:
        threshold = self.long_prefill_threshold
        if isinstance(threshold, bool) or not isinstance(threshold, int) or threshold < 0:
            raise ConfigError(f"long_prefill_threshold={threshold!r} must be an integer of at least 0")
        utilization = self.gpu_memory_utilization
        if isinstance(utilization, bool) or not isinstance(utilization, int | float) or not 0 < utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization={utilization!r} must lie in (0, 1]")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed={self.seed!r} must be an integer")
        swap = self.swap_space_gib
        if isinstance(swap, bool) or not isinstance(swap, int | float) or not math.isfinite(swap) or swap < 0:
            raise ConfigError(f"swap_space_gib={swap!r} must be a finite number of at least 0")
        limit = self.step_timeout_s
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not math.isfinite(limit) or limit <= 0:
            raise ConfigError(f"step_timeout_s={limit!r} must be a finite number above 0")
        slowdown = self.max_decode_slowdown
        if slowdown is not None and (
            isinstance(slowdown, bool) or not isinstance(slowdown, int | float) or not 1 <= slowdown < math.inf
        ):
            raise ConfigError(f"max_decode_slowdown={slowdown!r} must be a finite number of at least 1, or null")
        if self.tensor_parallel_size > 1 and ":" in self.device:
            raise ConfigError(
                f"device='{self.device}' names one GPU, but tensor_parallel_size={self.tensor_parallel_size} takes "
                "the first ones that are visible; choose cuda"
            )

    @classmethod
    def from_options(cls, model: str, options: dict[str, Any]) -> EngineConfig:
        """Build a config from untyped options, as YAML or keyword arguments give them.

        Raises:
            ConfigError: for an unknown option, with the nearest known name, or a value out of range.
        """
        known = [field.name for field in dataclasses.fields(cls) if field.name != "model"]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean '{near[0]}'?" if near else f"known options: {', '.join(known)}"
                raise ConfigError(f"unknown engine option '{name}'; {hint}")
        return cls(model=model, **options)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The model and the sizes of a loaded engine, as its front end needs them. It pickles."""

    model: str  # as configured; the root of the block hashes
    block_size: int
    num_blocks: int
    num_host_blocks: int
    max_model_len: int
    vocab_size: int
    dtype: str
    device: str
    attention_backend: str
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, Any]  # temperature, top_p, top_k, min_p, as far as generation_config.json sets them
    free_tokens: int | None = None  # that a step computes in about the time of one token, if that was measured
