"""BatchOptions: where files and batches are kept, and how many bytes and lines they may have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["MAX_BATCHES", "MAX_FILES", "BatchOptions"]

MAX_FILES = MAX_BATCHES = 10_000  # a list reads all of them


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """The keys ``batches`` of the YAML.

    Attributes:
        directory: shared by all ingresses.
        max_file_bytes: of one uploaded file.
        max_total_bytes: of all files, and of the results of batches that run.
        max_lines: of one batch.
        max_line_bytes: a longer line gets an error.
        file_ttl_s: for which files are kept, unless the client asks for a shorter or longer time, and batches that
            have ended.
        max_slowdown: how many times longer batches may make the 99th percentile of the times between others' tokens.
    """

    directory: Path
    max_file_bytes: int = 200 * 2**20
    max_total_bytes: int = 10 * 2**30
    max_lines: int = 50_000
    max_line_bytes: int = 4 * 2**20
    file_ttl_s: float = 30 * 86_400.0
    max_slowdown: float = 1.1
