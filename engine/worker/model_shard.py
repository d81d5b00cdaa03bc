"""ModelShard: one tensor-parallel rank's shard of the model, with what computes it.

It knows how the options fit the model, computes steps on a KV cache that it is given, and says what memory its blocks
take. ``ModelWorker`` holds the cache and executes plans.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv.block_tables import BlockTables
from engine.kv.kv_cache import KVCache
from engine.kv.layer_cache import CacheDtype, LayerCache, in_dtype
from engine.kv.page_maps import PageMap
from engine.kv.pool_sizes import PageSizes, PoolSizes
from engine.kv.shared_host import HostShare
from engine.models.adapter.decoder import TransformersDecoder
from engine.models.adapter.loader import load_transformers_decoder
from engine.models.checkpoint.checkpoint import open_checkpoint
from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.implementation import read_shape
from engine.models.config.model_config import ModelConfig
from engine.models.config.transformers_config import TransformersConfig
from engine.models.decoder.cpu_decoder import CpuDecoder
from engine.models.decoder.decoder import Decoder
from engine.models.decoder.forward_context import ForwardContext
from engine.models.decoder.loader import load_decoder
from engine.models.tensor_parallel import TensorParallel
from engine.worker.device import resolve_device
from engine.worker.drafting.draft_decoder import DraftDecoder
from engine.worker.drafting.eagle3_decoder import Eagle3Decoder
from engine.worker.drafting.hidden_state_decoder import HiddenStateDecoder
from engine.worker.drafting.mtp_decoder import MtpDecoder
from engine.worker.rank_sizes import require_rank_size
from engine.worker.step_plan import ModelInput
from kernels.attention.base import AttentionBackend, StepLimits
from kernels.attention.select import select_backend
from kernels.cpu.memory import return_freed_memory
from kernels.linear.registry import quantization_devices

__all__ = ["MAX_PREALLOCATED_TOKENS", "PROMPT_LOGITS_AT_ONCE", "ModelShard"]

logger = logging.getLogger(__name__)

MAX_PREALLOCATED_TOKENS = 4096  # of a step on a CPU: larger steps are rare, so their memory is not preallocated
# AWQ and GPTQ checkpoints are often in float16, whatever the model had.
_TOO_LARGE_FOR_FLOAT16 = {
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3nForCausalLM",
    "Gemma4ForCausalLM",
    "Gemma4UnifiedForCausalLM",
    "Glm4ForCausalLM",
}
PROMPT_LOGITS_AT_ONCE = 64  # float32 logits of a whole prompt would take gigabytes


class ModelShard:
    """A rank's shard. The constructor checks the config against the model and loads no weights.

    Args:
        config: options of the engine.
        rank: this one.
        owns_host: no other rank runs on this host, so its first GPU is this rank's; else they share its GPUs.

    Attributes:
        model: the model, after ``load``.
        kv_cache_dtype: of keys and values.
        draft: the draft model, whose weights ``load`` loads; None if the config has none.
        draft_head: the layer of multi-token prediction, or the EAGLE-3 head, likewise.

    Raises:
        ConfigError: if an option does not fit the model, the backend or the machine.
        ModelLoadError: if the checkpoint cannot be served.
    """

    model: Decoder | CpuDecoder | TransformersDecoder

    def __init__(self, config: EngineConfig, rank: int, *, owns_host: bool = False) -> None:
        self.config = config
        self.rank = rank
        self.device = resolve_device(config, None if owns_host else rank)
        self.hf_config = load_hf_config(config.model)
        self.model_config = read_shape(self.hf_config, config.model_impl, config.tensor_parallel_size)
        self.dtype = self._choose_dtype()
        self.kv_cache_dtype: CacheDtype = "auto" if config.kv_cache_dtype == "auto" else "fp8"
        self._check_options()
        self.max_model_len = self.model_config.context_length(config.max_model_len)
        if isinstance(self.model_config, ModelConfig):
            require_rank_size(config, self.model_config, self.dtype, self.device)
        self.model_config.check_options(
            max_model_len=self.max_model_len,
            tensor_parallel_size=config.tensor_parallel_size,
            quantization=config.quantization,
        )
        self.backend = self._select_backend()
        self.block_size = config.block_size or self.backend.default_block_size
        try:
            self.backend.check_block_size(self.block_size)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.draft = self._draft_decoder()
        self.draft_head = self._draft_head()
        if rank == 0:
            logger.info(
                "Using %s attention backend on %s, with blocks of %d tokens (%s)",
                self.backend.name,
                self.device,
                self.block_size,
                self.backend.why_chosen,
            )

    def _choose_dtype(self) -> torch.dtype:
        """Return the dtype of the options, else the checkpoint's, or bfloat16 if that is too narrow for the model."""
        if self.config.dtype != "auto":
            return getattr(torch, self.config.dtype)  # type: ignore[no-any-return]
        dtype, architecture = self._checkpoint_dtype(), self.model_config.architecture
        if dtype == torch.float16 and architecture in _TOO_LARGE_FOR_FLOAT16:
            logger.warning("The hidden states of %s do not fit float16; bfloat16 is used", architecture)
            return torch.bfloat16
        return dtype

    def _checkpoint_dtype(self) -> torch.dtype:
        """Return the dtype of config.json, else that of most of the weights."""
        if self.model_config.dtype is not None:
            return self.model_config.dtype
        with open_checkpoint(self.config.model) as checkpoint:
            return checkpoint.main_dtype

    def _check_options(self) -> None:
        """Raise ConfigError for an option that this device or this model's implementation lacks."""
        quantization = self.config.quantization
        if self.device.type not in (devices := quantization_devices(quantization)):
            raise ConfigError(
                f"runs on {' and '.join(devices)}, and the device is {self.device}",
                param="quantization",
                value=quantization,
                remedy="leave it out",
            )
        if self.kv_cache_dtype == "fp8":
            self._require_fp8_cache()
        if self.config.batch_invariant and isinstance(self.model_config, TransformersConfig):
            raise ConfigError(
                "needs our own decoder, and this model is computed by transformers' modules",
                param="batch_invariant",
                value=True,
                remedy="leave it out",
            )

    def _require_fp8_cache(self) -> None:
        """Raise ConfigError if keys and values cannot be FP8 on this device, or for this model."""
        problem = None
        if self.device.type == "cpu":
            problem = "runs on GPUs, and the device is cpu"
        elif isinstance(self.model_config, ModelConfig) and self.model_config.latent is not None:
            problem = f"is for keys and values, and {self.model_config.architecture} caches latents"
        if problem is not None:
            value = self.config.kv_cache_dtype
            raise ConfigError(problem, param="kv_cache_dtype", value=value, remedy="leave it out")

    def _select_backend(self) -> AttentionBackend:
        options = self.model_config.attention_options
        if self.kv_cache_dtype == "fp8":
            options |= {"fp8"}
        if self.config.batch_invariant:
            options |= {"batch_invariant"}
        try:
            return select_backend(self.device, self.dtype, self.config.attention_backend, options)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def _draft_decoder(self) -> DraftDecoder | None:
        options = self.config.speculation
        if options is None or options.method != "draft_model":
            return None
        return DraftDecoder(
            self.config,
            options,
            self.model_config,
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            kv_cache_dtype=self.kv_cache_dtype,
        )

    def _draft_head(self) -> HiddenStateDecoder | None:
        options = self.config.speculation
        heads: dict[str, type[MtpDecoder] | type[Eagle3Decoder]] = {"mtp": MtpDecoder, "eagle3": Eagle3Decoder}
        if options is None or options.method not in heads:
            return None
        return heads[options.method](
            self.config,
            self.model_config,
            dtype=self.dtype,
            device=self.device,
            backend=self.backend,
            max_model_len=self.max_model_len,
        )

    def load(self, parallel: TensorParallel) -> None:
        """Load the weights of a rank of ``parallel``, and those of what drafts for it, if anything does.

        Raises:
            ModelLoadError: if the checkpoint cannot be served.
        """
        self.model = self._load_model(parallel)
        if self.draft is not None:
            self.draft.load()
        if self.draft_head is not None:
            self.draft_head.load(self.model)
        return_freed_memory()  # the threads that read weights have left some of theirs, each in an arena of its own

    def _load_model(self, parallel: TensorParallel) -> Decoder | CpuDecoder | TransformersDecoder:
        show_progress = self.config.use_tqdm_on_load and self.rank == 0
        if isinstance(self.model_config, TransformersConfig):
            return load_transformers_decoder(
                self.config.model,
                self.model_config,
                dtype=self.dtype,
                device=self.device,
                parallel=parallel,
                use_cpu_kernels=self.backend.uses_cpu_kernels,
                show_progress=show_progress,
            )
        return load_decoder(
            self.config.model,
            self.hf_config,
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.max_model_len,
            parallel=parallel,
            quantization=self.config.quantization,
            batch_invariant=self.config.batch_invariant,
            use_cpu_kernels=self.backend.uses_cpu_kernels,
            has_fp8_cache=self.kv_cache_dtype == "fp8",
            show_progress=show_progress,
        )

    # --- a step -------------------------------------------------------------------------------------------------

    def forward(self, model_input: ModelInput, kv_cache: KVCache) -> torch.Tensor:
        """Return the hidden states [num_tokens, hidden_size] of a batch, whose keys and values go to ``kv_cache``."""
        windows = dict(zip(kv_cache.windows, model_input.windows, strict=True))
        own = kv_cache.part(0, len(self.model.layer_caches))
        head, token_ids = self.draft_head, model_input.token_ids
        aux = None if head is None else head.new_aux_states(len(token_ids))
        context = ForwardContext(
            self.backend, model_input.metadata, own, windows, model_input.recurrent, aux_states=aux
        )
        hidden: torch.Tensor = self.model(token_ids, model_input.positions, context)
        if head is not None:
            head.keep(hidden if aux is None else aux.states, model_input.metadata.slot_mapping, kv_cache)
        return hidden

    def compute_prompt_logits(
        self, hidden: torch.Tensor, indices: torch.Tensor, on_prompt_logits: Callable[[torch.Tensor], None] | None
    ) -> None:
        """Compute the logits of some tokens of ``hidden`` slice by slice; on rank 0 call ``on_prompt_logits``."""
        for part in torch.split(indices, PROMPT_LOGITS_AT_ONCE):  # a collective: every rank computes the same slices
            logits = self.model.compute_logits(hidden, part)
            if logits is not None and on_prompt_logits is not None:
                on_prompt_logits(logits)

    def warm_up_batches(self) -> list[tuple[int, int]]:
        """Return the batches of one sequence, as (query_len, seq_len), after which no step compiles a kernel."""
        limits = StepLimits(
            dtype=self.dtype,
            device=self.device,
            windows=self.model.attention.windows,
            max_query_len=min(self.config.tokens_per_step, self.max_model_len),
            max_seq_len=self.max_model_len,
        )
        return self.backend.warm_up_batches(limits)

    @property
    def free_tokens(self) -> int | None:
        """Tokens that a step computes in about the time of one; None where that is unknown: without CPU kernels."""
        return self.model.free_tokens if isinstance(self.model, CpuDecoder) else None

    # --- memory -------------------------------------------------------------------------------------------------

    @property
    def weight_bytes(self) -> int:
        """Size of this rank's weights; an embedding that stays mapped from its file does not count."""
        return self.model.num_bytes

    @property
    def layer_caches(self) -> tuple[LayerCache, ...]:
        """What the layers of this rank's model cache, then those of what drafts for it."""
        return self.declared(self.model.layer_caches)

    def declared(self, layers: Sequence[LayerCache]) -> tuple[LayerCache, ...]:
        """Return what ``layers`` of the model cache in this engine, then those of what drafts for it."""
        own, drafting = in_dtype(layers, self.kv_cache_dtype), self.draft or self.draft_head
        return own if drafting is None else drafting.joined_with(own)

    @property
    def page_sizes(self) -> PageSizes:
        """Sizes of the pages of this rank's KV cache."""
        return PageSizes.of(self.layer_caches, self.block_size, self.dtype.itemsize)

    @property
    def num_preallocated_tokens(self) -> int:
        """Largest step whose scratch memory is preallocated."""
        if not isinstance(self.model, CpuDecoder):
            return 0
        return min(self.config.tokens_per_step, MAX_PREALLOCATED_TOKENS)

    def make_tables(self, num_blocks: int | None = None) -> BlockTables:
        """Return block tables for a pool of ``num_blocks``; None: of any size."""
        num_rows = min(self.config.max_num_seqs, self.config.tokens_per_step)  # sequences in a batch, at most
        max_blocks = -(-self.max_model_len // self.block_size)
        return BlockTables(num_rows, min(max_blocks, num_blocks or max_blocks), self.device)

    def make_page_maps(self, cache: KVCache) -> list[PageMap]:
        """Return a map for each window of ``cache``, without pages."""
        return [PageMap(cache.sizes.num_blocks, self.device) for _ in cache.windows]

    def make_cache(self, sizes: PoolSizes | None = None, shares: Sequence[HostShare] = ()) -> KVCache:
        """Return a KV cache for what the layers declare.

        Args:
            sizes: of its pools; None: one page each.
            shares: the host pools that all ranks share, if they do.
        """
        return KVCache(
            self.layer_caches,
            sizes or self.page_sizes.one_page_each,
            block_size=self.block_size,
            dtype=self.dtype,
            device=self.device,
            num_blocks_ahead=-(-2 * self.num_preallocated_tokens // self.block_size),
            rank=self.rank,
            shares=shares,
        )
