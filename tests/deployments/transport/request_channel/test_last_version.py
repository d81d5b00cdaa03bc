"""A rolling update: what an ingress and a replica of the last version make of this version's messages."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from deployments.errors import is_replica_loss
from deployments.transport.request_channel.codec import decode_from_ingress, encode_request, request_of
from deployments.transport.request_channel.errors import (
    HandedOverError,
    ReplicaDrainingError,
    ReplicaFullError,
    error_of,
    failure_of,
)
from deployments.transport.request_channel.messages import Failure, Submit
from engine.errors import EngineDeadError
from engine.pooling.params import PoolingParams
from engine.request import EngineRequest, KVSource
from engine.sampling_params import SamplingParams


class LastRequest(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """EngineRequest before it had ``retention``."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams = SamplingParams()
    priority: int = 0
    cache_salt: str = ""
    client: str = ""
    output_token_ids: list[int] = []
    prediction_token_ids: list[int] = []
    pooling: PoolingParams | None = None
    kv_source: KVSource | None = None


def last_error_of(failure: Failure) -> Exception:
    """As the last version made an error of a failure that is not of the request."""
    kinds: dict[str, type[Exception]] = {
        kind.__name__: kind for kind in (ReplicaFullError, ReplicaDrainingError, EngineDeadError)
    }
    return kinds.get(failure.kind, RuntimeError)(failure.message)


def submit(request: EngineRequest) -> Submit:
    message = decode_from_ingress(encode_request(1, 1, request, []))
    assert isinstance(message, Submit)
    return message


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.5), SamplingParams(top_k=10**30), SamplingParams(stop=["\ud800"])]
)
def test_a_replica_of_the_last_version_takes_a_request(params: SamplingParams) -> None:
    source = KVSource("tcp://10.0.0.1:1", "secret", 3)
    request = EngineRequest("id", [1, 2], params, 3, "salt", "client", prediction_token_ids=[5], kv_source=source)
    arrived = msgspec.msgpack.decode(submit(request).request, type=LastRequest)
    assert (arrived.priority, arrived.prediction_token_ids, arrived.kv_source) == (3, [5], source)
    assert arrived.params.temperature == params.temperature


def test_a_request_of_the_last_version_is_taken() -> None:
    old: Any = LastRequest("", [], SamplingParams(temperature=0.5), priority=3)
    message = Submit(1, 1, msgspec.Raw(msgspec.msgpack.encode(old)), b"", b"", b"", {})
    request = request_of(message, "other")
    assert (request.request_id, request.priority, request.retention) == ("other", 3, 0)


@pytest.mark.parametrize("retention", [0, 3])
def test_retention_arrives(retention: int) -> None:
    request = EngineRequest("id", [1], retention=retention)
    assert request_of(submit(request), "id") == request


def test_to_an_ingress_of_the_last_version_a_handed_over_request_has_lost_its_replica() -> None:
    error = last_error_of(failure_of(3, HandedOverError("the replica shuts down")))
    assert is_replica_loss(error)
    assert str(error) == "the replica shuts down"


def test_a_replica_of_the_last_version_that_dies_has_handed_nothing_over() -> None:
    error = error_of(Failure(3, "EngineDeadError", "gone"), "r1")
    assert type(error) is EngineDeadError
    assert error.replica == "r1"
