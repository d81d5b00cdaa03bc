"""The server that commands ask in tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deployments.cli.fake_server import FakeServer, fake_server


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    """A fake server on a free port."""
    with fake_server() as running:
        yield running
