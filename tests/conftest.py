"""Settings that every test shares."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

# Without a GPU, Triton interprets kernels. It decides when it is imported, which transformers' models do, so this comes
# before every other import. The rehearsal replaces the launches, and needs functions as the compiler sees them.
if not (Path("/dev/nvidiactl").exists() or os.environ.get("PAGODA_GPU_REHEARSAL")):
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# The same examples every time, so that a failure is repeated by running it again, and no opinion on how fast they are:
# the machine may be busy. New examples: HYPOTHESIS_PROFILE=random. For mutants: a failure need not be made small.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("mutation", settings.get_profile("repeatable"), phases=[Phase.explicit, Phase.generate])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a test that only `make test-all` runs, if its marker does not say why."""
    for item in items:
        for mark in item.iter_markers("exhaustive"):
            if not mark.args:
                raise pytest.UsageError(f"{item.nodeid}: say why in the marker: exhaustive('a soak of N minutes')")


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of every later garbage collection, which would walk it in vain."""
    gc.collect()
    gc.freeze()
