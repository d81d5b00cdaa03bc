"""Ray's own modules warn while they are imported, which is no mistake of a manifest."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray.serve.schema  # noqa: F401
