"""The server with steps that overlap, as on a GPU: the tests of the APIs must find no difference.

Its device is a CPU that withholds what a step has sampled until the next step was scheduled and started.
tests/gpu_rehearsal has a simulated GPU that computes later than it is asked to.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = ("test_api.py", "test_api_parameters.py", "test_tools.py")


@pytest.mark.long
def test_the_apis_answer_as_without_overlap() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not long", *(str(HERE / name) for name in FILES)],
        env=os.environ | {"PAGODA_TEST_ASYNC_SCHEDULING": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-8000:]
