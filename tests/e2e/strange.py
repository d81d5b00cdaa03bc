"""What strange requests are made of: endpoints, headers, methods, targets, bodies, and bytes that are not HTTP."""

from __future__ import annotations

from typing import Any

COMPLETION: dict[str, Any] = {"prompt": "A KV cache", "max_tokens": 2}
# Those that read a body, and what they get.
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "model": "pagoda-demo"},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}], "model": "pagoda-demo"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5, 6]},
    "/invocations": COMPLETION,
}
# Those that read no body; the server has no such response, and `web` is the page's.
GETS = [
    "/v1/models", "/v1/models/pagoda-demo", "/v1/responses/resp_none", "/v1/responses/resp_none/input_items", "/health",
    "/ping", "/metrics", "/version", "/load", "/server_info", "/openapi.json", "/", "/web/app.js", "/live",
    "/-/healthz", "/-/routes", "/v1/files", "/v1/files/file-none", "/v1/files/file-none/content", "/v1/batches",
    "/v1/batches/batch_none",
]  # fmt: skip
# Those of a server with another task, which refuses their bodies.
OTHER_TASKS = [
    "/v1/embeddings", "/pooling", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/classify",
]  # fmt: skip
POSTS = [
    "/v1/responses/resp_none/cancel", "/v1/files", "/v1/batches", "/v1/batches/batch_none/cancel", *OTHER_TASKS,
]  # fmt: skip
DELETES = ["/v1/responses/resp_none", "/v1/files/file-none"]
PATHS = [*ENDPOINTS, *GETS, *POSTS]
# Headers that Ray Serve, Starlette, uvicorn or HAProxy read.
HEADERS = [
    ("X-Request-Disconnect-Disabled", "?1"), ("X-Request-Timeout-Seconds", "0.001"),
    ("X-Request-Timeout-Seconds", "-1"), ("X-Request-Timeout-Seconds", "x"), ("Serve_Multiplexed_Model_Id", "other"),
    ("X-Serve-Router-Replica", "x"), ("X-Request-Id", "\x7f" * 40), ("X-Request-Id", "same"),
    ("X-Request-Id", "\xff"), ("X-Session-Id", "\xff"), ("X_Session_Id", "\xff"),
    ("Serve-Multiplexed-Model-Id", "\xff"), ("Traceparent", "\xff"), ("Tracestate", "\xff"),
    ("X_Request_Id", "\xff"),
    ("X-Forwarded-For", "127.0.0.1"), ("X-Forwarded-Proto", "javascript"), ("X-Forwarded-Prefix", "/../.."),
    ("Forwarded", "for=127.0.0.1;proto=https"), ("X-Real-IP", "::1"), ("X-Haproxy-Server-State", "UP"),
    ("X-HTTP-Method-Override", "DELETE"), ("Host", "evil.example:99999"), ("Host", ""), ("Origin", "null"),
    ("Authorization", "Bearer " + "x" * 4000), ("Authorization", "Basic ///"), ("X-Api-Key", "\x01"),
    ("Cookie", "a=b; " * 400), ("Expect", "100-continue"), ("Expect", "the-impossible"), ("Connection", "Upgrade, x"),
    ("Upgrade", "websocket"), ("Upgrade", "h2c"), ("HTTP2-Settings", "AAMAAABkAARAAAAAAAIAAAAA"), ("TE", "trailers"),
    ("Keep-Alive", "timeout=99999999"), ("Connection", "keep-alive"), ("Range", "bytes=0-0,-1"),
    ("Accept", "text/html"), ("Accept-Encoding", "gzip;q=9"), ("Content-Encoding", "gzip"),
    ("Content-Encoding", "br, zstd"),
    ("Content-Type", "text/html"), ("Content-Type", "application/json; charset=utf-7"), ("Content-Type", "\xff"),
    ("Content-Type", "multipart/form-data"), ("If-None-Match", "*"), ("Max-Forwards", "0"), ("Traceparent", "00-0-0-0"),
    ("Traceparent", f"00-{'f' * 32}-{'f' * 16}-01"), ("Tracestate", "=,=;" * 99), ("Baggage", "a=" + "b" * 3000),
    ("X-Long", "b" * 20_000), ("X-Fold", "a\r\n b"),
]  # fmt: skip
# Those that HAProxy's parser rejects, with a text of its own.
UNPARSED_HEADERS = [
    ("Transfer-Encoding", "gzip, chunked"), ("Transfer-Encoding", "chunked, identity"), ("Content-Length", "+5"),
    ("Content-Length", "-1"), ("Content-Length", "99999999999999999999"), ("Content-Length", "5, 6"), ("", "empty"),
    ("a" * 9000, "b"), ("X-Long", "b" * 40_000), ("X-Null", "a\0b"), ("X Space", "a"), ("\xff", "a"),
]  # fmt: skip
METHODS = ["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND", "get", "G" * 200]
UNPARSED_METHODS = ["CONNECT", "\0"]
TARGETS = [
    "/v1/" + "a" * 9000, "/" + "a" * 20_000, "/v1/../../etc/passwd", "/v1/completions/../models", "//v1//models", "*",
    "/%00", "/%ff%fe", "/v1/completions%0d%0aX-Injected:%201", "/v1/models?" + "a=b&" * 2000,
    "/v1/responses/" + "x" * 300, "/v1/responses/%2e%2e", "/static/../../pyproject.toml",
    "v1/models", "/v1/completions;a=b", "/web/%2e%2e/%2e%2e/config.py",
]  # fmt: skip
UNPARSED_TARGETS = [
    "/" + "a" * 40_000, "http://evil.example/", "http://127.0.0.1/v1/models", "/v1/models#fragment", "", "/v1/mod els",
    "/\xe9",
]  # fmt: skip
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # HAProxy speaks HTTP/2 then
NOT_HTTP = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), HTTP2_PREFACE + bytes(9),
    b"GET /health\r\n\r\n", b"GET /health HTTP/3.0\r\n\r\n", b"\r\n" * 300, bytes(range(256)), b"SSH-2.0-x\r\n",
    b"\x04\x01\x00\x50\x7f\x00\x00\x01\x00", b"GET /health HTTP/1.1\nHost: a\n\n", b"GET\t/health\tHTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\nGET /health HTTP/1.1\r\n\r\n",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, -1, 0, 2**70, -(2**70), 1.5, 1e308, "", " ", "x" * 10_000, "\0\ud800", [], [[]], [None], {}, {"": {}},
    {"type": "object"}, [{"role": "user"}], "\u202e", "0", [-1], [2**40], {"a": [{"b": 1}] * 50},
]  # fmt: skip
FIELDS = [
    "model", "stream", "stream_options", "n", "best_of", "temperature", "top_p", "top_k", "seed", "stop", "logprobs",
    "logit_bias", "tools", "tool_choice", "response_format", "user", "metadata", "priority", "cache_salt", "echo",
]  # fmt: skip
NOT_A_BODY = [
    b"", b"{", b"[1]", b"null", b'"a"', b"\xff\xfe", b"\xef\xbb\xbf{}", b"[" * 20_000, b'{"a":' * 20_000, b"NaN",
    b'{"prompt": NaN}', b'{"prompt": 1e999}', b'{"prompt": "a", "prompt": 5}', b'{"prompt": "\xff"}', bytes(99),
    b"{}{}", b'{"prompt": ' + b"9" * 5000 + b"}", b" " * 50_000, "{}".encode("utf-16"), b'{"messages": "\\ud800"}',
]  # fmt: skip
