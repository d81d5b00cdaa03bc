"""Whatever goes wrong with a source ends one transfer with a reason: what has come is right, the rest is computed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import sleep
from typing import Any

import pytest

from deployments.transport.pages import client as client_module
from deployments.transport.pages import conversation as conversation_module
from deployments.transport.pages import server as server_module
from deployments.transport.pages.client import PageClient
from engine.kv.tiers.source import FETCH_ERRORS, WantedPrefix
from engine.request import KVSource
from tests.deployments.transport.pages.fakes import FORMAT, PROMPT, Lender, Sink, chain_of, pair
from tests.deployments.transport.pages.proxy import proxy
from tests.deployments.transport.pages.test_transfer import random_pages, released, sink_for
from tests.waiting import until

CHILD = """
import sys, time
from deployments.observability.recorder import Recorder
from deployments.transport.pages.server import PageServer
from tests.deployments.transport.pages.fakes import FORMAT, HOST, Lender
from tests.deployments.transport.pages.test_transfer import random_pages

class Stuck(Lender):
    def lend(self, chain, first_block, num_blocks, on_ready, *, timeout_s):
        if first_block:
            print("stuck", flush=True)
        else:
            super().lend(chain, first_block, num_blocks, on_ready, timeout_s=timeout_s)

lender = Stuck(random_pages(10))
lender.lease_blocks = 4
server = PageServer(lender, HOST, max_tokens=1000, metrics=Recorder())
server.open(FORMAT)
print(server.address.endpoint, server.address.secret, flush=True)
time.sleep(600)
"""


@contextmanager
def source_process() -> Iterator[tuple[subprocess.Popen[str], KVSource]]:
    """A server in another process, which sends four blocks, prints a line, and then sends nothing."""
    command = [sys.executable, "-c", CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as process:
        try:
            assert process.stdout is not None
            endpoint, secret = process.stdout.readline().split()
            yield process, KVSource(endpoint, secret, 40)
        finally:
            process.kill()


@pytest.mark.parametrize(("number", "error"), [(signal.SIGKILL, "io"), (signal.SIGSTOP, "late")])
def test_a_source_that_dies_or_stops_costs_what_has_not_come(number: signal.Signals, error: str) -> None:
    client = PageClient(FORMAT, bytes_per_token=1.0, block_size=16)
    sink = sink_for(random_pages(10))
    with source_process() as (process, source):
        client.fetch(WantedPrefix("r", chain_of(PROMPT), 0, source), sink)
        assert process.stdout is not None
        assert process.stdout.readline() == "stuck\n"
        until(lambda: len(sink.done) == 4, "what the source has sent has come")
        process.send_signal(number)
        assert sink.wait() == error
        assert sink.pages() == random_pages(10)[:4]
        assert not client.may_help(source)  # for now
    client.close()


def test_a_source_that_does_not_listen() -> None:
    with pair(Lender(random_pages(10))) as both:
        source = both.source()
        both.server.close()
        assert both.fetch(sink_for(random_pages(10))) == "io"
        assert not both.client.may_help(source)


@pytest.mark.parametrize("offset", [2, 5000, 10_000, 41_000])
def test_a_flipped_bit_is_noticed(offset: int) -> None:
    pages = random_pages(10)

    def flip(start: int, data: bytes) -> bytes:
        changed = bytearray(data)
        if start <= offset < start + len(data):
            changed[offset - start] ^= 16
        return bytes(changed)

    with pair(Lender(pages)) as both, proxy(both.server.address.endpoint, flip) as endpoint:
        sink = sink_for(pages)
        assert both.fetch(sink, endpoint=endpoint) in ("checksum", "io")
        assert sink.pages() == pages[: len(sink.done)]
        assert len(sink.done) < 10
        assert both.fetch(whole := sink_for(pages)) is None
        assert whole.pages() == pages


@pytest.mark.parametrize("offset", [0, 3, 100, 300, 20_000])
def test_a_connection_that_breaks(offset: int) -> None:
    pages = random_pages(10)

    def cut(start: int, data: bytes) -> bytes:
        if start + len(data) > offset:
            raise OSError
        return data

    with pair(Lender(pages)) as both, proxy(both.server.address.endpoint, cut) as endpoint:
        sink = sink_for(pages)
        assert both.fetch(sink, endpoint=endpoint) == "io"
        assert sink.pages() == pages[: len(sink.done)]
        assert released(both)


@pytest.mark.parametrize(
    ("name", "value"), [("model", "another"), ("dtype", "bfloat16"), ("block_size", "16"), ("extra", "1")]
)
def test_other_pages_are_refused_once_and_for_all(name: str, value: str, caplog: pytest.LogCaptureFixture) -> None:
    with pair(Lender(random_pages(10)), client_format=FORMAT | {name: value}) as both:
        assert both.fetch(sink_for(random_pages(10))) == "refused"
        assert not both.client.may_help(both.source())
        assert f"{name} is {value!r}" in caplog.text
        assert both.rejections == {("refused",): 1}
        assert not both.lender.leases


def test_a_refusal_is_counted_before_its_client_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair(Lender(random_pages(10)), client_format=FORMAT | {"model": "another"}) as both:
        increment = both.recorder.increment

        def increment_late(*args: Any, **labels: Any) -> None:
            sleep(0.2)
            increment(*args, **labels)

        monkeypatch.setattr(both.recorder, "increment", increment_late)
        assert both.fetch(sink_for(random_pages(10))) == "refused"
        assert both.rejections == {("refused",): 1}


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with pair(Lender(random_pages(10))) as both:
        monkeypatch.setattr(conversation_module, "VERSION", 2)
        assert both.fetch(sink_for(random_pages(10))) == "refused"
        assert "version 1" in caplog.text


def test_a_wrong_secret_gets_nothing() -> None:
    with pair(Lender(random_pages(10))) as both:
        assert both.fetch(sink_for(random_pages(10)), secret="guess") == "io"
        assert both.rejections == {("secret",): 1}
        assert both.fetch(sink_for(random_pages(10))) is None
        assert both.client.may_help(both.source())


def test_a_failing_source_is_left_alone_for_longer_and_longer() -> None:
    from deployments.transport.pages.peers import Peers

    now = 100.0
    source = KVSource("tcp://127.0.0.1:1", "s", 10)
    peers = Peers(FORMAT, lambda: now)
    pauses = []
    for _ in range(100):
        assert peers.is_worth_trying(source)
        peers.note_failure(source)
        pauses.append(0)
        while not peers.is_worth_trying(source):
            now += 1
            pauses[-1] += 1
    assert pauses[:5] == [1, 2, 4, 8, 16]
    assert max(pauses) == pauses[-1] == 64


def test_a_source_whose_engine_is_slow_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "FLOOR_S", 0.1)
    lender = Lender(random_pages(10))
    lender.held_back = []
    with pair(lender) as both:
        assert both.fetch(sink_for(random_pages(10))) == "late"
        lender.held_back.pop()()
        assert released(both)  # no one waits for it any more


def test_a_busy_source_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation_module, "MAX_WAIT_S", 0.0)
    lender = Lender(pages := random_pages(10))
    lender.held_back = []
    with pair(lender) as both:
        waiting = [both.start(sink_for(pages)) for _ in range(server_module.MAX_PULLS)]
        until(lambda: len(lender.held_back or ()) == len(waiting), "all are being answered")
        assert both.fetch(sink_for(pages)) == "late"
        assert both.client.may_help(both.source())
        for deliver in lender.held_back:
            deliver()
        assert [sink.wait() for sink in waiting] == [None] * len(waiting)


def test_only_a_few_fetches_run_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_FETCHES", 1)
    lender = Lender(pages := random_pages(10))
    lender.held_back = []
    with pair(lender) as both:
        sink = both.start(sink_for(pages))
        assert not both.client.may_help(both.source())
        until(lambda: len(lender.held_back or ()) == 1, "it is being answered")
        lender.held_back.pop()()
        assert sink.wait() is None
        assert both.client.may_help(both.source())


def test_a_cancelled_sink_is_written_no_more() -> None:
    lender = Lender(pages := random_pages(10))
    lender.lease_blocks = 4
    with pair(lender) as both:
        sink = sink_for(pages)
        count = sink.block_done

        def cancel_after_block_3(index: int, checksums: list[int | None]) -> bool:
            sink.is_cancelled = index == 3
            return count(index, checksums)

        sink.block_done = cancel_after_block_3  # type: ignore[method-assign, assignment]
        assert both.fetch(sink) == "cancelled"
        assert sink.done == [0, 1, 2, 3]
        assert sink.memory[4] == [bytes(len(page or b"")) for page in pages[4]]
        assert both.client.may_help(both.source())
        assert released(both)


def test_closing_the_client_ends_its_fetches() -> None:
    lender = Lender(pages := random_pages(10))
    lender.held_back = []
    with pair(lender) as both:
        sink = both.start(sink_for(pages))
        until(lambda: lender.held_back, "it is being answered")
        both.client.close()
        assert sink.wait() == "cancelled"


def test_every_error_is_known_to_the_metric() -> None:
    errors = {*client_module._ERRORS.values(), *client_module._REASONS.values(), "io", "refused", "cancelled"}
    assert errors <= set(FETCH_ERRORS)


def test_a_sink_that_fails_is_finished() -> None:
    with pair(Lender(random_pages(10))) as both:
        sink = sink_for(random_pages(10))
        sink.page_buffers = lambda index: 1 // 0  # type: ignore[method-assign, assignment]
        assert both.fetch(sink) == "io"
        assert both.client.may_help(both.source())


def test_pages_of_another_size_are_not_taken() -> None:
    with pair(Lender(random_pages(10))) as both:
        sink = Sink(0, [[4096, 95, 40]] * 10)
        assert both.fetch(sink) == "io"
        assert sink.done == []
        assert all(not any(page) for of in sink.memory for page in of if page is not None)


def test_a_process_without_threads_fetches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(*args: object) -> None:
        raise RuntimeError("can't start new thread")

    with pair(Lender(random_pages(10))) as both:
        monkeypatch.setattr(both.client._threads, "submit", no_thread)
        assert both.fetch(sink_for(random_pages(10))) == "io"
        monkeypatch.undo()
        assert both.fetch(sink_for(random_pages(10))) is None
