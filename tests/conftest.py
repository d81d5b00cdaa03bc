"""Settings that every test shares."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
