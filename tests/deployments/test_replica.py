"""What a replica says about options that have no effect on it. The replica itself runs in the tests of tests/e2e."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.replica import EngineReplica
from engine.config import EngineConfig


@pytest.mark.parametrize(("kv_replication", "has_tiers", "kv_transfer"), [(64, False, None), (64, True, False)])
def test_kv_replication_without_an_exchange_of_pages_is_a_warning(
    kv_replication: int, has_tiers: bool, kv_transfer: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "ray.serve"):
        assert start_transfer(kv_replication, has_tiers, kv_transfer) is None
    (record,) = caplog.records
    assert "router.kv_replication=64 has no effect" in record.getMessage()


def test_without_kv_replication_there_is_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ray.serve"):
        assert start_transfer(None, False, None) is None
    assert not caplog.records


def start_transfer(kv_replication: int | None, has_tiers: bool, kv_transfer: bool | None) -> Any:
    replica: Any = SimpleNamespace(_tiers=object() if has_tiers else None, _kv_replication=kv_replication)
    return EngineReplica._start_transfer(replica, EngineConfig(model="m", kv_transfer=kv_transfer), "127.0.0.1")
