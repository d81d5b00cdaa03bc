"""ResultFile: the results of a run without a server, one a line in one file, which a later run continues."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Collection
from pathlib import Path

from deployments.batch.disk import Disk
from deployments.batch.journal import Record
from engine.errors import ConfigError

__all__ = ["ResultFile"]


class ResultFile:
    """Results in the order in which they came. A last line that a crash has cut off is removed.

    Args:
        path: of the file, which is made if there is none.
        ids: of all lines of the input.
        disk: writes.

    Attributes:
        done: the ids that have a result.
        num_errors: how many of these are errors.

    Raises:
        ConfigError: the file has something else in it, or another process writes to it.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, ids: Collection[str], disk: Disk | None = None) -> None:
        self.done: set[str] = set()
        self.num_errors = 0
        self._disk = disk or Disk()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read(path, ids)
        except BlockingIOError:
            os.close(self._file)
            raise ConfigError(f"another process writes to '{path}'; wait for its end, or give another --out") from None
        except BaseException:
            os.close(self._file)
            raise

    def append(self, records: list[Record]) -> None:
        """Make results durable.

        Raises:
            OSError: they are not.
        """
        self._disk.write(self._file, b"".join(record.text + b"\n" for record in records))
        self._disk.sync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _read(self, path: Path, ids: Collection[str]) -> None:
        length = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break  # a crash has cut it off
                line_id, is_error = _described(line)
                if line_id not in ids:
                    raise ConfigError(
                        f"line {number} of '{path}' is not a result of this input; give another --out, or remove it"
                    )
                self.num_errors += is_error and line_id not in self.done
                self.done.add(line_id)
                length += len(line)
        os.ftruncate(self._file, length)


def _described(line: bytes) -> tuple[str, bool]:
    """Return the id of a result, and whether it is an error; no id if it is no result."""
    try:
        content = json.loads(line)
        response = content["response"]
        return str(content["id"]), response is None or response["status_code"] != 200
    except (ValueError, RecursionError, KeyError, TypeError):
        return "", True
