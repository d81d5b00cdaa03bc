"""with_progress: shows how far loading is, as a bar on a terminal and as lines in a log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from time import perf_counter
from typing import TypeVar

__all__ = ["with_progress"]

LOG_INTERVAL_S = 10.0

logger = logging.getLogger(__name__)


Item = TypeVar("Item")


def with_progress(weights: Iterator[tuple[str, Item]], sizes: Mapping[str, int]) -> Iterator[tuple[str, Item]]:
    """Yield the weights and show how many of their bytes the caller has processed.

    A terminal gets a bar. Elsewhere, as in a replica, a load that takes long is logged every ten seconds.

    Args:
        weights: by name.
        sizes: the bytes of each, by name.
    """
    from tqdm import tqdm

    total, done = sum(sizes.values()), 0
    started = logged = perf_counter()
    is_terminal = sys.stderr.isatty()
    with tqdm(total=total, desc="Loading weights", unit="B", unit_scale=True, disable=not is_terminal) as bar:
        for name, weight in weights:
            yield name, weight
            del weight
            bar.update(sizes[name])
            done += sizes[name]
            now = perf_counter()
            if not is_terminal and now - logged >= LOG_INTERVAL_S and done < total:
                logged = now
                remaining = (now - started) * (total - done) / max(done, 1)
                logger.info(
                    "Loading weights: %.1f of %.1f GB (%d%%), about %.0f seconds to go",
                    *(done / 1e9, total / 1e9, 100 * done // total, remaining),
                )
