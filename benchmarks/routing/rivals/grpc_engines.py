"""GrpcEngines: servers of SMG's gRPC interface to vLLM, with KV events and loads on their event streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2 as messages
from smg_grpc_proto.generated import common_pb2 as common

from benchmarks.routing.rivals.answers import Answers
from benchmarks.routing.rivals.prompts import Prompts, signed
from benchmarks.routing.rivals.side import Cluster, Events

__all__ = ["GrpcEngines"]

SERVICE = messages.DESCRIPTOR.services_by_name["VllmEngine"].full_name
MAX_NUM_SEQS = 256
MAX_CONTEXT = 262_144
_TIER = 1  # of the cache: GPU


class GrpcEngines:
    """A server for each replica."""

    path = "/generate"  # of the router

    def __init__(self, cluster: Cluster, answers: Answers, prompts: Prompts, tokenizer: str) -> None:
        self.cluster, self.answers, self.prompts, self.tokenizer = cluster, answers, prompts, tokenizer
        self.urls: list[str] = []
        self.streams: dict[int, asyncio.Queue[Any]] = {}  # event streams that the router has opened
        self._servers: list[Any] = []
        self._num_batches = [0] * len(cluster.replicas)
        self._sent_loads: list[dict[str, float] | None] = [None] * len(cluster.replicas)
        self._num_samples = 0

    async def start(self) -> None:
        """Listen on free ports."""
        for number in range(len(self.cluster.replicas)):
            server = grpc.aio.server(options=[("grpc.max_receive_message_length", 1 << 28)])
            server.add_generic_rpc_handlers((self._handlers(number),))
            self.urls.append(f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
            await server.start()
            self._servers.append(server)

    def body(self, job: int, prompt: str | list[int], output_tokens: int) -> dict[str, Any]:
        """Return the body of a request to the router."""
        sampling = {"max_new_tokens": output_tokens}
        return {"model": "m", "input_ids": prompt, "stream": True, "rid": f"job-{job}", "sampling_params": sampling}

    def _handlers(self, number: int) -> Any:
        engine = _Engine(self, number)
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        methods = {
            "HealthCheck": (unary, engine.health, messages.HealthCheckRequest),
            "GetModelInfo": (unary, engine.model_info, messages.GetModelInfoRequest),
            "GetServerInfo": (unary, engine.server_info, messages.GetServerInfoRequest),
            "GetLoads": (unary, engine.loads, messages.GetLoadsRequest),
            "Abort": (unary, engine.abort, messages.AbortRequest),
            "Generate": (stream, engine.generate, messages.GenerateRequest),
            "SubscribeKvEvents": (stream, engine.subscribe, common.SubscribeKvEventsRequest),
        }
        handlers = {
            name: make(method, request.FromString, lambda reply: reply.SerializeToString())
            for name, (make, method, request) in methods.items()
        }
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def publish(self, events: Sequence[Events]) -> bool:
        """Send events, and loads that have changed; return whether anything was sent."""
        by_replica: dict[int, list[Any]] = {}
        for event in events:
            by_replica.setdefault(event.replica, []).extend(self._events(event))
        is_sent = False
        for number, load in enumerate(self.cluster.loads):
            batch = by_replica.get(number, [])
            if not batch and load == self._sent_loads[number]:
                continue
            self._sent_loads[number] = load
            self._num_samples += 1
            self._num_batches[number] += bool(batch) or not self._num_batches[number]
            for event_id, item in enumerate(batch, 1):
                item.event_id = event_id
            self.streams[number].put_nowait(
                common.KvEventBatch(
                    sequence_number=self._num_batches[number],
                    timestamp=time.time(),
                    events=batch,
                    load=self._engine_load(load, load_only=not batch),
                )
            )
            is_sent = True
        return is_sent

    def _events(self, event: Events) -> list[Any]:
        events = []
        if event.stored:
            stored = common.KvBlocksStored(tier=_TIER, medium="GPU", blocks=[self._block(b) for b in event.stored])
            parent = self.prompts.parent[event.stored[0]]
            if parent is not None:
                stored.parent_block_hash = signed(parent)
            events.append(common.KvCacheEvent(stored=stored))
        if event.removed:
            hashes = [signed(block) for block in event.removed]
            removed = common.KvBlocksRemoved(block_hashes=hashes, tier=_TIER, medium="GPU")
            events.append(common.KvCacheEvent(removed=removed))
        return events

    def _block(self, block: int) -> Any:
        size, tokens = self.cluster.block_size, self.prompts.block_tokens(block)
        return common.KvBlock(block_hash=signed(block), token_ids=tokens, block_size=size)

    def _engine_load(self, load: dict[str, float], *, load_only: bool) -> Any:
        usage = self.usage(load)
        return common.EngineLoad(
            running_requests=int(load["running"]),
            waiting_requests=int(load["waiting"]),
            waiting_uncached_tokens=int(load["waiting_tokens"]),
            token_usage=usage,
            active_token_usage=usage,
            gen_throughput=load["tokens_per_s"],
            max_running_requests=MAX_NUM_SEQS,
            sample=self._num_samples,
            load_only=load_only,
        )

    def usage(self, load: dict[str, float]) -> float:
        """Return the share of the cache's blocks that are in use."""
        return min(1.0, load["used_blocks"] / self.cluster.cache_blocks)

    async def close(self) -> None:
        """Close the servers."""
        for server in self._servers:
            await server.stop(0)


class _Engine:
    """The methods of one server."""

    def __init__(self, engines: GrpcEngines, number: int) -> None:
        self.engines, self.number = engines, number

    async def health(self, request: Any, context: Any) -> Any:
        self.engines.answers.other_calls["HealthCheck"] += 1
        return messages.HealthCheckResponse(healthy=True, message="ok")

    async def model_info(self, request: Any, context: Any) -> Any:
        return messages.GetModelInfoResponse(
            model_path=self.engines.tokenizer,
            tokenizer_path=self.engines.tokenizer,
            is_generation=True,
            max_context_length=MAX_CONTEXT,
            max_req_input_len=MAX_CONTEXT,
            vocab_size=100_000_000,
            served_model_name="m",
            model_type="llama",
            architectures=["LlamaForCausalLM"],
            eos_token_ids=[1],
        )

    async def server_info(self, request: Any, context: Any) -> Any:
        return messages.GetServerInfoResponse(
            server_type="vllm-grpc",
            data_parallel_size=1,
            block_size=self.engines.cluster.block_size,
            max_num_seqs=MAX_NUM_SEQS,
            uptime_seconds=100.0,
        )

    async def loads(self, request: Any, context: Any) -> Any:
        self.engines.answers.other_calls["GetLoads"] += 1
        cluster = self.engines.cluster
        if not cluster.loads:
            return messages.GetLoadsResponse(version="0.31.0", dp_rank_count=1)
        load = cluster.loads[self.number]
        running, waiting = int(load["running"]), int(load["waiting"])
        row = messages.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_total_reqs=running + waiting,
            num_used_tokens=int(load["used_blocks"]) * cluster.block_size,
            max_total_num_tokens=cluster.cache_blocks * cluster.block_size,
            token_usage=self.engines.usage(load),
            gen_throughput=load["tokens_per_s"],
            max_running_requests=MAX_NUM_SEQS,
            num_waiting_uncached_tokens=int(load["waiting_tokens"]),
        )
        return messages.GetLoadsResponse(version="0.31.0", dp_rank_count=1, loads=[row])

    async def abort(self, request: Any, context: Any) -> Any:
        self.engines.answers.other_calls["Abort"] += 1
        return messages.AbortResponse()

    async def subscribe(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await context.send_initial_metadata(())
        stream = self.engines.streams[self.number] = asyncio.Queue()
        while True:
            yield await stream.get()

    async def generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        answer = self.engines.answers.arrive(int(request.request_id.rsplit("-", 1)[-1]), self.number)
        if answer is None:
            await context.abort(grpc.StatusCode.INTERNAL, "this request is being answered")
            return
        size = len(request.tokenized.input_ids)
        await answer.first_sent.wait()
        chunk = messages.GenerateStreamChunk(token_ids=[5], prompt_tokens=size, completion_tokens=1)
        yield messages.GenerateResponse(chunk=chunk)
        await answer.end_sent.wait()
        end = messages.GenerateComplete(
            output_ids=[5, 6], finish_reason="stop", prompt_tokens=size, completion_tokens=2
        )
        yield messages.GenerateResponse(complete=end)
