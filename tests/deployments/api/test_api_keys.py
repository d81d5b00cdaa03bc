"""API keys: their sources, the paths that are open without a key, and browsers that send a key by HTTP Basic."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from deployments.api.api_keys import ApiKeys, RequireKey
from deployments.app import build_app
from deployments.config import AppConfig
from deployments.ingress import Ingress
from deployments.routing.cluster_view import cluster_view
from engine.errors import ConfigError
from tests.deployments.fakes import FakeEngines

KEY, OTHER = "k" * 16, "0123456789abcdef0123456789abcdef"
CHAT = {"messages": [{"role": "user", "content": "the cache"}]}


def basic(key: str, user: str = "anybody") -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{key}".encode()).decode()}


# --- where keys come from ---------------------------------------------------------------------------------------------


def test_without_a_source_there_are_no_keys() -> None:
    assert not ApiKeys.from_environment({})


@pytest.mark.parametrize("text", [f"{KEY},{OTHER}", f" {KEY}\n\t{OTHER} ", f"{KEY}, {OTHER},"])
def test_keys_of_the_environment(text: str) -> None:
    keys = ApiKeys.from_environment({"PAGODA_API_KEYS": text})
    assert keys
    assert keys.accept(KEY.encode())
    assert keys.accept(OTHER.encode())
    assert not keys.accept(KEY[:-1].encode())
    assert not keys.accept(b"")


def test_keys_of_a_file_count_beside_those_of_the_environment(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"\n{KEY}  \r\n\n")
    keys = ApiKeys.from_environment({"PAGODA_API_KEYS_FILE": str(tmp_path / "keys"), "PAGODA_API_KEYS": OTHER})
    assert keys.accept(KEY.encode())
    assert keys.accept(OTHER.encode())


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"PAGODA_API_KEYS": ""}, "PAGODA_API_KEYS holds no key; unset the variable"),
        ({"PAGODA_API_KEYS": f"{KEY},short-secret"}, "key 2 of PAGODA_API_KEYS has 12 characters, fewer than 16; make"),
        ({"PAGODA_API_KEYS": "sécret-sécret-sécret"}, "characters that no header can carry"),
        ({"PAGODA_API_KEYS_FILE": "nowhere/keys"}, "PAGODA_API_KEYS_FILE='nowhere/keys' cannot be read (No such file"),
        ({"PAGODA_API_KEYS_FILE": ""}, "cannot be read"),
    ],
)
def test_a_mistake_names_the_remedy_and_never_a_key(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ApiKeys.from_environment(environ)
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe\x00"])
def test_a_file_without_keys(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "keys").write_bytes(content)
    with pytest.raises(ConfigError, match="PAGODA_API_KEYS_FILE"):
        ApiKeys.from_environment({"PAGODA_API_KEYS_FILE": str(tmp_path / "keys")})


def test_a_line_with_white_space_is_not_two_keys(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{KEY} {KEY}\n")
    with pytest.raises(ConfigError, match="no header can carry"):
        ApiKeys.from_environment({"PAGODA_API_KEYS_FILE": str(tmp_path / "keys")})


def test_bad_keys_end_the_deployment_where_it_is_built(tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_API_KEYS", "short")
    with pytest.raises(ConfigError, match="fewer than 16"):
        build_app({"model": str(tokenizer_path)})


def test_a_node_without_the_keys_does_not_serve_openly(tokenizer_path: Path) -> None:
    config: Any = AppConfig.parse({"model": str(tokenizer_path)})
    with pytest.raises(ConfigError, match="set it on every node"):
        Ingress(FakeEngines([[]]), config, needs_key=True)  # type: ignore[arg-type]


# --- who may ask ------------------------------------------------------------------------------------------------------


@pytest.fixture
def serve(
    tokenizer_path: Path, engines: FakeEngines, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., TestClient]]:
    """Serve the API with keys."""
    monkeypatch.setattr("deployments.ingress.RayExporter.start", lambda self: None)
    monkeypatch.setenv("PAGODA_API_KEYS", f"{KEY} {OTHER}")
    cluster_view.cache_clear()
    opened: list[TestClient] = []

    def make(**options: Any) -> TestClient:
        config = AppConfig.parse({"model": str(tokenizer_path), "model_name": "tiny", **options})
        ingress: Any = Ingress(engines, config, needs_key=True)  # type: ignore[arg-type]
        client = TestClient(ingress.__serve_build_asgi_app__(), base_url="http://pagoda")
        opened.append(client.__enter__())
        return client

    yield make
    for client in opened:
        client.__exit__()


def test_every_path_but_three_needs_a_key(serve: Callable[..., TestClient]) -> None:
    client = serve()
    app: Any = client.app
    paths = {route.path for route in app.router.routes} | {"/ping", "/nothing", "/docs", "/health/", "/v1//models"}
    assert {"/", "/live", "/web/{name}", "/metrics", "/v1/models", "/v1/chat/completions"} <= paths
    for path in paths:
        for method in ("GET", "POST", "OPTIONS", "DELETE"):
            refused = client.request(method, path, follow_redirects=False).status_code == 401
            assert refused == (path not in ("/health", "/ping", "/version")), (method, path)
    assert client.get("/health").status_code == 200
    assert client.get("/version").status_code == 200


def test_a_refusal_has_the_apis_shape(serve: Callable[..., TestClient]) -> None:
    answer = serve().get("/v1/models", headers={"Authorization": "Bearer wrong-wrong-wrong"})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert "wrong-wrong" not in answer.text


@pytest.mark.parametrize("header", [f"Bearer {KEY}", f"bearer {OTHER}", f"BEARER   {KEY} "])
def test_a_right_key_is_accepted(serve: Callable[..., TestClient], header: str) -> None:
    client = serve()
    assert client.get("/v1/models", headers={"Authorization": header}).status_code == 200
    assert client.post("/v1/chat/completions", json=CHAT, headers={"Authorization": header}).status_code == 200


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        KEY,
        f"Token {KEY}",
        f"Bearer {KEY}x",
        f"Bearer {KEY} {KEY}",
        f"Bearer \xff\xfe{KEY}",
        "Basic",
        "Basic !!!",
        f"Basic {KEY}",
    ],
)
def test_invalid_keys_are_refused(serve: Callable[..., TestClient], header: str) -> None:
    answer = serve().get("/v1/models", headers={"Authorization": header.encode("latin-1")})  # type: ignore[dict-item]
    assert answer.status_code == 401


def test_the_host_header_and_the_query_open_nothing(serve: Callable[..., TestClient]) -> None:
    client = serve()
    assert client.get("/v1/models?path=/health", headers={"Host": "x/health"}).status_code == 401
    assert client.get("/v1/models/%2Fhealth").status_code == 401


# --- browsers ---------------------------------------------------------------------------------------------------------

OPENING = {"Accept": "text/html,application/xhtml+xml", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Site": "none"}


def test_a_browser_that_opens_the_page_asks_for_the_key(serve: Callable[..., TestClient]) -> None:
    client = serve()
    answer = client.get("/", headers=OPENING)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Basic ")
    assert client.get("/", headers=OPENING | basic("wrong-wrong-wrong")).status_code == 401
    assert client.get("/", headers=OPENING | basic(KEY)).status_code == 200
    assert client.get("/web/app.js", headers=basic(OTHER, user="")).status_code == 200
    # A script's own requests must not make the browser ask again.
    assert client.get("/live", headers={"Accept": "*/*"}).headers["www-authenticate"] == "Bearer"


def test_without_the_page_no_browser_asks(serve: Callable[..., TestClient]) -> None:
    assert serve(web=False).get("/", headers=OPENING).headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "same-origin", "Origin": "http://pagoda"}, 200),
        ({"Sec-Fetch-Site": "cross-site", "Origin": "http://evil"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "none"}, 403),
        ({"Origin": "http://pagoda"}, 200),  # over plain HTTP browsers send no Sec-Fetch-Site
        ({"Origin": "http://evil"}, 403),
        ({"Origin": "null"}, 403),
        ({}, 200),  # curl --user
    ],
)
def test_another_site_cannot_use_the_key_that_a_browser_keeps(
    serve: Callable[..., TestClient], headers: dict[str, str], status: int
) -> None:
    client = serve()
    assert client.post("/v1/chat/completions", json=CHAT, headers=headers | basic(KEY)).status_code == status
    # Who knows the key itself is no browser's victim.
    bearer = {"Authorization": f"Bearer {KEY}"}
    assert client.post("/v1/chat/completions", json=CHAT, headers=headers | bearer).status_code == 200


# --- other kinds of requests ------------------------------------------------------------------------------------------


async def _answer(scope: Scope) -> list[Message]:
    """Return the status of a guarded application that answers 200 to every request."""
    sent: list[Message] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    guarded = RequireKey(application, ApiKeys([KEY]), open_paths={"/health", "/version"}, prompts_browser=True)
    await guarded(scope, receive, send)
    return sent


@pytest.mark.parametrize(
    ("root", "path", "status"),
    [
        ("", "/health", 200),
        ("/llm", "/llm/health", 200),
        ("/llm/", "/llm/version", 200),
        ("/llm", "/llm/v1/models", 401),
        ("/llm", "/llm", 401),
        ("", "/llm/health", 401),
        ("/v1", "/v1/models", 401),
    ],
)
async def test_paths_are_matched_below_the_route_prefix(root: str, path: str, status: int) -> None:
    sent = await _answer({"type": "http", "method": "GET", "root_path": root, "path": path, "headers": []})
    assert sent[0]["status"] == status


async def test_a_websocket_is_closed() -> None:
    sent = await _answer({"type": "websocket", "path": "/health", "headers": []})
    assert [message["type"] for message in sent] == ["websocket.close"]
