"""A subscriber that reads nothing for longer than the heartbeats allow does not end its process."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from deployments.config import checkout_root
from tests.deployments.transport.kv_events import stalled_reader
from tests.waiting import HANG_S


@pytest.mark.parametrize(
    ("which", "expected", "said"),
    [
        ("product", 0, "has read all"),
        # libzmq's fault. If this fails, it has been corrected, and the product's socket may have heartbeats again.
        ("heartbeats", -signal.SIGABRT, "_input_stopped"),
    ],
)
def test_a_stalled_subscriber_goes_on_reading(which: str, expected: int, said: str) -> None:
    command = [sys.executable, "-m", stalled_reader.__name__, which]
    done = subprocess.run(command, cwd=checkout_root(), capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == expected, done.stderr
    assert said in done.stdout + done.stderr
