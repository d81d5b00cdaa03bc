"""Ray's own modules warn while they are imported; manifests are not the cause."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray.serve.schema  # noqa: F401
