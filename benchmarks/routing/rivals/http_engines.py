"""HttpEngines: HTTP servers that answer like vLLM's, when the simulation says so."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from benchmarks.routing.rivals.answers import Answers
from benchmarks.routing.rivals.side import Cluster

__all__ = ["MODEL", "HttpEngines"]

MODEL = "m"
PATH = "/v1/completions"
_HEALTH = ("/health", "/health_generate", "/healthz", "/ping", "/readiness", "/liveness")
_MODELS = {"id": MODEL, "object": "model", "created": 1, "owned_by": "vllm", "root": MODEL, "max_model_len": 262_144}
_ENGINE = web.AppKey("engine", int)


class HttpEngines:
    """A server for each replica."""

    path = PATH

    def __init__(self, cluster: Cluster, answers: Answers) -> None:
        self.cluster, self.answers = cluster, answers
        self.urls: list[str] = []
        self._runners: list[web.AppRunner] = []

    async def start(self) -> None:
        """Listen on free ports."""
        for number in range(len(self.cluster.replicas)):
            app = web.Application(client_max_size=1 << 28)
            app[_ENGINE] = number
            app.router.add_route("*", "/{tail:.*}", self._handle)
            runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
            self._runners.append(runner)
            self.urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")

    def body(self, job: int, prompt: str | list[int], output_tokens: int) -> dict[str, Any]:
        """Return the body of a request to the router."""
        return {"model": MODEL, "prompt": prompt, "stream": True, "max_tokens": output_tokens, "user": str(job)}

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.method == "POST" and request.path == PATH:
            return await self._complete(request)
        self.answers.other_calls[f"{request.method} {request.path}"] += 1
        return self._get(request.path, request.app[_ENGINE])

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        job = int((await request.json())["user"])
        answer = self.answers.arrive(job, request.app[_ENGINE])
        if answer is None:
            return web.json_response({"error": "this request is being answered"}, status=500)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.first_sent.wait()
        await response.prepare(request)
        await response.write(_chunk(job, None))
        await answer.end_sent.wait()
        await response.write(_chunk(job, "stop") + b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _get(self, path: str, engine: int) -> web.Response:
        if path in _HEALTH:
            return web.json_response({"status": "ok"})
        if path == "/v1/models":
            return web.json_response({"object": "list", "data": [_MODELS]})
        if path == "/version":
            return web.json_response({"version": "0.31.0"})
        if path == "/metrics" and self.cluster.loads:
            return web.Response(text=self._metrics(self.cluster.loads[engine]))
        return web.json_response({"error": "no such path"}, status=404)

    def _metrics(self, load: dict[str, float]) -> str:
        usage = min(1.0, load["used_blocks"] / self.cluster.cache_blocks)
        gauges = {"num_requests_running": load["running"], "num_requests_waiting": load["waiting"]}
        gauges["kv_cache_usage_perc"] = round(usage, 4)
        return "".join(f'vllm:{name}{{model_name="{MODEL}"}} {value}\n' for name, value in gauges.items())

    async def close(self) -> None:
        """Close the servers."""
        for runner in self._runners:
            await runner.cleanup()


def _chunk(job: int, finish_reason: str | None) -> bytes:
    choice = {"index": 0, "text": "a", "logprobs": None, "finish_reason": finish_reason}
    chunk = {"id": f"cmpl-{job}", "object": "text_completion", "created": 1, "model": MODEL, "choices": [choice]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"
