"""ModelRunner: owns the weights and the KV tensors, and computes one scheduled batch.

It turns a SchedulerOutput into tensors, runs the model and samples. It decides nothing: which tokens are computed and
where their keys and values go is the scheduler's and the block manager's business.
"""

from __future__ import annotations

import logging
from time import perf_counter

import torch

from engine.batch import ModelInput, build_model_input
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.forward_context import ForwardContext, KVCache
from engine.memory import blocks_that_fit, gpu_memory_for_cache, host_memory_for_cache
from engine.metrics import StepTimes
from engine.models.config import GenerationDefaults, ModelConfig, load_hf_config
from engine.models.loader import load_decoder
from engine.sampler import SamplingBatch, sample
from engine.scheduler import SchedulerOutput
from engine.tensor_parallel import TensorParallel
from kernels.attention import AttentionMetadata, select_backend

__all__ = ["ModelRunner", "resolve_device"]

logger = logging.getLogger(__name__)


def resolve_device(name: str) -> torch.device:
    """Return the device that ``name`` asks for; ``auto`` is a GPU where there is one.

    Raises:
        ConfigError: if a GPU is asked for and none is there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device='{name}' asks for a GPU, but torch sees none; choose auto or cpu")
    return torch.device(name)


class ModelRunner:
    """One model on one device with its KV cache.

    Raises:
        ConfigError: if an option does not fit the model, the backend or the machine.
        ModelLoadError: if the checkpoint cannot be served.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.device = resolve_device(config.device)
        started = perf_counter()
        hf_config = load_hf_config(config.model)
        self.model_config = ModelConfig.from_hf(hf_config)
        self.generation_defaults = GenerationDefaults.load(config.model, hf_config)
        self.dtype = self.model_config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        self.max_model_len = self._context_length()
        try:
            self.backend = select_backend(self.device, self._backend_name())
            self.block_size = config.block_size or self.backend.default_block_size
            self.backend.check_block_size(self.block_size)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.model = load_decoder(
            config.model, hf_config, dtype=self.dtype, device=self.device,
            max_model_len=self.max_model_len, parallel=TensorParallel(),
        )
        logger.info("Loading weights took %.2f seconds", perf_counter() - started)
        self.num_blocks = config.num_blocks or self._measure_num_blocks()
        if self.num_blocks * self.block_size < 2:
            raise ConfigError("num_blocks=1 of block_size=1 holds no prompt with an answer; raise one of them")
        self.kv_cache = self._allocate(self.num_blocks)
        self._log_capacity()

    @torch.inference_mode()
    def run(self, output: SchedulerOutput, times: StepTimes) -> list[int]:
        """Compute the batch and return a token for each of ``output.sampling``; the phases' seconds go to ``times``."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # the current device is each thread's own, and Triton launches there
        started = perf_counter()
        model_input = build_model_input(output, self.block_size, self.device)
        hidden = self._forward(model_input, self.kv_cache)
        sampling = output.sampling
        token_ids: list[int] = []
        if sampling:
            logits = self.model.compute_logits(hidden[model_input.sampled_rows])
            times.forward = perf_counter() - started
            batch = SamplingBatch.build(sampling, self.model_config.vocab_size, self.device)
            token_ids = sample(logits, batch).tolist()
        else:
            times.forward = perf_counter() - started
        times.sample = perf_counter() - started - times.forward
        return token_ids

    def _forward(self, model_input: ModelInput, kv_cache: KVCache) -> torch.Tensor:
        context = ForwardContext(self.backend, model_input.metadata, kv_cache)
        hidden: torch.Tensor = self.model(model_input.token_ids, model_input.positions, context)
        return hidden

    def _context_length(self) -> int:
        longest = self.model_config.max_position_embeddings
        asked = self.config.max_model_len
        if asked is not None and asked > longest:
            raise ConfigError(f"max_model_len={asked} exceeds the model's {longest} positions; lower it")
        return asked or longest

    def _backend_name(self) -> str:
        """Return the configured backend, or where it is left open and flash-attn cannot compute float32, Triton's."""
        if self.config.attention_backend == "auto" and self.device.type == "cuda" and self.dtype == torch.float32:
            return "triton"
        return self.config.attention_backend

    # --- KV memory ----------------------------------------------------------------------------------------------

    def _allocate(self, num_blocks: int) -> KVCache:
        config = self.model_config
        shape = (config.num_layers, 2, num_blocks, self.block_size, config.num_kv_heads, config.head_dim)
        # The CPU backend reads only what was written, and memory that nobody touches costs a laptop nothing; on a GPU a
        # NaN left by others would survive being masked.
        make = torch.empty if self.device.type == "cpu" else torch.zeros
        cache = make(shape, dtype=self.dtype, device=self.device)
        return [(layer[0], layer[1]) for layer in cache]

    def _measure_num_blocks(self) -> int:
        """Return how many blocks memory holds, and no more than every sequence at full length could use."""
        useful = self.config.max_num_seqs * -(-self.max_model_len // self.block_size)
        if self.device.type == "cpu":
            memory = host_memory_for_cache(self.config)
        else:
            self._warm_up()
            memory = gpu_memory_for_cache(self.config, self.device)
        bytes_per_block = self.block_size * self.model_config.kv_bytes_per_token(self.dtype)
        return blocks_that_fit(memory, bytes_per_block, useful)

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Run the largest step once, so that torch records the peak of memory that activations and logits take."""
        num_tokens = self.config.max_num_batched_tokens
        length = min(num_tokens, self.max_model_len)
        starts = list(range(0, num_tokens, length))
        lengths = [min(length, num_tokens - start) for start in starts]
        width = -(-length // self.block_size)

        def tensor(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        positions = torch.cat([torch.arange(count, device=self.device) for count in lengths])
        metadata = AttentionMetadata(
            slot_mapping=positions.clone(),  # all sequences write the same blocks: only sizes matter here
            cu_seqlens_q=tensor([*starts, num_tokens]),
            seq_lens=tensor(lengths),
            block_tables=torch.arange(width, dtype=torch.int32, device=self.device).repeat(len(lengths), 1),
            max_query_len=length,
            max_seq_len=length,
        )
        rows = torch.arange(min(self.config.max_num_seqs, num_tokens), device=self.device)
        model_input = ModelInput(torch.zeros_like(positions), positions, metadata, rows)
        torch.cuda.reset_peak_memory_stats(self.device)
        hidden = self._forward(model_input, self._allocate(width))
        sample(self.model.compute_logits(hidden[rows]), SamplingBatch.largest(len(rows), self.device))
        torch.cuda.synchronize(self.device)

    def _log_capacity(self) -> None:
        tokens = self.num_blocks * self.block_size
        size = tokens * self.model_config.kv_bytes_per_token(self.dtype)
        logger.info(
            "KV cache: %d blocks of %d tokens, %d tokens in %.2f GiB; room for %.2f requests of %d tokens",
            self.num_blocks, self.block_size, tokens, size / 2**30, tokens / self.max_model_len, self.max_model_len,
        )  # fmt: skip
