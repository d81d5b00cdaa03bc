"""write_outputs: the output and the error file of a batch, made of its journal."""

from __future__ import annotations

from deployments.batch.batch_store import Batch
from deployments.batch.file_store import FileStore
from deployments.batch.journal import Journal

__all__ = ["write_outputs"]

_CHUNK = 2**20  # bytes


def write_outputs(files: FileStore, batch: Batch, journal: Journal) -> dict[str, str | None]:
    """Write the files; returns their ids as fields of the batch. An empty file is not made.

    They exist for clients once the end of the batch names them.

    Raises:
        OSError: they cannot be written.
    """
    output_id = _write(files, batch, journal, is_error=False)
    try:
        error_id = _write(files, batch, journal, is_error=True)
    except Exception:
        if output_id is not None:
            files.delete(output_id)
        raise
    return {"output_file_id": output_id, "error_file_id": error_id}


def _write(files: FileStore, batch: Batch, journal: Journal, *, is_error: bool) -> str | None:
    upload = files.begin(is_limited=False)
    try:
        chunk = bytearray()
        for text in journal.texts(is_error=is_error):
            chunk += text + b"\n"
            if len(chunk) >= _CHUNK:
                upload.write(bytes(chunk))
                chunk.clear()
        upload.write(bytes(chunk))
        if not upload.num_bytes:
            return None
        name = f"{batch.id}_{'error' if is_error else 'output'}.jsonl"
        ttl_s = batch.output_ttl_s
        return files.keep(upload, name, "batch_output", ttl_s=ttl_s, owner=batch.owner, batch=batch.id).id
    finally:
        upload.discard()
