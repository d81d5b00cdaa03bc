"""BatchStore: the batches, in a directory that all ingresses share; each is a directory of its own.

    batch.json       what was asked for; created once
    input.jsonl      the content of the input file, by a second name: deleting the file does not harm the batch
    cancel.json      created when the batch is to be cancelled
    claim-N.json     see journal.py
    results-N.jsonl
    progress-N.json  how far the runner with claim N is; replaced
    end.json         how the batch has ended; created once

So any ingress can answer for any batch, and no two writers change the same file. Methods block; call them in a thread.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deployments.batch.disk import Disk, read_json
from deployments.batch.file_store import new_id
from deployments.batch.options import MAX_BATCHES, BatchOptions

__all__ = ["Batch", "BatchStore", "State", "TooManyBatchesError"]

_ID = re.compile(r"batch_[0-9a-f]{32}")
_UNSET = (  # fields that have no value at first
    "output_file_id",
    "error_file_id",
    "errors",
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelled_at",
    "model",
    "usage",
)
_PROGRESS = re.compile(r"progress-(\d+)\.json")


class TooManyBatchesError(Exception):
    """No further batch can be kept."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What was asked for; times are Unix seconds.

    Attributes:
        owner: of the API key that made it; empty without keys.
        output_ttl_s: for which its output is kept; None: as other files.
    """

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    owner: str = ""
    metadata: Mapping[str, str] | None = None
    output_ttl_s: int | None = None


@dataclass(frozen=True, slots=True)
class State:
    """A batch, and how far it is: the fields of the OpenAI API that change."""

    batch: Batch
    cancelling_at: int | None = None
    progress: Mapping[str, Any] = field(default_factory=dict)
    end: Mapping[str, Any] | None = None

    @property
    def status(self) -> str:
        """The status of the OpenAI API."""
        if self.end is not None:
            return str(self.end["status"])
        if self.cancelling_at is not None:
            return "cancelling"
        if "finalizing_at" in self.progress:
            return "finalizing"
        return "in_progress" if "in_progress_at" in self.progress else "validating"

    def described(self) -> dict[str, Any]:
        """Return the Batch of the OpenAI API."""
        batch = self.batch
        empty = dict.fromkeys(_UNSET)
        return {
            **empty,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            **self.progress,
            **(self.end or {}),
            "id": batch.id,
            "object": "batch",
            "endpoint": batch.endpoint,
            "input_file_id": batch.input_file_id,
            "completion_window": batch.completion_window,
            "status": self.status,
            "created_at": batch.created_at,
            "expires_at": batch.expires_at,
            "cancelling_at": self.cancelling_at,
            "metadata": batch.metadata,
        }


class BatchStore:
    """Keeps batches.

    Args:
        disk: writes.
        options: the directory and its limits.
        clock: returns Unix seconds.
    """

    def __init__(self, disk: Disk, options: BatchOptions, clock: Callable[[], float] = time.time) -> None:
        self.directory = options.directory / "batches"
        self._disk = disk
        self._options = options
        self._clock = clock
        self._ended: set[str] = set()  # ids; a batch that has ended stays so

    def create(
        self,
        content: Path,
        input_file_id: str,
        endpoint: str,
        window_s: int,
        *,
        completion_window: str,
        owner: str = "",
        metadata: Mapping[str, str] | None = None,
        output_ttl_s: int | None = None,
    ) -> State:
        """Create a batch.

        Args:
            content: the input file's.
            input_file_id: its id.
            endpoint: of every line.
            window_s: seconds until the batch expires.
            completion_window: the same as the client has given it.
            owner: as in Batch.
            metadata: of the client.
            output_ttl_s: as in Batch.

        Raises:
            TooManyBatchesError: there is no room for another one.
        """
        if len(self._ids()) >= MAX_BATCHES:
            raise TooManyBatchesError(f"{MAX_BATCHES} batches are kept already, the most that there can be")
        now = int(self._clock())
        batch = Batch(
            new_id("batch_"),
            endpoint,
            input_file_id,
            completion_window,
            now,
            now + window_s,
            owner,
            None if metadata is None else dict(metadata),
            output_ttl_s,
        )
        path = self.path(batch.id)
        self._disk.make_directory(path)
        self._disk.publish(content, path / "input.jsonl")
        self._disk.sync_directory(self.directory)
        self._disk.create(path / "batch.json", json.dumps(asdict(batch)).encode())  # from here on it exists
        return State(batch)

    def get(self, batch_id: str) -> State | None:
        """Return a batch as it is now; None if there is none with this id."""
        if not _ID.fullmatch(batch_id):
            return None
        path = self.path(batch_id)
        content = read_json(path / "batch.json")
        if content is None:
            return None
        end = read_json(path / "end.json")
        cancel = read_json(path / "cancel.json") or {}
        progress = {} if end is not None else self._progress(path)
        return State(Batch(**content), cancel.get("cancelling_at"), progress, end)

    def all(self) -> list[State]:
        """Return all batches, the oldest first."""
        return _sorted([state for batch_id in self._ids() if (state := self.get(batch_id)) is not None])

    def unfinished(self) -> list[State]:
        """Return the batches that have not ended, the oldest first."""
        states = [self.get(batch_id) for batch_id in self._ids() if batch_id not in self._ended]
        self._ended |= {state.batch.id for state in states if state is not None and state.end is not None}
        return _sorted([state for state in states if state is not None and state.end is None])

    def cancel(self, state: State) -> State:
        """Ask the runner to end a batch; returns it as it is then."""
        if state.end is None and state.cancelling_at is None:
            content = {"cancelling_at": int(self._clock())}
            self._disk.create(self.path(state.batch.id) / "cancel.json", json.dumps(content).encode())
        return self.get(state.batch.id) or state

    def report(self, batch_id: str, claim: int, progress: Mapping[str, Any]) -> None:
        """Replace the progress of the runner with a claim."""
        self._disk.replace(self.path(batch_id) / f"progress-{claim}.json", json.dumps(progress).encode())

    def end(self, batch_id: str, end: Mapping[str, Any]) -> bool:
        """End a batch; returns False, and changes nothing, if it has ended already."""
        return self._disk.create(self.path(batch_id) / "end.json", json.dumps(end).encode())

    def tidy(self, batch_id: str) -> bool:
        """Remove what a batch no longer needs if it has ended; returns whether it has.

        Every run calls this after its last write. So nothing stays, whichever of several runs ends the batch: a file
        that is created before the end is removed by the run that ends it, and a later one by the run that created it.
        """
        path = self.path(batch_id)
        if not (path / "end.json").exists():
            return False
        for name in [*path.glob("results-*.jsonl"), *path.glob("progress-*.json"), path / "input.jsonl"]:
            self._disk.unlink(name)
        return True

    def is_output(self, batch_id: str, file_id: str) -> bool:
        """Whether the end of a batch names a file as its output."""
        end = read_json(self.path(batch_id) / "end.json") or {}
        return file_id in (end.get("output_file_id"), end.get("error_file_id"))

    def sweep(self) -> None:
        """Remove batches that ended long ago, and what crashes have left."""
        now = self._clock()
        for batch_id in self._ids():
            path, state = self.path(batch_id), self.get(batch_id)
            kept_since = path.stat().st_mtime
            if state is None or state.end is not None:
                if kept_since + self._options.file_ttl_s < now:
                    self._disk.unlink(path / "batch.json")
                    self._disk.remove_tree(path)
                else:
                    self.tidy(batch_id)
            if path.is_dir():
                for leftover in list(self._disk.leftovers(path, now - 86_400)):
                    self._disk.unlink(leftover)

    def path(self, batch_id: str) -> Path:
        """Return the directory of a batch."""
        return self.directory / batch_id

    def _progress(self, path: Path) -> dict[str, Any]:
        numbers = [int(match[1]) for name in path.iterdir() if (match := _PROGRESS.fullmatch(name.name))]
        return (read_json(path / f"progress-{max(numbers)}.json") or {}) if numbers else {}

    def _ids(self) -> list[str]:
        if not self.directory.is_dir():
            return []
        return [path.name for path in self.directory.iterdir() if _ID.fullmatch(path.name)]


def _sorted(states: list[State]) -> list[State]:
    return sorted(states, key=lambda state: state.batch.id)
