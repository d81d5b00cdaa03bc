"""`python -m benchmarks.front.launch CONFIG`: the launcher, for a config file whose application is ours."""

from __future__ import annotations

import sys
from unittest.mock import patch

from benchmarks.front import IMPORT_PATH
from deployments import launch
from deployments.launcher import preflight

if __name__ == "__main__":
    with patch.object(preflight, "IMPORT_PATH", IMPORT_PATH):
        sys.exit(launch.main())
