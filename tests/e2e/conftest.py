"""The servers that tests share, and clients of them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from kernels.cgroup import available_cpus
from tests.deployments.collector import Collector, collecting
from tests.e2e.server import Server, running_server
from tests.waiting import HANG_S

pytest.register_assert_rewrite("tests.e2e.browser")  # whose assertion would not say which requests failed

SHARED_SERVERS = ("small_server", "public_server", "server")  # in the order in which they run
MAX_RUNNING, MAX_WAITING, TIMEOUT_S = 2, 3, 60.0  # of the requests to the small server
SMALL_ENGINES, SMALL_BLOCKS = 2, 230  # of which one runs; a context is 128 blocks
PUBLIC_HOST = "0.0.0.0"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of a shared server together, and last those that stop it, so that no two servers run beside."""
    items.sort(key=_order)


def _order(item: pytest.Item) -> tuple[int, bool]:
    if Path(__file__).parent not in item.path.parents:
        return (-1, False)
    names = [*getattr(item, "fixturenames", ()), _parameters(item).get("either_server")]
    servers = [SHARED_SERVERS.index(name) for name in names if name in SHARED_SERVERS]
    return (max(servers, default=-1), item.get_closest_marker("stops_server") is not None)


def _parameters(item: pytest.Item) -> dict[str, Any]:
    call = getattr(item, "callspec", None)
    return {} if call is None else dict(call.params)


@pytest.fixture
def ray_dir() -> Iterator[Path]:
    """A directory for Ray with a short name, because socket paths are limited to 107 characters."""
    path = Path(tempfile.mkdtemp(prefix="pg"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """The collector to which the shared server exports its spans."""
    with collecting() as receiver:
        yield receiver


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Server]:
    """The server that most tests share: the shipped config in float32, with bodies of at most 1 MiB, and traced.

    In bfloat16 two tokens often have exactly equal logits, and the batch decides which one is greedy. In float32 texts
    are reproducible.
    """

    def change(args: dict[str, Any]) -> None:
        args["limits"]["max_body_bytes"] = 2**20
        args["engine"]["dtype"] = "float32"
        args["batches"].update(directory=str(tmp_path_factory.mktemp("batches")), max_file_bytes=2**20)

    traces = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{collector.url}/v1/traces", "OTEL_BSP_SCHEDULE_DELAY": "200"}
    with running_server(tmp_path_factory.mktemp("server"), change, environment=traces) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    """A plain HTTP client."""
    with httpx.Client(base_url=server.url, timeout=HANG_S) as plain:
        yield plain


@pytest.fixture(scope="session")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with room for two running and three waiting requests, and a timeout of a minute.

    It is to have two engines, and this machine has room for one. Its KV pool is smaller than two contexts, and its
    queue shorter than a burst, so that a load causes preemptions and rejections.
    """

    def change(args: dict[str, Any]) -> None:
        args["replicas"].update(num_engine_replicas=SMALL_ENGINES, cpus_per_engine=0.6 * available_cpus())
        del args["engine"]["kv_cache_memory"]
        args["engine"].update(max_num_seqs=MAX_RUNNING, num_threads=1, num_blocks=SMALL_BLOCKS, swap_space_gib=0.002)
        args["limits"].update(max_queued_requests=24, max_queued_requests_per_engine=MAX_WAITING)
        args["limits"].update(request_timeout_s=TIMEOUT_S, stall_timeout_s=TIMEOUT_S)
        args["limits"].update(health_check_period_s=1, health_check_timeout_s=TIMEOUT_S)  # tests stop the engine

    # How often Ray's processes report to the agent, 10 s by default; the agent drops a gauge after twice as long.
    environment = {"RAY_metrics_report_interval_ms": "3000"}
    with running_server(tmp_path_factory.mktemp("small"), change, environment) as running:
        yield running


def make_public(args: dict[str, Any]) -> None:
    """Change the public server's config.

    It has two engines in float32 whose steps overlap, as on a GPU: their device is a CPU that withholds what a step has
    sampled until the next step was scheduled and started. (tests/gpu_rehearsal has a simulated GPU that computes later
    than it is asked to.) The CPU shares leave room on two cores for a second generation of replicas.
    """
    args["engine"] |= {"dtype": "float32", "async_scheduling": True}
    args["replicas"] |= {"num_ingress_replicas": 2, "cpus_per_engine": 0.1, "cpus_per_ingress": 0.1}
    # One test waits for a stall. On a slow machine other requests stall too, and move as often as they must.
    args["limits"].update(stall_timeout_s=8.0, max_migrations=100)


PROXIED = dict.fromkeys(("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"), "http://127.0.0.1:9")


@pytest.fixture(scope="session")
def public_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server that long tests share, as it is run for other machines: on all addresses, with an API key.

    Its environment names a proxy, through which it can reach none of its own processes.
    """
    directory, key = tmp_path_factory.mktemp("public"), "a-key-of-the-tests"
    keys = directory / "keys"
    keys.write_text(f"{key}\n")
    environment = {"PAGODA_API_KEYS_FILE": str(keys), **PROXIED}
    with running_server(directory, make_public, environment=environment, host=PUBLIC_HOST) as running:
        running.key = key
        yield running


@pytest.fixture(params=["server", pytest.param("public_server", marks=pytest.mark.long)])
def either_server(request: pytest.FixtureRequest) -> Server:
    """Each of two servers: steps overlap on one of them, and a client must find no difference."""
    running: Server = request.getfixturevalue(request.param)
    return running


@pytest.fixture
def http(either_server: Server) -> Iterator[httpx.Client]:
    """A plain HTTP client of each of the two servers."""
    with httpx.Client(base_url=either_server.url, headers=either_server.headers, timeout=HANG_S) as plain:
        yield plain


@pytest.fixture
def api(either_server: Server) -> Iterator[openai.OpenAI]:
    """OpenAI's client of each of the two servers."""
    key = either_server.key or "none"
    with openai.OpenAI(base_url=f"{either_server.url}/v1", api_key=key, timeout=HANG_S, max_retries=0) as official:
        yield official
