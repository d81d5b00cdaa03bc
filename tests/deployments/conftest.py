"""Fixtures of the deployment's tests: fakes of what Serve would give."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own modules warn while they are imported
    import ray.serve  # noqa: F401
