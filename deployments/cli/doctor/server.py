"""A running server, asked through its API: health, version, model, load, clock, and how long one token takes."""

from __future__ import annotations

from collections.abc import Iterable
from email.utils import parsedate_to_datetime
from time import perf_counter, time
from typing import Any

from deployments.cli.client import ServerClient, ServerError
from deployments.cli.doctor.finding import Finding, State

__all__ = ["check_server"]

MAX_SKEW_S = 5.0
FULL = 0.95  # share of KV blocks in use
PROBE = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "temperature": 0}


def check_server(client: ServerClient) -> Iterable[Finding]:
    """Ask the server; the first check that gets no answer is the last."""
    try:
        yield _health(client)
        yield from _info(client)
        yield from _load(client)
        yield _token(client)
    except ServerError as error:
        text, _, remedy = str(error).rpartition("; ")
        yield Finding("server", State.ERROR, text or str(error), remedy if text else "look at the server's log")


def _health(client: ServerClient) -> Finding:
    started = perf_counter()
    try:
        answer = client.get("/health")
    except ServerError as error:
        if error.status != 503:
            raise
        return Finding("health", State.ERROR, str(error), "look at the server's log, or at `serve status` beside it")
    milliseconds = 1e3 * (perf_counter() - started)
    if date := answer.headers.get("Date"):
        skew = parsedate_to_datetime(date).timestamp() - time()
        if abs(skew) > MAX_SKEW_S:
            remedy = "synchronise both clocks (chrony, systemd-timesyncd)"
            return Finding("health", State.WARNING, f"its clock differs from this one by {skew:.0f} s", remedy)
    return Finding("health", State.OK, f"{answer.json().get('status')}, answers in {milliseconds:.0f} ms")


def _info(client: ServerClient) -> Iterable[Finding]:
    info = client.get("/server_info").json()
    config, engine = info["config"], info["engine"]
    yield Finding("version", State.OK, f"pagoda {info['version']}, Python {info['python']}")
    facts = (f"{engine[name]} {label}" for name, label in _ENGINE_FACTS.items() if engine.get(name) is not None)
    yield Finding("model", State.OK, f"{info['model']} ({config.get('task', 'generate')}): {', '.join(facts)}")


# Of EngineInfo, as far as a server reports them.
_ENGINE_FACTS = {
    "max_model_len": "tokens of context",
    "num_blocks": "KV blocks of one engine",
    "block_size": "tokens each",
    "attention_backend": "attention",
    "dtype": "numbers",
}


def _load(client: ServerClient) -> Iterable[Finding]:
    """Check the replicas; a server without the page has no live view and reports its unfinished requests only."""
    try:
        live = client.get("/live").json()
    except ServerError as error:
        if error.status != 404:
            raise
        load = client.get("/load").json()["server_load"]
        yield Finding("load", State.OK, f"{load} unfinished requests (`web: true` would show more)")
        return
    replicas: list[dict[str, Any]] = live["replicas"]
    if not replicas:
        yield Finding("replicas", State.NOTE, "none runs", "the first request starts one, if autoscaling allows zero")
    for replica in replicas:
        blocks, queue = replica["blocks"], replica["waiting"] + replica["swapped"]
        usage = blocks["used"] / max(1, replica["num_blocks"])
        text = f"{replica['name']}: {replica['running']} running, {queue} waiting, {usage:.0%} of KV blocks in use"
        if replica["preemptions"]:
            text += f", {replica['preemptions']} preemptions"
        if usage > FULL and queue:
            remedy = "raise kv_cache_memory, lower max_num_seqs, or add replicas"
            yield Finding("replicas", State.WARNING, text, remedy)
        else:
            yield Finding("replicas", State.OK, text)


def _token(client: ServerClient) -> Finding:
    model = client.get("/v1/models").json()["data"][0]["id"]
    started = perf_counter()
    try:
        usage = client.post("/v1/chat/completions", PROBE | {"model": model}).json()["usage"]
    except ServerError as error:
        if error.status not in (400, 404, 501):  # e.g. a model without a chat template, or one of vectors
            raise
        return Finding("request", State.NOTE, f"no chat: {error}")
    milliseconds = 1e3 * (perf_counter() - started)
    return Finding("request", State.OK, f"one token after {usage['prompt_tokens']} of prompt in {milliseconds:.0f} ms")
