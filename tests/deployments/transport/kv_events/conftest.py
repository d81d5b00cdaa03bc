"""Fixtures of the KV transport."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.deployments.transport.kv_events.transport import (
    HOST,
    LossyPublisher,
    Transport,
)
from tests.waiting import until


@pytest.fixture
def transport() -> Iterator[Transport]:
    before = set(threading.enumerate())
    with ExitStack() as stack:
        yield Transport(stack)
    until(lambda: set(threading.enumerate()) <= before, "all threads have ended", pause_s=0.002)


@pytest.fixture
def lossy() -> Iterator[LossyPublisher]:
    lossy = LossyPublisher("r1", HOST, heartbeat_s=0.05)
    yield lossy
    lossy.close()
