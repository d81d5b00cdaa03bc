"""ModelWorker: one rank's share of the model and of the KV cache on one device, and what every rank does in a step.

It knows nothing of the other ranks but the collectives inside the model: who tells it what to do is worker_pool.py's
business, and what to do is the scheduler's. Without tensor parallelism there is one worker, and its share is the whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv.kv_cache import KVCache
from engine.models.config import ModelConfig, load_hf_config
from engine.models.cpu_decoder import CpuDecoder
from engine.models.decoder import Decoder, ForwardContext
from engine.models.loader import load_decoder
from engine.models.tensor_parallel import TensorParallel
from engine.sampling.sampler import Sampler
from engine.sampling_params import MAX_LOGPROBS
from engine.worker.memory import blocks_that_fit, gpu_memory_for_cache, host_memory_for_cache
from engine.worker.step_plan import ModelInput, StepPlan
from kernels.attention import AttentionMetadata, select_backend
from kernels.cpu.library import set_num_threads

__all__ = ["ModelWorker", "resolve_device"]

logger = logging.getLogger(__name__)

MOST_TOKENS_READY = 4096  # of a step, on a CPU: whoever asks for larger ones may never have one
PROMPT_ROWS_AT_ONCE = 64  # of float32 logits: a whole prompt's would take gigabytes


def resolve_device(config: EngineConfig, rank: int) -> torch.device:
    """Return a rank's device: ``auto`` is a GPU where there is one, and each rank takes a GPU of its own.

    Raises:
        ConfigError: if GPUs are asked for and there are none, or fewer than ranks.
    """
    name, size = config.device, config.tensor_parallel_size
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"device='{name}' asks for a GPU, but torch sees none; choose auto or cpu")
    if size == 1:
        return torch.device("cuda" if name == "auto" else name)
    if size > torch.cuda.device_count():
        raise ConfigError(f"tensor_parallel_size={size} exceeds the {torch.cuda.device_count()} GPUs here; lower it")
    return torch.device("cuda", rank)


class ModelWorker:
    """A rank's model and KV cache; constructing it finds out what to load, and touches no weights.

    Raises:
        ConfigError: if an option does not fit the model, the backend or the machine.
        ModelLoadError: if the checkpoint cannot be served.
    """

    model: Decoder | CpuDecoder  # after load()
    kv_cache: KVCache  # after allocate()

    def __init__(self, config: EngineConfig, rank: int = 0) -> None:
        self.config = config
        self.rank = rank
        self.device = resolve_device(config, rank)
        self.hf_config = load_hf_config(config.model)
        self.model_config = ModelConfig.from_hf(self.hf_config)
        self.share = self.model_config.shard(config.tensor_parallel_size)
        self.dtype = self.model_config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        if config.quantization is not None and self.device.type != "cpu":
            raise ConfigError(
                f"quantization={config.quantization!r} is for CPUs, and the device is {self.device}; leave it out"
            )
        self.max_model_len = self._context_length()
        try:
            self.backend = select_backend(self.device, self._backend_name())
            self.block_size = config.block_size or self.backend.default_block_size
            self.backend.check_block_size(self.block_size)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if rank == 0:
            logger.info(
                "Using %s attention backend on %s, with blocks of %d tokens",
                self.backend.name,
                self.device,
                self.block_size,
            )
        self.parallel = TensorParallel()

    def load(self, rendezvous: str) -> None:
        """Meet the other ranks at the file ``rendezvous`` and load this one's share of the weights.

        Raises:
            ModelLoadError: if the checkpoint cannot be served.
        """
        self._use_device()
        if self.device.type == "cpu":
            self._take_threads()
        self.parallel = TensorParallel.join(self.rank, self.config.tensor_parallel_size, self.device, rendezvous)
        self.model = load_decoder(
            self.config.model,
            self.hf_config,
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.max_model_len,
            parallel=self.parallel,
            quantization=self.config.quantization,
            use_cpu_kernels=self.backend.name == "cpu",
            show_progress=self.config.use_tqdm_on_load and self.rank == 0,
        )

    def _take_threads(self) -> None:
        """Let this rank's share of the threads compute; ranks that are processes of their own begin with it."""
        threads = self.config.num_threads or torch.get_num_threads()
        if self.config.num_threads is not None or self.rank == 0:
            threads = max(1, threads // self.config.tensor_parallel_size)
        if self.config.num_threads is not None:
            torch.set_num_threads(threads)
        if self.backend.name == "cpu":
            set_num_threads(threads)

    @property
    def free_tokens(self) -> int | None:
        """Tokens that a step computes in about the time of one, where that is known: on a CPU, by the C kernels."""
        return self.model.free_tokens if isinstance(self.model, CpuDecoder) else None

    @torch.inference_mode()
    def execute(
        self, plan: StepPlan, on_prompt_logits: Callable[[torch.Tensor], None] | None = None
    ) -> torch.Tensor | None:
        """Compute one step, as all ranks do at once.

        Args:
            on_prompt_logits: takes the logits of the plan's ``prompt_rows``, in slices [rows, vocab_size] and in order,
                before the others are computed; only rank 0 has any to give.

        Returns:
            On rank 0 the logits [rows, vocab_size] of the plan's ``logit_rows``, if there are any.
        """
        self._use_device()
        self._copy_blocks(plan)
        if not len(plan.token_ids):  # a step may only make room
            return None
        self.kv_cache.expect(plan.slot_mapping)
        model_input = plan.to_device(self.device)
        hidden = self._forward(model_input, self.kv_cache)
        if len(plan.prompt_rows):
            self._compute_prompt_logits(hidden, model_input.prompt_rows, on_prompt_logits)
        return self.model.compute_logits(hidden, model_input.logit_rows) if len(plan.logit_rows) else None

    def _compute_prompt_logits(
        self, hidden: torch.Tensor, rows: torch.Tensor, on_prompt_logits: Callable[[torch.Tensor], None] | None
    ) -> None:
        for part in torch.split(rows, PROMPT_ROWS_AT_ONCE):  # the same parts on every rank, since each is a collective
            logits = self.model.compute_logits(hidden, part)
            if logits is not None and on_prompt_logits is not None:
                on_prompt_logits(logits)

    def _copy_blocks(self, plan: StepPlan) -> None:
        if plan.swap_out:
            self.kv_cache.swap_out(plan.swap_out)
        if plan.swap_in:
            self.kv_cache.swap_in(plan.swap_in)
        if plan.block_copies:
            self.kv_cache.copy_blocks(plan.block_copies)

    def abort(self) -> None:
        """Give up what waits for the other ranks, from any thread."""
        self.parallel.abort()

    def _forward(self, model_input: ModelInput, kv_cache: KVCache) -> torch.Tensor:
        context = ForwardContext(self.backend, model_input.metadata, kv_cache)
        hidden: torch.Tensor = self.model(model_input.token_ids, model_input.positions, context)
        return hidden

    def _use_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # the current device is each thread's own, and Triton launches there

    def _context_length(self) -> int:
        longest = self.model_config.max_position_embeddings
        asked = self.config.max_model_len
        if asked is not None and asked > longest:
            raise ConfigError(f"max_model_len={asked} exceeds the model's {longest} positions; lower it")
        return asked or longest

    @property
    def _longest_draft(self) -> int:
        speculation = self.config.speculation
        return speculation.num_speculative_tokens if speculation is not None else 0

    def _backend_name(self) -> str:
        """Return the configured backend, or where it is left open and flash-attn cannot compute float32, Triton's."""
        if self.config.attention_backend == "auto" and self.device.type == "cuda" and self.dtype == torch.float32:
            return "triton"
        return self.config.attention_backend

    # --- memory -------------------------------------------------------------------------------------------------

    @property
    def weight_bytes(self) -> int:
        """What this rank's weights take, without an embedding that beside packed ones stays mapped from its file."""
        return self.model.num_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """What a token's keys and values take on this rank."""
        return self.share.kv_bytes_per_token(self.dtype)

    @property
    def bytes_per_block(self) -> int:
        """What a block's keys and values take on this rank."""
        return self.block_size * self.kv_bytes_per_token

    @property
    def _tokens_to_be_ready_for(self) -> int:
        """Tokens of a step whose memory is had before it comes; larger ones take theirs when they do."""
        return min(self.config.max_num_batched_tokens, MOST_TOKENS_READY) if isinstance(self.model, CpuDecoder) else 0

    def allocate(self, num_blocks: int, num_host_blocks: int) -> None:
        """Make the KV cache, as many blocks on every rank since they share the block tables, and what steps need."""
        if isinstance(self.model, CpuDecoder):
            self.model.reserve(min(self._tokens_to_be_ready_for, num_blocks * self.block_size))
        self.kv_cache = self._make_cache(num_blocks, num_host_blocks)

    def _make_cache(self, num_blocks: int, num_host_blocks: int = 0) -> KVCache:
        return KVCache(
            num_layers=self.share.num_layers,
            num_blocks=num_blocks,
            block_size=self.block_size,
            num_kv_heads=self.share.num_kv_heads,
            head_dim=self.share.head_dim,
            dtype=self.dtype,
            device=self.device,
            num_host_blocks=num_host_blocks,
            num_blocks_ahead=-(-2 * self._tokens_to_be_ready_for // self.block_size),
        )

    def measure_num_blocks(self) -> int:
        """Return how many blocks memory holds, and no more than every sequence at full length could use.

        Raises:
            ConfigError: if not even one block fits.
        """
        useful = self.config.max_num_seqs * -(-self.max_model_len // self.block_size)
        if self.device.type == "cpu":
            memory = host_memory_for_cache(self.config)
        else:
            self._warm_up()
            memory = gpu_memory_for_cache(self.config, self.device)
        return blocks_that_fit(memory, self.bytes_per_block, useful)

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
        num_sampled = min(self.config.max_num_seqs, num_tokens)
        rows = torch.arange(min(num_sampled * (1 + self._longest_draft), num_tokens), device=self.device)
        sampler = Sampler(self.model_config.vocab_size, self.device)

        def take(logits: torch.Tensor) -> None:
            sampler.prompt_logprobs(logits, [0] * len(logits), [MAX_LOGPROBS] * len(logits))

        prompt_rows = torch.arange(min(PROMPT_ROWS_AT_ONCE, num_tokens), device=self.device)
        model_input = ModelInput(torch.zeros_like(positions), positions, metadata, rows, prompt_rows)
        torch.cuda.reset_peak_memory_stats(self.device)
        hidden = self._forward(model_input, self._make_cache(width))
        self._compute_prompt_logits(hidden, prompt_rows, take)
        if (logits := self.model.compute_logits(hidden, rows)) is not None:
            after_drafts = logits[num_sampled:].clone()  # beside which the others are sampled from
            del logits
            sampler.warm_up(num_sampled)
            del after_drafts
        torch.cuda.synchronize(self.device)
