"""Ranks as Ray actors: what their handle does without Ray. tests/e2e/test_ranks_on_nodes.py has engines with them."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from deployments.serve.rank_actors import _RankHandle


def test_ending_a_rank_after_ray_does_not_start_ray_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray may shut down first when the process of a replica ends; its functions would start another cluster."""
    started: list[bool] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda: started.append(True))
    nothing: Any = object()
    handle = _RankHandle(nothing, nothing)
    handle.kill()
    assert handle.wait() is None
    assert not started
