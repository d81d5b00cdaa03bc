"""Only a machine with a GPU collects these tests."""

from __future__ import annotations

import os

import torch

_HAS_GPU = torch.cuda.is_available() and not os.environ.get("PAGODA_GPU_REHEARSAL")
collect_ignore_glob = [] if _HAS_GPU else ["test_*.py"]
