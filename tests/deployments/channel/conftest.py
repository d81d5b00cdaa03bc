"""Fixtures of the channel's tests: a replica with a shadow engine, and ingresses."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.deployments.channel.peers import Peers


@pytest.fixture
async def peers() -> AsyncIterator[Peers]:
    made = Peers()
    yield made
    await made.close()
