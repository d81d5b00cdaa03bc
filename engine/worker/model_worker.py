"""ModelWorker: one tensor-parallel rank, with its shard of the model and of the KV cache on one device.

Every rank executes the same StepPlan at the same time. A worker knows the other ranks only through the collectives
inside the model; ``WorkerPool`` calls the workers, and the scheduler decides what a step computes. Without tensor
parallelism there is one worker with the whole model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv.block_tables import BlockTables
from engine.kv.kv_cache import KVCache
from engine.kv.layer_cache import bytes_per_token
from engine.models.adapter.decoder import TransformersDecoder
from engine.models.adapter.loader import load_transformers_decoder
from engine.models.config.implementation import read_shape
from engine.models.config.model_config import load_hf_config
from engine.models.config.transformers_config import TransformersConfig
from engine.models.decoder.cpu_decoder import CpuDecoder
from engine.models.decoder.decoder import Decoder, ForwardContext
from engine.models.decoder.loader import load_decoder
from engine.models.tensor_parallel import TensorParallel
from engine.sampling.sampler import Sampler
from engine.worker.device import resolve_device, set_rank_threads
from engine.worker.graphs.decode_graphs import DecodeGraphs
from engine.worker.graphs.device import CudaGraphDevice
from engine.worker.memory import blocks_that_fit, gpu_memory_for_cache, host_memory_for_cache
from engine.worker.step_plan import ModelInput, StepPlan
from engine.worker.warm_up import largest_step, one_sequence
from kernels.attention.base import StepLimits
from kernels.attention.select import select_backend
from kernels.attention_metadata import AttentionMetadata
from kernels.cache.pending_tokens import take_pending_tokens
from kernels.device_copy import use_device

__all__ = ["ModelWorker"]

logger = logging.getLogger(__name__)

MAX_PREALLOCATED_TOKENS = 4096  # of a step on a CPU: larger steps are rare, so their memory is not taken in advance
PROMPT_LOGITS_AT_ONCE = 64  # float32 logits of a whole prompt would take gigabytes


class ModelWorker:
    """A rank's model and KV cache. The constructor checks the config against the model and loads no weights.

    Attributes:
        model: the model, after ``load``.
        kv_cache: the KV cache, after ``allocate``.
        block_tables: the block tables of the last plan's batch, after ``allocate``.

    Raises:
        ConfigError: if an option does not fit the model, the backend or the machine.
        ModelLoadError: if the checkpoint cannot be served.
    """

    model: Decoder | CpuDecoder | TransformersDecoder
    kv_cache: KVCache
    block_tables: BlockTables

    def __init__(self, config: EngineConfig, rank: int = 0) -> None:
        self.config = config
        self.rank = rank
        self.device = resolve_device(config, rank)
        self.hf_config = load_hf_config(config.model)
        self.model_config = read_shape(self.hf_config, config.model_impl)
        self.dtype = self.model_config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        if config.quantization is not None and self.device.type != "cpu":
            raise ConfigError(
                f"quantization={config.quantization!r} is for CPUs, and the device is {self.device}; leave it out"
            )
        if config.batch_invariant and isinstance(self.model_config, TransformersConfig):
            raise ConfigError(
                "needs our own decoder, and this model is computed by transformers' modules",
                param="batch_invariant",
                value=True,
                remedy="leave it out",
            )
        self.max_model_len = self.model_config.context_length(config.max_model_len)
        self.model_config.check_options(
            max_model_len=self.max_model_len,
            tensor_parallel_size=config.tensor_parallel_size,
            quantization=config.quantization,
        )
        try:
            options = self.model_config.attention_options
            if config.batch_invariant:
                options |= {"batch_invariant"}
            self.backend = select_backend(self.device, self.dtype, config.attention_backend, options)
            self.block_size = config.block_size or self.backend.default_block_size
            self.backend.check_block_size(self.block_size)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if rank == 0:
            logger.info(
                "Using %s attention backend on %s, with blocks of %d tokens (%s)",
                self.backend.name,
                self.device,
                self.block_size,
                self.backend.why_chosen,
            )
        self.parallel = TensorParallel()
        self._graphs: DecodeGraphs | None = None
        self._graph_bytes = 0

    def load(self, rendezvous: str) -> None:
        """Join the other ranks at the file ``rendezvous`` and load this rank's shard of the weights.

        Raises:
            ModelLoadError: if the checkpoint cannot be served.
        """
        use_device(self.device)
        if self.device.type == "cpu":
            set_rank_threads(self.config, self.rank, has_cpu_kernels=self.backend.uses_cpu_kernels)
        self.parallel = TensorParallel.join(self.rank, self.config.tensor_parallel_size, self.device, rendezvous)
        self.model = self._load_model()

    def _load_model(self) -> Decoder | CpuDecoder | TransformersDecoder:
        show_progress = self.config.use_tqdm_on_load and self.rank == 0
        if isinstance(self.model_config, TransformersConfig):
            return load_transformers_decoder(
                self.config.model,
                self.model_config,
                dtype=self.dtype,
                device=self.device,
                use_cpu_kernels=self.backend.uses_cpu_kernels,
                show_progress=show_progress,
            )
        return load_decoder(
            self.config.model,
            self.hf_config,
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.max_model_len,
            parallel=self.parallel,
            quantization=self.config.quantization,
            batch_invariant=self.config.batch_invariant,
            use_cpu_kernels=self.backend.uses_cpu_kernels,
            show_progress=show_progress,
        )

    def abort(self) -> None:
        """Make collectives that wait for other ranks fail. May be called from any thread."""
        self.parallel.abort()

    # --- a step -------------------------------------------------------------------------------------------------

    @property
    def free_tokens(self) -> int | None:
        """Tokens that a step computes in about the time of one; None where that is unknown: without CPU kernels."""
        return self.model.free_tokens if isinstance(self.model, CpuDecoder) else None

    @torch.inference_mode()
    def execute(
        self,
        plan: StepPlan,
        on_prompt_logits: Callable[[torch.Tensor], None] | None = None,
        sampled: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Compute one step. Every rank must execute the same plans, and all of them in order.

        Args:
            on_prompt_logits: is called with the logits of the plan's ``prompt_logit_indices``, slice by slice, each
                [n, vocab_size], before this method returns; on rank 0 only.
            sampled: what the last step sampled, on the device; the plan may take token ids from it.

        Returns:
            On rank 0 the logits [num_logits, vocab_size] of the plan's ``logit_indices``; None if there are none.
        """
        use_device(self.device)
        self._copy_blocks(plan)
        if not len(plan.token_ids):  # a step may only swap blocks
            return None
        self.kv_cache.expect(plan.slot_mapping)
        if self._graphs is not None and (graph := self._graphs.find(plan)) is not None:
            logit_indices = graph.inputs.load(plan)
            plan.take_sampled(graph.inputs.token_ids, sampled)
            hidden = graph.replay()
            return self.model.compute_logits(hidden, logit_indices) if len(logit_indices) else None
        model_input = plan.to_device(self.block_tables, self.block_size)
        plan.take_sampled(model_input.token_ids, sampled)
        hidden = self._forward(model_input, self.kv_cache)
        if len(plan.prompt_logit_indices):
            self._compute_prompt_logits(hidden, model_input.prompt_logit_indices, on_prompt_logits)
        return self.model.compute_logits(hidden, model_input.logit_indices) if len(plan.logit_indices) else None

    def _copy_blocks(self, plan: StepPlan) -> None:
        if plan.swap_out:
            self.kv_cache.swap_out(plan.swap_out)
        if plan.swap_in:
            self.kv_cache.swap_in(plan.swap_in)
        if plan.block_copies:
            self.kv_cache.copy_blocks(plan.block_copies)

    def _forward(self, model_input: ModelInput, kv_cache: KVCache) -> torch.Tensor:
        context = ForwardContext(self.backend, model_input.metadata, kv_cache)
        hidden: torch.Tensor = self.model(model_input.token_ids, model_input.positions, context)
        return hidden

    def _compute_prompt_logits(
        self, hidden: torch.Tensor, indices: torch.Tensor, on_prompt_logits: Callable[[torch.Tensor], None] | None
    ) -> None:
        for part in torch.split(indices, PROMPT_LOGITS_AT_ONCE):  # a collective: every rank computes the same slices
            logits = self.model.compute_logits(hidden, part)
            if logits is not None and on_prompt_logits is not None:
                on_prompt_logits(logits)

    # --- warm-up ------------------------------------------------------------------------------------------------

    def warm_up_batches(self) -> list[tuple[int, int]]:
        """Return the batches of one sequence, as (query_len, seq_len), after which no step compiles a kernel."""
        limits = StepLimits(
            num_heads=self.model.attention.num_heads,
            num_kv_heads=self.model.attention.num_kv_heads,
            head_dim=self.model.attention.head_dim,
            dtype=self.dtype,
            device=self.device,
            sliding_windows=self.model.attention.sliding_windows,
            max_query_len=min(self.config.max_num_batched_tokens, self.max_model_len),
            max_seq_len=self.max_model_len,
        )
        return self.backend.warm_up_batches(limits)

    @torch.inference_mode()
    def warm_up(self, batches: list[tuple[int, int]]) -> None:
        """On a GPU, record the peak memory of a step; then run ``batches``, so that their kernels are compiled.

        Args:
            batches: rank 0's ``warm_up_batches``: the ranks run the same ones, because a step is a collective.
        """
        started = perf_counter()
        use_device(self.device)
        if self.device.type == "cuda":
            self._run_largest_step()
            token_ids = torch.full((1,), -1, device=self.device)
            take_pending_tokens(token_ids, torch.zeros_like(token_ids))
        if batches:
            cache = self._make_cache(1)
            for query_len, seq_len in batches:
                step = one_sequence(query_len, seq_len, block_size=self.block_size, device=self.device)
                self._forward(step, cache)
        if self.uses_graphs:
            self._graph_bytes = self._make_graphs(self._make_cache(1), self._make_tables()).capture()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            if self.rank == 0:
                logger.info("Warm-up took %.2f seconds, with %d batches", perf_counter() - started, 1 + len(batches))

    def _run_largest_step(self) -> None:
        """Run and sample the largest step once, so that torch records the peak of memory that it takes."""
        model_input = largest_step(
            self.config,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            num_prompt_logits=PROMPT_LOGITS_AT_ONCE,
            device=self.device,
        )
        num_sampled = min(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        sampler = Sampler(self.model_config.vocab_size, self.device)

        torch.cuda.reset_peak_memory_stats(self.device)
        hidden = self._forward(model_input, self._make_cache(1))
        self._compute_prompt_logits(hidden, model_input.prompt_logit_indices, sampler.warm_up_prompt_logprobs)
        if (logits := self.model.compute_logits(hidden, model_input.logit_indices)) is not None:
            sampler.warm_up_kernels(logits)
            after_drafts = logits[num_sampled:].clone()  # stays in memory while the other logits are sampled from
            del logits
            sampler.warm_up(num_sampled)
            del after_drafts

    # --- CUDA graphs --------------------------------------------------------------------------------------------

    @property
    def uses_graphs(self) -> bool:
        """Whether steps that only decode are replayed from CUDA graphs."""
        return self.device.type == "cuda" and self.why_eager is None

    @property
    def why_eager(self) -> str | None:
        """Why decodes are computed without CUDA graphs; None if they have them, or if the device is a CPU."""
        if self.device.type == "cpu":
            return None
        if self.config.enforce_eager:
            return "enforce_eager is set"
        if self.config.tensor_parallel_size > 1:
            return "their capture with the collectives of tensor-parallel ranks has not been tested"
        if not isinstance(self.model, Decoder):
            return "the modules of transformers may wait for the GPU"
        return None

    def capture_graphs(self) -> None:
        """Capture the graphs of decodes, with the KV cache and block tables that ``allocate`` has made.

        A graph holds the addresses of the cache, and the cache takes all memory that is left. So ``warm_up`` captures
        all graphs once with a cache of one block, to see what they take, and leaves that out of the cache.
        """
        use_device(self.device)
        if self.uses_graphs:
            started = perf_counter()
            self._graphs = self._make_graphs(self.kv_cache, self.block_tables)
            num_bytes = self._graphs.capture()
            logger.info(
                "Capturing CUDA graphs of %d batch sizes, up to %d, took %.2f seconds and %.2f GiB",
                len(self._graphs.sizes),
                self._graphs.sizes[-1],
                perf_counter() - started,
                num_bytes / 2**30,
            )
        elif self.why_eager is not None and self.rank == 0:
            logger.info("Decodes run without CUDA graphs: %s", self.why_eager)

    def _make_graphs(self, kv_cache: KVCache, block_tables: BlockTables) -> DecodeGraphs:
        def forward(token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
            hidden: torch.Tensor = self.model(token_ids, positions, ForwardContext(self.backend, metadata, kv_cache))
            return hidden

        return DecodeGraphs(CudaGraphDevice(self.device), forward, block_tables, self.block_size)

    # --- memory -------------------------------------------------------------------------------------------------

    @property
    def weight_bytes(self) -> int:
        """Size of this rank's weights; an embedding that stays mapped from its file does not count."""
        return self.model.num_bytes

    @property
    def bytes_per_block(self) -> int:
        """Size of a block's keys and values on this rank."""
        return self.block_size * bytes_per_token(self.model.layer_caches, self.dtype.itemsize)

    @property
    def _num_preallocated_tokens(self) -> int:
        """Largest step whose scratch memory is preallocated."""
        if not isinstance(self.model, CpuDecoder):
            return 0
        return min(self.config.max_num_batched_tokens, MAX_PREALLOCATED_TOKENS)

    def measure_num_blocks(self) -> int:
        """Return how many blocks fit in memory, at most what ``max_num_seqs`` sequences of full length can use.

        Raises:
            ConfigError: if not even one block fits.
        """
        max_useful = self.config.max_num_seqs * -(-self.max_model_len // self.block_size)
        if self.device.type == "cpu":
            memory = host_memory_for_cache(self.config)
        else:
            useful = max_useful * self.bytes_per_block
            memory = gpu_memory_for_cache(self.config, self.device, useful, self._graph_bytes)
        return blocks_that_fit(memory, self.bytes_per_block, max_useful)

    def allocate(self, num_blocks: int, num_host_blocks: int) -> None:
        """Allocate the KV cache, its block tables and the scratch memory of steps.

        Args:
            num_blocks: size of the device pool; equal on every rank, because the ranks share the block tables.
            num_host_blocks: size of the host pool; equal on every rank too.
        """
        if isinstance(self.model, CpuDecoder):
            self.model.reserve(min(self._num_preallocated_tokens, num_blocks * self.block_size))
        self.kv_cache = self._make_cache(num_blocks, num_host_blocks)
        self.block_tables = self._make_tables(num_blocks)

    def _make_tables(self, num_blocks: int | None = None) -> BlockTables:
        """Return tables for a pool of ``num_blocks``; None: of any size."""
        num_rows = min(self.config.max_num_seqs, self.config.max_num_batched_tokens)  # sequences in a batch, at most
        max_blocks = -(-self.max_model_len // self.block_size)
        return BlockTables(num_rows, min(max_blocks, num_blocks or max_blocks), self.device)

    def _make_cache(self, num_blocks: int, num_host_blocks: int = 0) -> KVCache:
        return KVCache(
            self.model.layer_caches,
            num_blocks=num_blocks,
            block_size=self.block_size,
            dtype=self.dtype,
            device=self.device,
            num_host_blocks=num_host_blocks,
            num_blocks_ahead=-(-2 * self._num_preallocated_tokens // self.block_size),
        )
