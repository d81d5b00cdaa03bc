"""EngineConfig: every option of an engine, checked once and immutable.

It does not read the checkpoint: values that depend on it (``dtype='auto'``, the context length, the number of blocks)
are resolved when the model is loaded. It is a plain dataclass, so the engine runs where only torch and transformers are
installed.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import sys
from dataclasses import dataclass
from typing import Annotated, Any

from engine.errors import ConfigError
from engine.options.rules import (
    RuleError,
    apply_rules,
    choice,
    flag,
    integer,
    memory_size,
    name_or_null,
    number,
    optional,
    rules_of,
)
from engine.options.speculative_config import SpeculativeConfig
from engine.options.unknown import hint
from engine.pooling.info import PoolingInfo
from kernels.attention.registry import BACKENDS
from kernels.attention.window import Window
from kernels.linear.registry import QUANTIZATIONS

__all__ = ["EngineConfig", "SpeculativeConfig"]

STEP_TOKENS = {"cpu": 2048, "cuda": 8192}  # by the type of the device; as vLLM's on GPUs
DEFAULT_MAX_LOGPROBS = 20  # as in vLLM
LEAST_FLOAT = math.nextafter(0.0, 1.0)
MAX_FLOAT = sys.float_info.max


def _checkpoint_path(value: Any) -> Any:
    if not isinstance(value, str) or not value:
        raise RuleError("must be the path of a checkpoint directory or of a GGUF file", value=value)
    return value


def _device(value: Any) -> Any:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(value)):
        raise RuleError("is unknown", value=value, remedy="choose auto, cpu, cuda or cuda:N")
    return value


def _speculative(value: Any) -> SpeculativeConfig:
    return value if isinstance(value, SpeculativeConfig) else SpeculativeConfig.from_options(value)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of one engine. Names and meanings follow vLLM's. The annotation of each has its rule.

    Attributes:
        model: directory of a Hugging Face checkpoint (config.json, safetensors, tokenizer), or a GGUF file.
        dtype: of weights and KV cache; ``auto`` takes the checkpoint's.
        kv_cache_dtype: of keys and values: ``fp8``, or ``fp8_e4m3``, takes half the memory of 16-bit ones, on GPUs with
            the Triton attention backend. Layers have the scales of the checkpoint, else 1. ``auto`` is ``dtype``.
        model_impl: what computes the model: ``pagoda`` is our own decoder, ``transformers`` are transformers' modules;
            ``auto`` takes our own decoder where it computes the model.
        quantization: ``int8`` and ``int4`` quantize the weights of linear layers while they are loaded, on a CPU. None
            keeps those of a quantised checkpoint as they are stored, where that is possible; ``dequantize`` computes
            them in ``dtype``.
        max_model_len: context length in tokens; None takes the model's.
        max_num_seqs: maximum sequences that run in one step.
        max_num_batched_tokens: maximum tokens computed in one step; longer prompts are chunked. None: 8,192 on a GPU,
            which computes small steps in less time than its host takes to launch them, and 2,048 on a CPU.
        long_prefill_threshold: maximum tokens of one prompt computed in one step, so that other requests also progress;
            0 sets no limit.
        max_decode_slowdown: how many times longer a step with decodes and prefills may take than its decodes alone,
            about, and more if more prompts can start than sequences decode. None, the default of ``LLM``, sets no
            limit. It is for CPUs, where a prompt token costs nearly as much time as a step of decodes, and has no
            effect on a GPU.
        target_inter_token_ms: target inter-token latency in milliseconds; ``max_decode_slowdown`` limits only steps
            that take longer, by what earlier steps took. None: it limits every step.
        max_queued_requests: maximum requests that wait in an AsyncEngine, in addition to those that have a slot in the
            next step. Another request is rejected, or it replaces a waiting request of lower priority. None, the
            default of ``LLM``, sets no limit.
        max_queued_prefill_tokens: maximum prompt tokens that wait to be computed in an AsyncEngine, without cached
            ones; likewise. If the queue is empty, a request of any length is accepted.
        block_size: tokens per KV block; None takes the attention backend's default.
        num_blocks: size of the KV pool in blocks; None derives it from memory.
        kv_cache_memory: bytes (or text such as "2GiB") for the KV pool of the whole engine. Tensor-parallel ranks take
            equal parts of it. None measures the free memory.
        gpu_memory_utilization: fraction of each GPU's memory that the engine may use.
        typical_seq_len: tokens of a typical sequence, prompt and answer, for a model with sliding windows or recurrent
            layers: the memory of the KV pool is divided between the kinds of layers for sequences of this length.
            None: ``max_model_len``, at most 4,096.
        state_snapshots: for a model with recurrent layers, snapshots of states for each sequence that can run, at which
            the prefixes of later prompts resume; 0: none, so that no prefix is reused (1 with ``speculative_config``).
            A snapshot takes as much memory as a running sequence's states, which the log says.
        state_snapshot_interval: for a model with recurrent layers, tokens between two snapshots within a prompt,
            rounded up to whole blocks, at which the first prompt that leaves a cached one early resumes; 0: none. They
            are the first snapshots to be lost. None: a full KV cache has two for each slot that is left to snapshots,
            and none takes more memory than the blocks since the one before it. The log has the number.
        enable_prefix_caching: keep full blocks under their prefix hash and reuse them.
        async_scheduling: schedule each step while the one before is computed, so that a GPU does not wait for the
            host. A request with a grammar, beams, penalties, long bad words, a thinking budget or draft tokens takes
            part in every other step, or in every step if all do. None: on a GPU without tensor parallelism.
        use_tqdm_on_load: show progress while the weights load: a bar if stderr is a terminal, else lines in the log.
        skip_tokenizer_init: token ids in, token ids out; no tokenizer files are needed.
        stop_at_tokenizer_eos: the tokenizer's EOS token ends an answer, too, as in vLLM, in addition to the EOS ids of
            generation_config.json or config.json. It has no effect if ``skip_tokenizer_init`` is set.
        enforce_eager: never capture CUDA graphs, with which steps of few tokens take less time on a GPU. It has no
            effect on a CPU.
        batch_invariant: give a request the same bits whatever else is computed: linear layers on a GPU add up in
            one order, at some cost; those of experts always do. Recurrent layers on a GPU compute prompts token by
            token, at a high cost. On a CPU the C kernels always do so, and the option
            only makes sure of them.
        tensor_parallel_size: GPUs, or processes on a CPU, that share one model.
        max_logprobs: most log-probabilities of a token that a request may ask for, in its answer or its prompt; -1 sets
            no limit, so that a request may ask for those of the whole vocabulary.
        swap_space_gib: host memory in GiB, for the whole engine, that keeps what preempted requests have in the KV
            cache, and what the prefix cache evicts: blocks, pages of windows, states. What does not fit is computed
            again. None: on a CPU an eighth of the memory available, at most 4 GiB and four times the KV cache, taken
            128 MiB ahead of its use for each pool; on a GPU, and for ``LLM``, 0.
        disk_cache_path: directory on a local disk where full blocks of ended requests are kept, which later requests of
            this engine read, also after a restart. It needs a host pool, through which all pages pass. Each engine
            takes a file of its own, whose name begins with a digest of the model. None: there is no disk cache.
        disk_cache_gib: size of that file in GiB, for each engine.
        shared_cache_path: directory that several nodes mount, or a URL of fsspec such as ``s3://bucket/prefix``, where
            engines keep full blocks of ended requests for each other. It needs a host pool. None: there is no shared
            cache.
        shared_cache_gib: most GiB that all objects there take, of all models. Each engine deletes the oldest of them
            above that. None: the storage deletes them itself, for example by a lifetime rule of the bucket.
        kv_transfer: give KV to the other replicas of a deployment, and take theirs, over the network. It needs a host
            pool, through which all pages pass. None: wherever there is one. It has no effect on ``LLM``.
        served_model_name: name of the model in metrics; None takes the path.
        step_timeout_s: seconds after which a step that does not end makes AsyncEngine.check_health() fail.
        seed: seed of the engine's generator, which gives each request without a seed its own.
        speculative_config: speculative decoding: draft tokens that the model verifies in one step. Answers that repeat
            earlier text, or a request's prediction, get faster; no answer changes. A map of the options of
            SpeculativeConfig, such as ``{"method": "suffix"}``; None is off.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        num_threads: threads that compute on a CPU, for all ranks together; None takes OMP_NUM_THREADS, else one for
            each core, within the affinity and the quota of CPUs of this process. Engines of one process share them.
        attention_backend: a name in the table of kernels/attention/registry.py, such as ``triton``; ``auto`` takes the
            fastest that computes the dtype on the device.

    Raises:
        ConfigError: for any value out of range.
    """

    model: Annotated[str, _checkpoint_path]
    dtype: Annotated[str, choice("auto", "float32", "bfloat16", "float16")] = "auto"
    kv_cache_dtype: Annotated[str, choice("auto", "fp8", "fp8_e4m3")] = "auto"
    model_impl: Annotated[str, choice("auto", "pagoda", "transformers")] = "auto"
    quantization: Annotated[str | None, optional(choice(*QUANTIZATIONS))] = None
    max_model_len: Annotated[int | None, optional(integer(1))] = None
    max_num_seqs: Annotated[int, integer(1)] = 256
    max_num_batched_tokens: Annotated[int | None, optional(integer(1))] = None
    long_prefill_threshold: Annotated[int, integer(0)] = 0
    max_decode_slowdown: Annotated[float | None, optional(number(1.0, MAX_FLOAT, "of at least 1"))] = 1.4
    target_inter_token_ms: Annotated[float | None, optional(number(LEAST_FLOAT, MAX_FLOAT, "above 0"))] = 50.0
    max_queued_requests: Annotated[int | None, optional(integer(1))] = None
    max_queued_prefill_tokens: Annotated[int | None, optional(integer(1))] = None
    block_size: Annotated[int | None, optional(integer(1))] = None
    num_blocks: Annotated[int | None, optional(integer(1))] = None
    kv_cache_memory: Annotated[int | str | None, optional(memory_size)] = None
    gpu_memory_utilization: Annotated[float, number(LEAST_FLOAT, 1.0, "in (0, 1]")] = 0.9
    typical_seq_len: Annotated[int | None, optional(integer(1))] = None
    state_snapshots: Annotated[int, integer(0)] = 2
    state_snapshot_interval: Annotated[int | None, optional(integer(0))] = None
    enable_prefix_caching: Annotated[bool, flag] = True
    async_scheduling: Annotated[bool | None, optional(flag)] = None
    use_tqdm_on_load: Annotated[bool, flag] = True
    skip_tokenizer_init: Annotated[bool, flag] = False
    stop_at_tokenizer_eos: Annotated[bool, flag] = True
    enforce_eager: Annotated[bool, flag] = False
    batch_invariant: Annotated[bool, flag] = False
    tensor_parallel_size: Annotated[int, integer(1)] = 1
    max_logprobs: Annotated[int, integer(-1)] = DEFAULT_MAX_LOGPROBS
    swap_space_gib: Annotated[float | None, optional(number(0.0, MAX_FLOAT, "of at least 0"))] = None
    disk_cache_path: Annotated[str | None, name_or_null] = None
    disk_cache_gib: Annotated[float, number(LEAST_FLOAT, MAX_FLOAT, "above 0")] = 16.0
    shared_cache_path: Annotated[str | None, name_or_null] = None
    shared_cache_gib: Annotated[float | None, optional(number(LEAST_FLOAT, MAX_FLOAT, "above 0"))] = 64.0
    kv_transfer: Annotated[bool | None, optional(flag)] = None
    served_model_name: Annotated[str | None, name_or_null] = None
    step_timeout_s: Annotated[float, number(LEAST_FLOAT, MAX_FLOAT, "above 0")] = 300.0
    seed: Annotated[int, integer()] = 0
    speculative_config: Annotated[SpeculativeConfig | dict[str, Any] | None, optional(_speculative)] = None
    device: Annotated[str, _device] = "auto"
    num_threads: Annotated[int | None, optional(integer(1))] = None
    attention_backend: Annotated[str, choice("auto", *BACKENDS)] = "auto"

    @property
    def shared_memory_options(self) -> dict[str, Any]:
        """The options in use by which whole pages leave a host pool, which all ranks must share then."""
        names = ("disk_cache_path", "shared_cache_path", "kv_transfer")
        return {name: value for name in names if (value := getattr(self, name))}

    def __post_init__(self) -> None:
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        apply_rules(self, _ENGINE_RULES, ConfigError)
        if self.tensor_parallel_size > 1 and ":" in self.device:
            raise ConfigError(
                f"names one GPU, but tensor_parallel_size={self.tensor_parallel_size} takes the first visible ones",
                param="device",
                value=self.device,
                remedy="choose cuda",
            )
        method = None if self.speculation is None else self.speculation.method
        if self.tensor_parallel_size > 1 and method in ("draft_model", "mtp", "eagle3"):
            raise ConfigError(
                "needs tensor_parallel_size=1",
                param="speculative_config",
                part="method",
                value=method,
                remedy="choose ngram or suffix",
            )

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """The checked ``speculative_config``."""
        assert not isinstance(self.speculative_config, dict)
        return self.speculative_config

    @property
    def tokens_per_step(self) -> int:
        """The most tokens of a step: ``max_num_batched_tokens``, or what it is on a CPU if it is None."""
        return self.max_num_batched_tokens or STEP_TOKENS["cpu"]

    def on_device(self, device_type: str) -> EngineConfig:
        """Return the config with the defaults of a device, ``cpu`` or ``cuda``, for options that are None."""
        if self.max_num_batched_tokens is not None:
            return self
        return dataclasses.replace(self, max_num_batched_tokens=STEP_TOKENS[device_type])

    @classmethod
    def from_options(cls, model: str, options: dict[str, Any]) -> EngineConfig:
        """Build a config from untyped options of YAML or keyword arguments.

        Raises:
            ConfigError: for an unknown option, with the nearest known name, or a value out of range.
        """
        known = [field.name for field in dataclasses.fields(cls) if field.name != "model"]
        for name in options:
            if name not in known:
                raise ConfigError(f"unknown engine option '{name}'", remedy=hint(name, known))
        return cls(model=model, **options)


_ENGINE_RULES = rules_of(EngineConfig)


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
    max_logprobs: int = DEFAULT_MAX_LOGPROBS  # -1: no limit
    free_tokens: int | None = None  # that a step computes in about the time of one token, if that was measured
    windows: tuple[tuple[Window, int], ...] = ()  # the windows with pages of their own, and how many each has
    num_slots: int = 0  # for the states of sequences and their snapshots; 0: the model has no states
    num_snapshots: int = 0  # of these, slots that running sequences leave to snapshots
    snapshot_interval: int = 0  # tokens of a prefill, whole blocks, after each of which a snapshot is kept; 0: none
    num_host_window_pages: tuple[int, ...] = ()  # of each window, pages of its host pool; empty: none
    num_host_slots: int = 0  # of the host pool of states
    kv_cache_dtype: str = "auto"  # of keys and values: fp8, or auto for ``dtype``
    pooling: PoolingInfo | None = None  # of an engine that computes vectors or scores instead of text
