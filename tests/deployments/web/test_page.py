"""The web page's files and headers, and its live data."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from deployments.config import AppConfig
from deployments.ingress import Ingress
from deployments.observability.recorder import Recorder
from deployments.routing.recently_routed import RoutedRequest
from deployments.transport.pages.transfer_log import Transfer
from deployments.web.live_view import EngineSnapshot, LiveView
from deployments.web.page import FOLDER
from engine.kv.block_map import BlockMap
from engine.observability.load import EngineStats
from engine.observability.metrics import (
    CACHE_HITS,
    CACHE_QUERIES,
    GENERATION_TOKENS,
    PREEMPTIONS,
    PROMPT_TOKENS,
    STEP_TOKENS,
    TIER_BLOCKS,
    TIER_CAPACITY,
    TIER_HITS,
    TIER_TOKENS,
)
from tests.deployments.fakes import FakeEngines
from tests.waiting import until_in_loop

FILES = sorted(FOLDER.iterdir())


# --- files ------------------------------------------------------------------------------------------------------------


def test_the_page_and_all_its_files_are_served(client: TestClient) -> None:
    page = client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "<title>Pagoda</title>" in page.text
    kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html"}
    for path in FILES:
        answer = client.get(f"/web/{path.name}")
        assert answer.content == path.read_bytes()
        assert answer.headers["content-type"].startswith(kinds[path.suffix])


def test_every_reference_is_to_a_file_of_the_page() -> None:
    referred = set()
    for path in FILES:
        text = path.read_text()
        assert re.findall(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)[a-z]\S*", re.sub(r"//\s.*", "", text)) == [], path
        referred |= set(re.findall(r'(?:src|href)="web/([^"]+)"', text))
        referred |= set(re.findall(r'from "\./([^"]+)"', text))
    names = {path.name for path in FILES}
    assert referred == names - {"index.html"}
    assert sum(path.stat().st_size for path in FILES) < 100_000


def test_nothing_is_inline_and_no_text_becomes_html() -> None:
    page = (FOLDER / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script>|javascript:", page)
    for path in FILES:
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", path.read_text()), path


@pytest.mark.parametrize("path", ["/", "/web/app.js", "/web/style.css"])
def test_security_headers_are_set(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/", "/web/app.js"])
def test_files_are_revalidated_by_etag(client: TestClient, path: str) -> None:
    first = client.get(path)
    assert first.headers["cache-control"] == "no-cache"
    for held in (first.headers["etag"], f'"x", W/{first.headers["etag"]}'):
        again = client.get(path, headers={"If-None-Match": held})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
    assert client.get(path, headers={"If-None-Match": '"x"'}).content == first.content


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fapp.py", "%2e%2e/ingress.py", "", "app.js/"])
def test_nothing_else_is_served(client: TestClient, name: str) -> None:
    answer = client.get(f"/web/{name}", follow_redirects=False)
    assert answer.status_code in (404, 307)
    if answer.status_code == 404:
        assert answer.json()["error"]["type"] == "not_found_error"


def test_web_false_disables_it(tokenizer_path: Path, engines: FakeEngines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.ingress.RayExporter.start", lambda self: None)
    config = AppConfig.parse({"model": str(tokenizer_path), "web": False})
    ingress: Any = Ingress(engines, config)  # type: ignore[arg-type]
    with TestClient(ingress.__serve_build_asgi_app__()) as client:
        for path in ("/", "/live", "/web/app.js"):
            assert client.get(path).status_code == 404
            assert client.get(path).json()["error"]["message"] == f"{path} does not exist"
        assert client.get("/version").status_code == 200


# --- live data --------------------------------------------------------------------------------------------------------


def snapshot() -> EngineSnapshot:
    recorder = Recorder()
    recorder.increment(PROMPT_TOKENS, 90)
    recorder.increment(GENERATION_TOKENS, 7)
    recorder.increment(CACHE_QUERIES, 90)
    recorder.increment(CACHE_HITS, 64)
    recorder.increment(PREEMPTIONS, 2, kind="swap")
    recorder.increment(PREEMPTIONS, 1, kind="recompute")
    recorder.observe(STEP_TOKENS, 5)
    recorder.set(TIER_BLOCKS, 7, tier="host")
    recorder.set(TIER_CAPACITY, 20, tier="host")
    recorder.increment(TIER_HITS, 32, tier="host")
    recorder.increment(TIER_TOKENS, 48, tier="host", direction="in")
    recorder.increment(TIER_TOKENS, 160, tier="host", direction="out")
    recorder.increment(TIER_TOKENS, 16, tier="peer", direction="out")
    stats = EngineStats(3, 2, 1, 0, 0, 0)
    return EngineSnapshot.take(stats, recorder.snapshot(), BlockMap(5, 2, bytes([1, 1, 0, 0, 0, 2, 0, 0, 0])))


class Cluster:
    """Counts the collections."""

    def __init__(self) -> None:
        self.now = 100.0
        self.num_asked = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.routed: dict[str, list[RoutedRequest]] = {}
        self.transfers: dict[str, tuple[Transfer, ...]] = {}

    async def live(self) -> dict[str, EngineSnapshot]:
        self.num_asked += 1
        await asyncio.sleep(0)
        await self.may_answer.wait()
        return {
            name: replace(snapshot(), endpoint=f"tcp://{name}:1", transfers=self.transfers.get(name, ()))
            for name in "ba"
        }

    async def recently_routed(self) -> dict[str, list[RoutedRequest]]:
        return self.routed

    def view(self) -> LiveView:
        return LiveView("tiny", self, lambda: self.now)


async def test_the_documented_shape() -> None:
    cluster = Cluster()
    nothing = 0.0, 0.0, 0.0, 0.0, None
    cluster.transfers = {
        "a": (Transfer("tcp://b:1", 7.0, 0.5, 512, 4096, True), Transfer("tcp://gone:1", 8.0, 0.25, 64, 512, False)),
        "b": (Transfer("tcp://a:1", 9.0, 0.125, 16, 128, False),),
    }
    cluster.routed = {
        "i": [RoutedRequest(5.0, "a", "hit", 90, 64, 64, 0.1, 0.02, 0.01, 0.03, 0.2, "b", 16, 0.05, 0.12, 0.15)],
        "j": [RoutedRequest(6.0, "b", "cold", 30, 0, 0, *nothing), RoutedRequest(4.0, "b", "cold", 31, 0, 0, *nothing)],
    }
    state = json.loads(await cluster.view().body())
    assert state["model"] == "tiny"
    assert [replica["name"] for replica in state["replicas"]] == ["a", "b"]
    assert state["replicas"][0] == {
        "name": "a",
        "running": 3,
        "waiting": 2,
        "swapped": 1,
        "prompt_tokens": 90,
        "generated_tokens": 7,
        "query_tokens": 90,
        "hit_tokens": 64,
        "evicted_blocks": 0,
        "preemptions": 3,
        "blocks": {"free": 1, "cached": 1, "used": 3, "shared": 2},
        "num_blocks": 5,
        "blocks_per_cell": 2,
        "cells": base64.b64encode(bytes([1, 1, 0, 0, 0, 2, 0, 0, 0])).decode(),
        "tiers": [
            {"name": "host", "blocks": 7, "num_blocks": 20, "hit_tokens": 32, "in_tokens": 48, "out_tokens": 160},
            {"name": "peer", "blocks": 0, "num_blocks": 0, "hit_tokens": 0, "in_tokens": 0, "out_tokens": 16},
        ],
    }
    moved = [(item["source"], item["target"], item["time"]) for item in state["transfers"]]
    assert moved == [("a", "b", 9.0), ("tcp://gone:1", "a", 8.0), ("b", "a", 7.0)]
    assert state["transfers"][2] == {
        "time": 7.0,
        "seconds": 0.5,
        "source": "b",
        "target": "a",
        "tokens": 512,
        "bytes": 4096,
        "is_running": True,
    }
    assert [(request["ingress"], request["time"]) for request in state["routed"]] == [
        ("j", 6.0),
        ("i", 5.0),
        ("j", 4.0),
    ]
    assert state["routed"][1] == {
        "time": 5.0,
        "ingress": "i",
        "replica": "a",
        "outcome": "hit",
        "prompt_tokens": 90,
        "predicted_tokens": 64,
        "best_tokens": 64,
        "queue_s": 0.1,
        "prefill_s": 0.02,
        "others_s": 0.01,
        "decode_s": 0.03,
        "next_s": 0.2,
        "source": "b",
        "fetched_tokens": 16,
        "fetch_s": 0.05,
        "predicted_s": 0.12,
        "measured_s": 0.15,
    }


async def test_many_pages_share_one_collection_per_second() -> None:
    cluster = Cluster()
    view = cluster.view()
    bodies = await asyncio.gather(*(view.body() for _ in range(50)))
    assert (cluster.num_asked, len(set(bodies))) == (1, 1)
    cluster.now += 0.5
    await view.body()
    assert cluster.num_asked == 1
    cluster.now += 0.5
    assert await view.body() != bodies[0]  # the time is another
    assert cluster.num_asked == 2


async def test_a_cancelled_poll_does_not_affect_the_others() -> None:
    cluster = Cluster()
    view = cluster.view()
    first, second = asyncio.create_task(view.body()), asyncio.create_task(view.body())
    cluster.may_answer.clear()
    await until_in_loop(lambda: cluster.num_asked == 1, "the first poll asks")
    first.cancel()
    cluster.may_answer.set()
    assert json.loads(await second)["replicas"]
    assert cluster.num_asked == 2


def test_live_answers_without_a_replica(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.serve.replicas.all_ingresses", lambda: None)
    answer = client.get("/live")
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    assert (answer.json()["replicas"], answer.json()["routed"]) == ([], [])
