"""AppConfig: the arguments of build_app, typed and checked once.

Serve itself accepts any key silently; here an unknown key is an error that names the nearest known key. This module
imports neither Ray nor torch: the launcher checks a file with it before it starts a process.
"""

from __future__ import annotations

import dataclasses
import difflib
import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deployments.batch.options import BatchOptions
from deployments.parsers.detection import NONE
from deployments.parsers.reasoning_parsers import REASONING_PARSERS
from deployments.parsers.registry import RESPONSE_TEMPLATE
from deployments.parsers.tool_parsers import TOOL_PARSERS
from deployments.proxy.limits import ProxyLimits
from deployments.routing.options import RoutingOptions
from deployments.serve.gpu_share import default_gpus_per_engine, require_valid_gpus_per_engine
from deployments.serve.rank_placement import PlacementStrategy, require_valid_placement
from deployments.version import checkout_root, from_checkout
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.config.families.architectures import require_proven, require_served
from engine.models.config.files.config_json import context_length, num_positions, read_config_json, rope_of
from engine.models.config.files.text_parts import text_fields
from engine.models.gguf.file import gguf_name, is_gguf, open_gguf
from engine.pooling.checkpoint import PooledCheckpoint
from engine.pooling.config import PoolingConfig, PoolingType
from engine.pooling.info import PoolingTask
from engine.sampling_params import MAX_SEQUENCES
from engine.text.template_files import PACKAGED_TEMPLATES, find_chat_template
from engine.text.template_forms import LateSystemMessages
from engine.text.tokenizer import Tokenizer

__all__ = [
    "AppConfig",
    "AutoscalingOptions",
    "BatchesOptions",
    "LimitOptions",
    "LoggingOptions",
    "PoolingOptions",
    "ReplicaOptions",
    "RouterOptions",
    "TracingOptions",
    "checkout_root",
    "unknown_key_message",
]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model", "tekken.json")
# Of an encoder. A repository that has one has a tokenizer.json nearly always.
ENCODER_TOKENIZER_FILES = ("vocab.txt", "sentencepiece.bpe.model", "spiece.model")
GGUF_TOKENIZER = "tokenizer.ggml.model"

_ROUTING = RoutingOptions()
_PROXY = ProxyLimits()

Share = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ReplicaOptions(_Options):
    """Numbers of replicas, and the resources that Ray reserves for each."""

    num_engine_replicas: int = Field(default=1, ge=1)  # with autoscaling: at the start
    num_ingress_replicas: int = Field(default=1, ge=1)
    cpus_per_engine: Share = 0.5
    gpus_per_engine: Share | None = None
    placement_strategy: PlacementStrategy = "STRICT_PACK"  # of the ranks of an engine
    cpus_per_ingress: Share = 0.2


class LimitOptions(_Options):
    """Limits of one request and of all requests together, and time-outs."""

    max_queued_requests: int = Field(default=4096, ge=1)
    max_queued_prefill_tokens: int = Field(default=2**22, ge=1)
    max_queued_requests_per_engine: int = Field(default=1024, ge=1)
    max_queued_prefill_tokens_per_engine: int = Field(default=2**20, ge=1)
    max_concurrent_requests_per_engine: int = Field(default=1024, ge=1)
    max_connections: int = Field(default=_PROXY.max_connections, ge=1)
    max_connections_per_address: int = Field(default=_PROXY.max_connections_per_address, ge=0)  # 0: no limit
    header_timeout_s: float = Field(default=_PROXY.header_timeout_s, ge=1.0, allow_inf_nan=False)
    keep_alive_timeout_s: float = Field(default=_PROXY.keep_alive_timeout_s, ge=1.0, allow_inf_nan=False)
    send_timeout_s: float = Field(default=_PROXY.send_timeout_s, ge=1.0, allow_inf_nan=False)
    body_timeout_s: float = Field(default=10.0, ge=1.0, allow_inf_nan=False)
    max_body_bytes: int = Field(default=16 * 2**20, ge=1024)
    max_prompts_per_request: int = Field(default=1024, ge=1)
    max_texts_per_request: int = Field(default=2048, ge=1)
    max_n: int = Field(default=16, ge=1, le=MAX_SEQUENCES)
    max_best_of: int = Field(default=16, ge=1, le=MAX_SEQUENCES)
    max_stored_responses: int = Field(default=1000, ge=0)
    max_stored_response_bytes: int = Field(default=2**28, ge=0)
    stored_response_ttl_s: Seconds = 3600.0
    request_timeout_s: Seconds = 600.0
    stall_timeout_s: Seconds = 30.0
    max_migrations: int = Field(default=3, ge=0)
    graceful_shutdown_s: Seconds = 600.0
    health_check_period_s: Seconds = 5.0
    health_check_timeout_s: Seconds = 15.0

    @property
    def proxy(self) -> ProxyLimits:
        """Those that HAProxy keeps."""
        return ProxyLimits(**{field.name: getattr(self, field.name) for field in dataclasses.fields(ProxyLimits)})


class RouterOptions(_Options):
    """How requests are routed (deployments/routing/cost.py), and how much of their KV is copied to a neighbour."""

    first_token_weight: float = Field(default=_ROUTING.first_token_weight, ge=1.0, allow_inf_nan=False)
    kv_replication: int | None = Field(default=None, ge=16)  # tokens of an answer between two copies; None: no copies


class AutoscalingOptions(_Options):
    """When to add or remove engine replicas; see deployments/serve/autoscaling.py and Serve's options."""

    max_replicas: int | None = Field(default=None, ge=1)  # None: always replicas.num_engine_replicas
    min_replicas: int = Field(default=1, ge=0)
    target_queued_prefill_s: Seconds = 1.0
    target_kv_usage: float = Field(default=0.8, gt=0.0, le=1.0)
    upscale_delay_s: Share = 10.0
    downscale_delay_s: Share = 300.0

    @property
    def starts_from_zero(self) -> bool:
        """Whether an idle deployment has no engine, so that the first request waits for one."""
        return self.max_replicas is not None and not self.min_replicas

    def require_order(self, number: int) -> None:
        """Raise ConfigError unless the number of engines at the start lies between the bounds."""
        if self.max_replicas is not None and not self.min_replicas <= number <= self.max_replicas:
            bounds = f"args.autoscaling.min_replicas={self.min_replicas} and max_replicas={self.max_replicas}"
            raise ConfigError(f"args.replicas.num_engine_replicas={number} must lie between {bounds}")


class PoolingOptions(_Options):
    """How an embedding model is served, where that differs from what its files say; see engine/pooling/config.py."""

    pooling_type: PoolingType | None = None
    normalize: bool | None = None
    matryoshka: bool | list[Annotated[int, Field(ge=1)]] | None = None


class BatchesOptions(_Options):
    """Where files and batches are kept, and how much of them; see deployments/batch."""

    directory: str | None = Field(default=None, min_length=1)  # None: there are none
    max_file_bytes: int = Field(default=200 * 2**20, ge=1024)
    max_total_bytes: int = Field(default=10 * 2**30, ge=1024)
    max_lines: int = Field(default=50_000, ge=1)
    max_line_bytes: int = Field(default=4 * 2**20, ge=1024)
    file_ttl_s: float = Field(default=2_592_000.0, ge=3600.0, allow_inf_nan=False)
    max_slowdown: float = Field(default=1.1, ge=1.0, le=100.0)


class LoggingOptions(_Options):
    """The log line of each finished request; see deployments/request_log/log.py."""

    requests: bool = True
    prompts: bool = False
    prompt_characters: int = Field(default=200, ge=1, le=100_000)
    encoding: Literal["TEXT", "JSON"] = "TEXT"


class TracingOptions(_Options):
    """Where OpenTelemetry spans are sent, and for which requests; see deployments/request_log/tracing.py."""

    # None: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT, if one is set.
    otlp_endpoint: str | None = Field(default=None, pattern=r"^https?://[^/\s]+\S*$")
    # Of the requests whose caller has not decided. None: OTEL_TRACES_SAMPLER, by default all.
    sample_ratio: float | None = Field(default=None, ge=0.0, le=1.0)


class AppConfig(_Options):
    """The ``args`` of serve_config.yaml."""

    model: str = Field(min_length=1)
    model_name: str | None = Field(default=None, min_length=1)
    task: Literal["generate"] | PoolingTask = "generate"
    pooling: PoolingOptions = PoolingOptions()
    web: bool = True
    tool_parser: str | None = None  # None: as the chat template implies; "none": no tool calls are parsed
    reasoning_parser: str | None = None
    chat_template: str | None = Field(default=None, min_length=1)  # None: the checkpoint's
    late_system_messages: LateSystemMessages = "refuse"  # those that the chat template does not take
    strip_billing_header: bool = True  # of Claude Code, from prompts; see deployments/api/anthropic/attribution.py
    engine: dict[str, Any] = Field(default_factory=dict)
    replicas: ReplicaOptions = ReplicaOptions()
    limits: LimitOptions = LimitOptions()
    router: RouterOptions = RouterOptions()
    autoscaling: AutoscalingOptions = AutoscalingOptions()
    batches: BatchesOptions = BatchesOptions()
    logging: LoggingOptions = LoggingOptions()
    tracing: TracingOptions = TracingOptions()

    @classmethod
    def parse(cls, args: dict[str, Any]) -> AppConfig:
        """Check ``args``, including the engine's options.

        Raises:
            ConfigError: one line that names the first offending key, its value and the remedy.
        """
        try:
            config = cls.model_validate(args)
        except ValidationError as error:
            raise ConfigError(_describe(error)) from None
        _require_known("tool_parser", config.tool_parser, [*TOOL_PARSERS, RESPONSE_TEMPLATE])
        _require_known("reasoning_parser", config.reasoning_parser, REASONING_PARSERS)
        config.autoscaling.require_order(config.replicas.num_engine_replicas)
        engine = config.engine_config  # building it raises ConfigError for the engine's other options
        if engine.skip_tokenizer_init:
            raise ConfigError("skip_tokenizer_init=True is for the offline API; servers need a tokenizer, leave it out")
        if config.pooling_config is not None:
            config.pooling_config.check_engine(engine)
        if (config.task != "embed") and config.pooling != PoolingOptions():
            raise ConfigError(f"args.pooling is for task: embed, and args.task={config.task!r}; leave it out")
        if (number := config.router.kv_replication) is not None and engine.kv_transfer is False:
            raise ConfigError(f"args.router.kv_replication={number} needs several engines, with kv_transfer; remove it")
        require_valid_gpus_per_engine(config.replicas.gpus_per_engine, engine)
        require_valid_placement(config.replicas.placement_strategy, engine, config.replicas.cpus_per_engine)
        return config

    @property
    def pooling_config(self) -> PoolingConfig | None:
        """The further options of an engine that computes embeddings or scores; None: it generates text."""
        if self.task == "generate":
            return None
        lengths = self.pooling.matryoshka
        return PoolingConfig(
            task=self.task,
            pooling_type=self.pooling.pooling_type,
            normalize=self.pooling.normalize,
            matryoshka=tuple(lengths) if isinstance(lengths, list) else lengths,
        )

    @property
    def batch_options(self) -> BatchOptions | None:
        """Where and how batches are kept; None: not at all. A relative directory starts at the checkout."""
        if self.batches.directory is None:
            return None
        return BatchOptions(from_checkout(self.batches.directory), **self.batches.model_dump(exclude={"directory"}))

    @property
    def has_page(self) -> bool:
        """Whether there is a web page, whose playground needs generated text."""
        return self.web and self.task == "generate"

    @property
    def model_path(self) -> Path:
        """The checkpoint's directory or GGUF file. A relative path starts at the checkout."""
        return from_checkout(self.model)

    def load_tokenizer(self, path: Path) -> Tokenizer:
        """Return the tokenizer of a checkpoint, with the chat template of these options."""
        return Tokenizer(path, self._chat_template, self.late_system_messages)

    @property
    def _chat_template(self) -> str | None:
        """The file of the chat template, whose relative path starts at the checkout, or a packaged one's name."""
        if self.chat_template is None or self.chat_template in PACKAGED_TEMPLATES:
            return self.chat_template
        return str(from_checkout(self.chat_template))

    @property
    def min_engine_replicas(self) -> int:
        """The minimum number of engine replicas of a healthy deployment."""
        is_fixed = self.autoscaling.max_replicas is None
        return self.replicas.num_engine_replicas if is_fixed else self.autoscaling.min_replicas

    @property
    def has_several_engines(self) -> bool:
        """Whether there may be more than one engine replica at a time."""
        return max(self.replicas.num_engine_replicas, self.autoscaling.max_replicas or 1) > 1

    @property
    def served_name(self) -> str:
        """The name that clients give as ``model``."""
        return self.model_name or (gguf_name(self.model) if is_gguf(self.model) else self.model_path.name)

    @property
    def engine_config(self) -> EngineConfig:
        """The options of every engine replica; ``limits`` gives those of its queue."""
        options: dict[str, Any] = {
            "served_model_name": self.served_name,
            "max_queued_requests": self.limits.max_queued_requests_per_engine,
            "max_queued_prefill_tokens": self.limits.max_queued_prefill_tokens_per_engine,
        } | self.engine
        if options.get("kv_transfer") is None and not self.has_several_engines:
            options["kv_transfer"] = False
        match options.get("speculative_config"):
            case {"model": str(draft), **others} if draft:
                options["speculative_config"] = {**others, "model": str(from_checkout(draft))}
        if self.replicas.gpus_per_engine == 0 and options.get("device", "auto") == "auto":
            options["device"] = "cpu"  # Ray hides no GPUs from a replica that reserves none
        return EngineConfig.from_options(str(self.model_path), options)

    def gpus_per_engine(self, available: float) -> float:
        """Return the number of GPUs that Ray reserves for one engine, in a cluster with ``available`` GPUs.

        Raises:
            ConfigError: the GPUs are too few, and engines cannot share them.
        """
        if self.replicas.gpus_per_engine is not None:
            return self.replicas.gpus_per_engine
        return default_gpus_per_engine(
            self.engine_config,
            self.replicas.num_engine_replicas,
            available,
            autoscales=self.autoscaling.max_replicas is not None,
        )

    def require_model(self) -> None:
        """Check that the model's directory holds a checkpoint, and that its config.json allows the options.

        The metadata of a GGUF file stands for a config.json.

        Raises:
            ConfigError: a file is missing, or ``max_model_len`` exceeds the model's positions.
            ModelLoadError: config.json, chat_template.json or the GGUF file is malformed, or of a model that no engine
                serves.
        """
        path = self.model_path
        if self.pooling_config is not None:
            PooledCheckpoint.read(self.engine_config, self.pooling_config)
            self._require_tokenizer((*TOKENIZER_FILES, *ENCODER_TOKENIZER_FILES))
            return
        find_chat_template(path, self._chat_template)
        if is_gguf(path):
            self._require_servable(read_config_json(path))
            if GGUF_TOKENIZER not in open_gguf(path).metadata:
                raise ConfigError(f"model: '{self.model}' holds no tokenizer; give a GGUF file that has one")
            return
        if not path.is_dir():
            raise ConfigError(f"model: '{self.model}' is not a directory (looked for {path}); give a checkpoint's path")
        config_json = read_config_json(path)
        self._require_tokenizer(TOKENIZER_FILES)
        self._require_servable(text_fields(config_json))

    def _require_tokenizer(self, names: Iterable[str]) -> None:
        if not any((self.model_path / name).is_file() for name in names):
            raise ConfigError(f"model: '{self.model}' holds no tokenizer; add one of {', '.join(names)}")

    def _require_servable(self, config_json: dict[str, Any]) -> None:
        """Check what the fields of a model of text tell; others get their value from transformers, in the engine."""
        engine = self.engine_config
        match config_json.get("architectures"):
            case [str(architecture), *_] if engine.model_impl != "pagoda":
                require = require_proven if engine.model_impl == "transformers" else require_served
                require(architecture)
        if type(longest := config_json.get("max_position_embeddings")) is int:
            context_length(engine.max_model_len, num_positions(longest, rope_of(config_json)))


def _require_known(key: str, name: str | None, known: Iterable[str]) -> None:
    """Raise ConfigError unless ``name`` is None, one of ``known``, or turns the parser off."""
    if name is not None and name not in (names := [*known, NONE]):
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"give one of {', '.join(names)}"
        raise ConfigError(f"args.{key}={name!r} is unknown; {hint}")


def unknown_key_message(key: str, known: list[str], where: str) -> str:
    """Return the message for an unknown key in ``where``, with the key that was probably meant."""
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(sorted(known))}"
    return f"unknown key '{key}' in {where}; {hint}"


def _describe(error: ValidationError) -> str:
    """Return one line for the first of pydantic's errors."""
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    where = ".".join(["args", *path[:-1]])
    if first["type"] == "extra_forbidden":
        return unknown_key_message(path[-1], _known_keys(path[:-1]), where)
    if first["type"] == "missing":
        return f"{where} lacks '{path[-1]}'; add it (serve_config.yaml shows every key)"
    return f"{'.'.join(['args', *path])}={reprlib.repr(first['input'])}: {first['msg'][0].lower()}{first['msg'][1:]}"


def _known_keys(path: list[str]) -> list[str]:
    model: Any = AppConfig
    for part in path:
        annotation = model.model_fields[part].annotation
        assert isinstance(annotation, type)
        model = annotation
    return list(model.model_fields)
