"""A router that is an HTTP server: takes the options of vllm-router and goes round robin, or dies or hangs."""

from __future__ import annotations

import argparse
import asyncio
import os
from itertools import count
from typing import Any

import aiohttp
from aiohttp import web

SESSION = web.AppKey("session", aiohttp.ClientSession)
FAULTY = 5  # the request that a fault hits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--policy", choices=("round_robin", "die", "hang"))
    parser.add_argument("--worker-urls", nargs="+")
    options, _ = parser.parse_known_args()
    numbers = count()

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def workers(request: web.Request) -> web.Response:
        return web.json_response({"workers": [{"url": url, "is_healthy": True} for url in options.worker_urls]})

    async def complete(request: web.Request) -> web.StreamResponse:
        number, body = next(numbers), await request.read()
        if number == FAULTY and options.policy == "die":
            print("out of luck", flush=True)
            os._exit(3)
        if number == FAULTY and options.policy == "hang":
            await asyncio.Event().wait()
        url = options.worker_urls[number % len(options.worker_urls)] + request.path
        response = web.StreamResponse()
        async with app[SESSION].post(url, data=body) as answer:
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
        return response

    async def session(app: web.Application) -> Any:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as app[SESSION]:
            yield

    app = web.Application(client_max_size=1 << 28)
    app.cleanup_ctx.append(session)
    app.add_routes([web.get("/v1/models", models), web.get("/workers", workers), web.post("/v1/completions", complete)])
    web.run_app(app, host="127.0.0.1", port=options.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
