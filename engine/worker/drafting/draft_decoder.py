"""DraftDecoder: the draft model's shape and weights. It shares pages with the model whose tokens it drafts.

Its layers are declared after those of the large model, in the same pool of blocks. So whatever moves a block moves the
draft model's part of it: sharing by prefix, copies, swaps, and transfers to disks and replicas.
"""

from __future__ import annotations

import logging
from time import perf_counter

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv.kv_cache import CachedLayers, KVCache
from engine.kv.layer_cache import CacheDtype, LayerCache, PrefixMark, State, in_dtype, joined, without_windows
from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.files.vocabulary import require_same_vocabulary
from engine.models.config.model_config import ModelConfig
from engine.models.config.model_shape import ModelShape
from engine.models.decoder.cpu_decoder import CpuDecoder
from engine.models.decoder.decoder import Decoder
from engine.models.decoder.forward_context import ForwardContext
from engine.models.decoder.loader import load_decoder
from engine.models.tensor_parallel import TensorParallel
from engine.options.speculative_config import SpeculativeConfig
from engine.worker.step_plan import ModelInput
from kernels.attention.base import AttentionBackend, StepLimits
from kernels.attention.select import select_backend
from kernels.attention_metadata import AttentionMetadata
from kernels.linear.registry import quantization_devices

__all__ = ["DraftDecoder"]

logger = logging.getLogger(__name__)


class DraftDecoder:
    """A draft model. The constructor checks it against the large model, and loads no weights.

    Args:
        config: the engine's options, with the draft model in ``speculative_config``.
        options: those of ``speculative_config``, with a ``model``.
        target: the shape of the large model.
        dtype: of the large model, in which this one is computed too.
        device: on which it is computed.
        max_model_len: of the large model.
        block_size: tokens of a block.
        kv_cache_dtype: of the large model's keys and values, in which this one's are kept too: they share blocks.

    Attributes:
        max_len: tokens of the longest sequence that it drafts for.

    Raises:
        ConfigError: if it cannot draft for the large model.
        ModelLoadError: if the checkpoint cannot be served.
    """

    model: Decoder | CpuDecoder

    def __init__(
        self,
        config: EngineConfig,
        options: SpeculativeConfig,
        target: ModelShape,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        block_size: int,
        kv_cache_dtype: CacheDtype = "auto",
    ) -> None:
        assert options.model is not None
        self._path, self._quantization = options.model, options.quantization
        self._kv_cache_dtype: CacheDtype = kv_cache_dtype
        self.dtype, self._device, self._show_progress = dtype, device, config.use_tqdm_on_load
        self.hf_config = load_hf_config(self._path)
        self.shape = ModelConfig.from_hf(self.hf_config)
        self._check(config, target)
        self.max_len = min(max_model_len, self.shape.context_length(None))
        self.shape.check_options(max_model_len=self.max_len, tensor_parallel_size=1, quantization=options.quantization)
        self.backend = self._select_backend(config, block_size)

    def _check(self, config: EngineConfig, target: ModelShape) -> None:
        if self.shape.vocab_size != target.vocab_size:
            raise _refused(
                self._path,
                f"has a vocabulary of {self.shape.vocab_size} tokens, and that of '{config.model}' has "
                f"{target.vocab_size}",
                "give a draft model with the same vocabulary",
            )
        if self._device.type not in (devices := quantization_devices(self._quantization)):
            raise _refused(
                str(self._quantization),
                f"runs on {' and '.join(devices)}, and the device is {self._device}",
                "leave it out",
                "quantization",
            )
        if not config.skip_tokenizer_init:
            require_same_vocabulary(config.model, self._path)
        if self._kv_cache_dtype == "fp8" and self.shape.latent is not None:
            raise _refused(
                self._path,
                f"caches latents, and kv_cache_dtype={config.kv_cache_dtype} is for keys and values",
                "leave kv_cache_dtype out, or give another draft model",
            )
        if any(isinstance(layer, State) for layer in self.shape.layer_caches):
            raise _refused(
                self._path,
                "has recurrent layers, whose states cannot follow rejected drafts back",
                "give a draft model that has attention only",
            )

    def _select_backend(self, config: EngineConfig, block_size: int) -> AttentionBackend:
        wanted = self.shape.attention_options | ({"fp8"} if self._kv_cache_dtype == "fp8" else set())
        try:
            backend = select_backend(self._device, self.dtype, config.attention_backend, wanted)
            backend.check_block_size(block_size)
        except ValueError as error:
            raise _refused(self._path, str(error), "give another draft model") from error
        return backend

    def load(self) -> None:
        """Load the weights.

        Raises:
            ModelLoadError: if the checkpoint cannot be served.
        """
        started = perf_counter()
        self.model = load_decoder(
            self._path,
            self.hf_config,
            dtype=self.dtype,
            device=self._device,
            max_model_len=self.max_len,
            parallel=TensorParallel(),
            quantization=self._quantization,
            use_cpu_kernels=self.backend.uses_cpu_kernels,
            has_fp8_cache=self._kv_cache_dtype == "fp8",
            show_progress=self._show_progress,
        )
        size = self.model.num_bytes / 2**20
        logger.info("Draft model: loading took %.2f MiB and %.2f seconds", size, perf_counter() - started)

    def joined_with(self, layers: tuple[LayerCache, ...]) -> tuple[LayerCache, ...]:
        """Return what the large model caches, then what this one caches of the same tokens, then its marks on a CPU.

        Of windows all tokens are kept. Those that a window has passed are freed with the large model's, at other times
        than this one computes. On a GPU the marks are a table on the host.
        """
        marks = (PrefixMark(self.dtype.itemsize),) if self._device.type == "cpu" else ()
        own = in_dtype(without_windows(self.shape.layer_caches), self._kv_cache_dtype)
        return (*joined(layers, own), *marks)

    def part_of(self, cache: KVCache) -> CachedLayers:
        """Return this model's part of a cache of both models."""
        end = len(cache.layers) - (self._device.type == "cpu")
        return cache.part(end - len(self.shape.layer_caches), end)

    @property
    def free_tokens(self) -> int | None:
        """As of ModelShard."""
        return self.model.free_tokens if isinstance(self.model, CpuDecoder) else None

    def warm_up_batches(self, max_num_batched_tokens: int) -> list[tuple[int, int]]:
        """Return the batches of one sequence, as (query_len, seq_len), after which no pass compiles a kernel."""
        return self.backend.warm_up_batches(
            StepLimits(
                dtype=self.dtype,
                device=self._device,
                windows=self.model.attention.windows,
                max_query_len=min(max_num_batched_tokens, self.max_len),
                max_seq_len=self.max_len,
            )
        )

    def forward(self, model_input: ModelInput, cache: CachedLayers) -> torch.Tensor:
        """Return the hidden states [num_tokens, hidden_size] of a batch, whose keys and values go to ``cache``."""
        context = ForwardContext(self.backend, model_input.metadata, cache)
        hidden: torch.Tensor = self.model(model_input.token_ids, model_input.positions, context)
        return hidden

    @torch.inference_mode()
    def compute(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        cache: CachedLayers,
        logit_indices: torch.Tensor,
    ) -> torch.Tensor | None:
        """Compute a batch; its keys and values go to ``cache``.

        Args:
            token_ids, positions: int64 [num_tokens].
            logit_indices: int64 [n]: tokens whose logits are wanted.

        Returns:
            Their logits, float32 [n, vocab_size], valid until the next call; None if there are none.
        """
        hidden = self.model(token_ids, positions, ForwardContext(self.backend, metadata, cache))
        return self.model.compute_logits(hidden, logit_indices) if len(logit_indices) else None


def _refused(value: str, problem: str, remedy: str, part: str = "model") -> ConfigError:
    return ConfigError(problem, param="speculative_config", part=part, value=value, remedy=remedy)
